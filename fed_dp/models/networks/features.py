"""Encoders of any inputs under a linear head: inputs themselves, random features, principal components."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from fed_dp.models.network import Network, Shape, size_of
from fed_dp.options import Size

if TYPE_CHECKING:
    from torch import nn

Gamma = Annotated[float, Field(gt=0, le=1e3)]  # of the kernel exp(−γ²‖x − y‖²/2)
Layers = Annotated[int, Field(ge=1, le=3)]


class UnitLinear(Network):
    """Inputs scaled to norm 1: with noise, the functional mechanism for logistic regression."""

    name: Literal["unit-linear"] = "unit-linear"
    offers = "encoder"

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from torch import nn

        from fed_dp.models.encoders import Encoded

        return Encoded([nn.Flatten()], size_of(shape), classes)


class RandomFeaturesNetwork(Network):
    """Random features of a Gaussian kernel."""

    name: Literal["random-features"] = "random-features"
    offers = "encoder"
    features: Size | None = None  # of the head
    gamma: Gamma | None = None

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from fed_dp.models.encoders import Encoded, RandomFeatures

        features = self.features or 1000
        return Encoded([RandomFeatures(size_of(shape), features, self.gamma or 1.2)], features, classes)


class PrivatePca(Network):
    """Principal components, then random features of them; as often as there are layers."""

    name: Literal["private-pca"] = "private-pca"
    offers = "encoder"
    components: Size | None = None  # that are kept
    features: Size | None = None
    gamma: Gamma | None = None
    layers: Layers | None = None

    @property
    def stages(self) -> int:
        """One for each layer, and the head's."""
        return (self.layers or 1) + 1

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from fed_dp.models.encoders import Compression, Encoded, Pixels, RandomFeatures

        pixels, features = Pixels(shape), self.features or 1000
        parts: list[nn.Module] = [pixels]
        channels, positions = pixels.channels, pixels.positions
        for _ in range(self.layers or 1):
            count = self.components or min(40, channels * positions)
            parts.append(Compression(channels, positions, count, 0.0))
            parts.append(RandomFeatures(count, features, self.gamma or 1.2))
            channels, positions = 1, features
        return Encoded(parts, features, classes)
