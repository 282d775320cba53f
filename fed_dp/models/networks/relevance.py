"""Features weighed by their relevance to public records: AdLM and ILM on what can be proved.

A trainer decides whether they are weighed (`adaptive`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fed_dp.models.network import Network, Shape, size_of
from fed_dp.options import Size

if TYPE_CHECKING:
    from torch import nn


class RelevanceNetwork(Network):
    """What these networks share."""

    offers = "relevance"
    fitted = True


class ClassSumsNetwork(RelevanceNetwork):
    """The nearest class mean, from sums of inputs in [−1, 1]."""

    name: Literal["class-sums"] = "class-sums"
    closed_form = True

    def build(self, shape: Shape, classes: int, *, adaptive: bool = True, **decided: Any) -> nn.Module:
        """Build it."""
        from fed_dp.models.fitted import ClassMeans

        return ClassMeans(size_of(shape), classes, adaptive=adaptive)


class RelevantPixels(RelevanceNetwork):
    """Inputs scaled by relevance under a linear head."""

    name: Literal["relevant-pixels"] = "relevant-pixels"

    def build(self, shape: Shape, classes: int, *, adaptive: bool = True, **decided: Any) -> nn.Module:
        """Build it."""
        from fed_dp.models.encoders import Encoded
        from fed_dp.models.fitted import Relevant

        return Encoded([Relevant(size_of(shape), adaptive=adaptive)], size_of(shape), classes)


class RelevantScattering(RelevanceNetwork):
    """Scattering features scaled by relevance, then turned to random directions."""

    name: Literal["relevant-scattering"] = "relevant-scattering"
    features: Size | None = None

    def build(self, shape: Shape, classes: int, *, adaptive: bool = True, **decided: Any) -> nn.Module:
        """Build it."""
        from fed_dp.models.encoders import Encoded, RandomProjection, Scattered
        from fed_dp.models.fitted import Relevant

        scattered, features = Scattered(self.image(shape, at_least=8)), self.features or 400
        size = scattered.channels * scattered.positions
        layers = [scattered, Relevant(size, adaptive=adaptive), RandomProjection(size, features)]
        return Encoded(layers, features, classes)
