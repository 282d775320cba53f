"""Wavelet scattering of images under a head: compressed, projected, or as it is for gradient methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from fed_dp.models.network import Network, Shape
from fed_dp.options import Size

if TYPE_CHECKING:
    from torch import nn

Whitening = Annotated[float, Field(ge=0, le=1)]  # 0: variances as they are, 1: all alike


class ScatteringNetwork(Network):
    """Scattering features, compressed to principal components from released moments."""

    name: Literal["scattering"] = "scattering"
    offers = "encoder"
    components: Size | None = None
    whitening: Whitening | None = None

    @property
    def stages(self) -> int:
        """That of the components, and the head's."""
        return 2

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from fed_dp.models.encoders import Compression, Encoded, Scattered

        scattered = Scattered(self.image(shape, at_least=8))
        count = self.components or min(400, scattered.channels * scattered.positions)
        whitening = 0.5 if self.whitening is None else self.whitening
        compression = Compression(scattered.channels, scattered.positions, count, whitening)
        return Encoded([scattered, compression], count, classes)


class ScatteringRandom(Network):
    """Random directions in place of learnt ones: one stage."""

    name: Literal["scattering-random"] = "scattering-random"
    offers = "encoder"
    features: Size | None = None

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from fed_dp.models.encoders import Encoded, RandomProjection, Scattered

        scattered, features = Scattered(self.image(shape, at_least=8)), self.features or 400
        projection = RandomProjection(scattered.channels * scattered.positions, features)
        return Encoded([scattered, projection], features, classes)


class ScatteringLinear(Network):
    """The same scattering features under a trainable linear layer, for gradient methods."""

    name: Literal["scattering-linear"] = "scattering-linear"

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from torch import nn

        from fed_dp.models.encoders import Scattered
        from fed_dp.models.layers import OnFrozen, Shrunk

        scattered = Scattered(self.image(shape, at_least=8))
        features = scattered.channels * scattered.positions
        trained = nn.Sequential(nn.Linear(features, classes), nn.LogSoftmax(dim=1))
        return OnFrozen(nn.Sequential(scattered, nn.Flatten(), Shrunk(features)), trained)
