"""Federated averaging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fed_dp.experiment.components import StrategyOptions

if TYPE_CHECKING:
    from fed_dp.experiment.schema import Experiment
    from fed_dp.models import NetworkSpec, Vector
    from fed_dp.strategies.site_strategy import SiteStrategy
    from fed_dp.strategies.sites import Site


class Averaging(StrategyOptions):
    """The mean of all changes, weighted by records; everything is exchanged in every round."""

    name: Literal["averaging"] = "averaging"
    deployable: ClassVar[bool] = True

    @property
    def averages_noise(self) -> bool:
        """A round's model is made of all its clients' changes."""
        return True

    def build(
        self,
        experiment: Experiment,
        network: NetworkSpec,
        weights: Vector,
        sites: Sequence[Site],
        **common: Any,
    ) -> SiteStrategy:
        """Return the strategy."""
        from fed_dp.strategies.averaging.strategy import AveragingStrategy

        return AveragingStrategy(weights, sites, **common)
