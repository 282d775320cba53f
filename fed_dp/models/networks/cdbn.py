"""pCDBN's convolutional deep belief network as its paper has it, for images and for behaviour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fed_dp.models.network import Network, Shape
from fed_dp.options import Size

if TYPE_CHECKING:
    from torch import nn

    from fed_dp.mechanisms.functional import Approximation


class CdbnNetwork(Network):
    """Two CRBM layers, a layer of units, a head. A trainer decides the polynomial in place of the sigmoid."""

    name: Literal["cdbn"] = "cdbn"
    offers = "energy"
    filters: Size | None = None
    hidden: Size | None = None

    def build(
        self, shape: Shape, classes: int, *, polynomial: Approximation | None = None, **decided: Any
    ) -> nn.Module:
        """Build it."""
        from fed_dp.models.paper import Cdbn

        filters, hidden = self.filters or 32, self.hidden or 1024
        return Cdbn(shape, classes, filters, hidden, behaviour=False, polynomial=polynomial)


class CdbnBehaviour(Network):
    """The same for human behaviour: biases depend on the attributes of now and on friends."""

    name: Literal["cdbn-behaviour"] = "cdbn-behaviour"
    offers = "energy"
    of_behaviour = True
    filters: Size | None = None

    def build(
        self, shape: Shape, classes: int, *, polynomial: Approximation | None = None, **decided: Any
    ) -> nn.Module:
        """Build it."""
        from fed_dp.models.paper import Cdbn

        return Cdbn(shape, classes, self.filters or 10, 0, behaviour=True, polynomial=polynomial)
