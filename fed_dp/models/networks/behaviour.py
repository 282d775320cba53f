"""Encoders of records of behaviour: dPAH and pCDBN's behaviour form, on what can be proved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fed_dp.models.network import Network, Shape
from fed_dp.options import Size

if TYPE_CHECKING:
    from torch import nn


class BehaviourLinear(Network):
    """Past, now and friends, each of norm about 1, under a linear head: dPAH on a fixed encoder."""

    name: Literal["behaviour-linear"] = "behaviour-linear"
    offers = "encoder"
    of_behaviour = True

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from fed_dp.models.encoders import Behaviour, Encoded
        from fed_dp.models.paper import attributes_of

        rows, attributes = attributes_of(shape)
        return Encoded([Behaviour()], rows * attributes + 1, classes)


class PatchBehaviour(Network):
    """Patch filters, pooled by 4, beside the attributes of now and friends."""

    name: Literal["patch-behaviour"] = "patch-behaviour"
    offers = "filters"
    of_behaviour = True
    filters: Size | None = None

    @property
    def stages(self) -> int:
        """That of the filters, and the head's."""
        return 2

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from fed_dp.models.encoders import BehaviourFilters, Encoded, pooled
        from fed_dp.models.paper import attributes_of

        rows, attributes = attributes_of(shape)
        filters = self.filters or 6
        layer = BehaviourFilters(1, 3, filters, 4)
        features = 2 * filters * pooled(rows, 4) * pooled(attributes, 4) + attributes + 1
        return Encoded([layer], features, classes)
