"""Federated averaging."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fed_dp.experiment.components import StrategyOptions, StrategySetting

if TYPE_CHECKING:
    from fed_dp.strategies.site_strategy import SiteStrategy


class Averaging(StrategyOptions):
    """The mean of all changes, weighted by records; everything is exchanged in every round."""

    name: Literal["averaging"] = "averaging"
    deployable = True
    averages_noise = True

    def build(self, setting: StrategySetting) -> SiteStrategy:
        """Return the strategy."""
        from fed_dp.strategies.averaging.strategy import AveragingStrategy

        return AveragingStrategy(setting.weights, setting.sites, **setting.common)
