"""Federated averaging, with what a server may do to the mean change before it moves the model by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fed_dp.experiment.components import StrategyOptions, StrategySetting
from fed_dp.options import Positive

if TYPE_CHECKING:
    from fed_dp.experiment.schema import Experiment
    from fed_dp.strategies.site_strategy import SiteStrategy

Schedule = Literal["constant", "linear", "cosine"]
Momentum = Annotated[float, Field(ge=0, lt=1)]


class Averaging(StrategyOptions):
    """The mean of all changes, weighted by records; everything is exchanged in every round.

    The server may take larger steps, with momentum, along a schedule, and average the models of its rounds:
    all of that works on what sites sent, so it costs no privacy.
    """

    name: Literal["averaging"] = "averaging"
    later_keys = ("learning_rate", "momentum", "schedule", "ema")
    deployable = True
    averages_noise = True

    learning_rate: Positive = 1.0  # by what the mean change is multiplied
    momentum: Momentum = 0.0  # μ of the server's steps: v ← μ v + mean change
    # How the learning rate falls over the rounds that train: not, to 0 in a line, or along a cosine.
    schedule: Schedule = "constant"
    # Decay of the moving average of the rounds' models, which is then the run's model; none: the last one.
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None

    @property
    def gain(self) -> float:
        """How far a constant change moves the model in the long run, of that change."""
        return self.learning_rate / (1 - self.momentum)

    def check(self, experiment: Experiment) -> None:
        """Refuse steps of the server where sites send parts of a model that is released, not trained."""
        trainer, changed = experiment.trainer, [key for key in self.later_keys if self.is_set(key)]
        if changed and trainer.has_statistics and not trainer.as_in_paper(experiment.model):
            key = changed[0]
            raise ValueError(
                f"strategy.{key} = {getattr(self, key)!r}: trainer.name = {trainer.name!r} releases "
                "statistics, from which the model follows; expected with trainers that take gradient steps"
            )

    def build(self, setting: StrategySetting) -> SiteStrategy:
        """Return the strategy."""
        from fed_dp.strategies.averaging.strategy import AveragingStrategy

        experiment = setting.experiment
        return AveragingStrategy(
            setting.weights,
            setting.sites,
            options=self,
            rounds=experiment.rounds,
            first=experiment.model.stages,
            **setting.common,
        )
