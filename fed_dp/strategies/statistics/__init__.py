"""Statistics: every site sends each statistic once, and the server solves for the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from fed_dp import plugins
from fed_dp.experiment.components import StrategyOptions, StrategySetting

if TYPE_CHECKING:
    from fed_dp.experiment.schema import Experiment
    from fed_dp.strategies.site_strategy import SiteStrategy


@runtime_checkable
class SolvesFromStatistics(Protocol):
    """Options of a trainer whose model the server can solve for."""

    cross: float
    ridge: float


class Statistics(StrategyOptions):
    """Every site's statistics once, added up; the server solves for the model. Later rounds are free."""

    name: Literal["statistics"] = "statistics"
    deployable = True
    uploads_statistics = True

    def check(self, experiment: Experiment) -> None:
        """Refuse what has no statistics that could be added up."""
        from fed_dp.experiment.components import networks_offering

        trainer, model = experiment.trainer, experiment.model
        if not trainer.has_statistics:
            others = (name for name, each in plugins.own_components("trainer").items() if each.has_statistics)
            raise ValueError(
                f"strategy.name = 'statistics': trainer.name = {trainer.name!r} has no statistics; "
                f"allowed: {', '.join(others)}"
            )
        if trainer.as_in_paper(model):
            raise ValueError(
                f"strategy.name = 'statistics': model.name = {model.name!r} has none; allowed: "
                f"{networks_offering(trainer.needs)}"
            )

    def build(self, setting: StrategySetting) -> SiteStrategy:
        """Return the strategy."""
        from fed_dp.experiment.plan import noise_spec
        from fed_dp.models import Solver
        from fed_dp.strategies.statistics.strategy import StatisticsStrategy

        trainer = setting.experiment.trainer
        assert isinstance(trainer, SolvesFromStatistics)  # by check
        solver, plan = Solver(setting.network, cross=trainer.cross), setting.plans[0]
        noise = (
            [None] * len(solver.statistics) if plan is None else [noise_spec(each) for each in plan.stages]
        )
        return StatisticsStrategy(
            setting.weights, setting.sites, solver=solver, noise=noise, ridge=trainer.ridge, **setting.common
        )
