"""Conditional restricted Boltzmann machines for human behaviour: what dPA is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fed_dp.models.network import Network, Shape
from fed_dp.options import Size

if TYPE_CHECKING:
    from torch import nn


class CrbmBehaviour(Network):
    """CRBM: the attributes of now, given those of the time points before."""

    name: Literal["crbm-behaviour"] = "crbm-behaviour"
    offers = "free-energy"
    of_behaviour = True
    social: ClassVar[bool] = False
    hidden: Size | None = None

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from fed_dp.models.rbm import ConditionalRbm

        return ConditionalRbm(shape, classes, self.hidden or 200, social=self.social)


class SctrbmBehaviour(CrbmBehaviour):
    """SctRBM: given the influence of friends, too."""

    name: Literal["sctrbm-behaviour"] = "sctrbm-behaviour"  # type: ignore[assignment]
    social = True
