"""Convolutions of images: filters from released moments of patches, or trainable for gradient methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fed_dp.models.network import Network, Shape
from fed_dp.models.networks.features import Layers
from fed_dp.models.networks.scattering import Whitening
from fed_dp.options import Size

if TYPE_CHECKING:
    from torch import nn


class PatchFiltersNetwork(Network):
    """Convolution, pooling, principal components. Two layers pool by 2 each, one by 4."""

    name: Literal["patch-filters"] = "patch-filters"
    offers = "filters"
    filters: Size | None = None  # of a convolution
    components: Size | None = None
    whitening: Whitening | None = None
    layers: Layers | None = None

    @property
    def stages(self) -> int:
        """One for each layer, that of the components, and the head's."""
        return (self.layers or 1) + 2

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from torch import nn

        from fed_dp.models.encoders import Compression, Encoded, PatchFilters, pooled

        channels, height, width = self.image(shape, at_least=4)
        filters, layers = self.filters or 12, self.layers or 1
        parts: list[nn.Module] = []
        for layer in range(layers):
            pool = 4 if layers == 1 else 2
            parts.append(PatchFilters(channels, 5 if layer == 0 else 3, filters, pool))
            channels, height, width = 2 * filters, pooled(height, pool), pooled(width, pool)
        count = self.components or min(400, channels * height * width)
        whitening = 0.5 if self.whitening is None else self.whitening
        return Encoded(
            [*parts, nn.Flatten(2), Compression(channels, height * width, count, whitening)], count, classes
        )


class PatchCnn(Network):
    """The layers of patch-filters, trainable, for gradient methods."""

    name: Literal["patch-cnn"] = "patch-cnn"
    filters: Size | None = None

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from torch import nn

        from fed_dp.models.encoders import pooled
        from fed_dp.models.layers import BothSigns

        channels, height, width = self.image(shape, at_least=4)
        filters = self.filters or 12
        return nn.Sequential(
            nn.Conv2d(channels, filters, 5, padding=2),
            BothSigns(),
            nn.AvgPool2d(4, ceil_mode=True),
            nn.Flatten(),
            nn.Linear(2 * filters * pooled(height, 4) * pooled(width, 4), classes),
            nn.LogSoftmax(dim=1),
        )
