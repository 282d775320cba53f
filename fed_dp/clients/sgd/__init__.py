"""Plain local SGD, also selective: the trainer without privacy that everything is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fed_dp.experiment.components import Limit, TrainerOptions
from fed_dp.models.optimizers import OptimizerName, check_optimizer
from fed_dp.options import Count, Fraction, NonNegative, Positive

if TYPE_CHECKING:
    from fed_dp.clients.trainer import Trainer
    from fed_dp.experiment.plan import ReleasePlan
    from fed_dp.experiment.schema import Experiment
    from fed_dp.models import FlatNetwork


class Sgd(TrainerOptions):
    """Plain local SGD. No privacy."""

    name: Literal["sgd"] = "sgd"
    optimizer: OptimizerName = "sgd"
    learning_rate: Positive = 0.1
    learning_rate_decay: NonNegative = 0.0  # lr / (1 + decay · step), per mini-batch
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: NonNegative = 0.0
    batch_size: Count = 32
    local_epochs: Count = 1
    update_fraction: Fraction = 1.0  # selective SGD: each step changes only this share, the largest

    takes_loss = True
    takes_targets = ("class", "labels", "numbers")

    def check(self, experiment: Experiment) -> None:
        """Refuse options that the optimiser does not have."""
        check_optimizer(self.optimizer, momentum=self.momentum)
        if self.optimizer != "sgd" and self.update_fraction < 1:
            raise ValueError(
                f"trainer.update_fraction = {self.update_fraction:g}: selective SGD takes SGD's own steps; "
                f"allowed with trainer.optimizer = {self.optimizer!r}: 1"
            )

    def trained_alone(self, experiment: Experiment) -> str:
        """Refuse batches of clients where steps are selective, or an optimiser of torch takes them."""
        if self.update_fraction < 1:
            return f"trainer.update_fraction = {self.update_fraction:g}"
        return "" if self.optimizer == "sgd" else f"trainer.optimizer = {self.optimizer!r}"

    def limits(self, experiment: Experiment, *, client: int) -> dict[str, Limit]:
        """Limit local epochs."""
        return {"trainer.local_epochs": (self.local_epochs, "local_epochs")}

    def build(self, experiment: Experiment, net: FlatNetwork, plan: ReleasePlan | None) -> Trainer:
        """Return the trainer."""
        from fed_dp.clients.sgd.trainer import SgdTrainer

        return SgdTrainer(self, net, clients_at_once=experiment.clients.at_once)
