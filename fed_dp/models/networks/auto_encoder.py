"""dPA's auto-encoder as its paper has it, for any inputs and for behaviour (dPAH)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fed_dp.models.network import Network, Shape
from fed_dp.models.networks.features import Layers
from fed_dp.options import Size

if TYPE_CHECKING:
    from torch import nn


class AutoEncoderNetwork(Network):
    """Sigmoid layers with tied weights and a head. A trainer decides whether the head learns an intercept."""

    name: Literal["auto-encoder"] = "auto-encoder"
    offers = "auto-encoder"
    hidden: Size | None = None  # units of a layer
    layers: Layers | None = None

    def build(self, shape: Shape, classes: int, *, intercept: bool = False, **decided: Any) -> nn.Module:
        """Build it."""
        from fed_dp.models.paper import AutoEncoder

        return AutoEncoder(
            shape,
            classes,
            self.hidden or 200,
            self.layers or 2,
            behaviour=self.of_behaviour,
            persons=self.persons,
            intercept=intercept,
        )


class Dpah(AutoEncoderNetwork):
    """The same for human behaviour: the first layer also sees past attributes and friends."""

    name: Literal["dpah"] = "dpah"  # type: ignore[assignment]
    # Each of so many persons is swayed in a measure of their own (η_u); none: one η for all.
    users: Size | None = None
    of_behaviour = True
    later_keys = ("users",)

    @property
    def persons(self) -> int | None:
        """The users."""
        return self.users
