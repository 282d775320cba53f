"""Wavelet scattering of images under a head: compressed, projected, or as it is for gradient methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from fed_dp.errors import ModelError
from fed_dp.models.network import Network, Shape
from fed_dp.options import Count, Size

if TYPE_CHECKING:
    from torch import nn

    from fed_dp.models.encoders import Scattered

Whitening = Annotated[float, Field(ge=0, le=1)]  # 0: variances as they are, 1: all alike


class OnScattering(Network):
    """Options of all networks on scattering features: how those are normalised."""

    later_keys: ClassVar[tuple[str, ...]] = ("groups",)
    # Group normalisation of each image by itself (Tramèr and Boneh 2021): how many groups the 81 scattering
    # channels of each image channel are divided into. None: constants of generated images.
    groups: Count | None = None

    def scattered(self, shape: Shape) -> Scattered:
        """Build the scattering transform with its normalisation."""
        from fed_dp.models.encoders import Scattered
        from fed_dp.models.scattering import CHANNELS

        if self.groups is not None and CHANNELS % self.groups:
            fitting = ", ".join(str(k) for k in range(1, CHANNELS + 1) if CHANNELS % k == 0)
            raise ModelError(
                f"model.groups = {self.groups}: {CHANNELS} scattering channels are not divided evenly; "
                f"allowed: {fitting}"
            )
        return Scattered(self.image(shape, at_least=8), groups=self.groups)


class ScatteringNetwork(OnScattering):
    """Scattering features, compressed to principal components from released moments."""

    name: Literal["scattering"] = "scattering"
    offers = "encoder"
    later_keys = ("groups", "unit")
    components: Size | None = None
    whitening: Whitening | None = None
    unit: bool = True  # whether components are brought to norm 1, as statistics of them need it

    @property
    def stages(self) -> int:
        """That of the components, and the head's."""
        return 2

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from fed_dp.models.encoders import Compression, Encoded

        scattered = self.scattered(shape)
        count = self.components or min(400, scattered.channels * scattered.positions)
        whitening = 0.5 if self.whitening is None else self.whitening
        compression = Compression(scattered.channels, scattered.positions, count, whitening, unit=self.unit)
        return Encoded([scattered, compression], count, classes, unit=self.unit)


class ScatteringRandom(OnScattering):
    """Random directions in place of learnt ones: one stage."""

    name: Literal["scattering-random"] = "scattering-random"
    offers = "encoder"
    features: Size | None = None

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from fed_dp.models.encoders import Encoded, RandomProjection

        scattered, features = self.scattered(shape), self.features or 400
        projection = RandomProjection(scattered.channels * scattered.positions, features)
        return Encoded([scattered, projection], features, classes)


class ScatteringLinear(OnScattering):
    """The same scattering features under a trainable linear layer, for gradient methods."""

    name: Literal["scattering-linear"] = "scattering-linear"

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from torch import nn

        from fed_dp.models.layers import OnFrozen, Shrunk

        scattered = self.scattered(shape)
        features = scattered.channels * scattered.positions
        trained = nn.Sequential(nn.Linear(features, classes), nn.LogSoftmax(dim=1))
        return OnFrozen(nn.Sequential(scattered, nn.Flatten(), Shrunk(features)), trained)
