"""CRBM and SctRBM: contrastive divergence, then back-propagation. No privacy.

References: see `models.rbm`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fed_dp.experiment.components import Limit, Tables, TrainerOptions
from fed_dp.options import Count, Positive

if TYPE_CHECKING:
    from fed_dp.clients.trainer import Trainer
    from fed_dp.experiment.plan import ReleasePlan
    from fed_dp.experiment.schema import Experiment
    from fed_dp.models import FlatNetwork


class Crbm(TrainerOptions):
    """Contrastive divergence in the first round, then back-propagation of the cross-entropy. No privacy."""

    name: Literal["crbm"] = "crbm"
    learning_rate: Positive = 0.001
    batch_size: Count = 100
    local_epochs: Count = 1
    gibbs_steps: Count = 1  # of contrastive divergence

    needs = "free-energy"

    def limits(self, experiment: Experiment, *, client: int) -> dict[str, Limit]:
        """Limit local epochs, and what a step of them takes."""
        return {
            "trainer.local_epochs": (self.local_epochs, "local_epochs"),
            "trainer.gibbs_steps": (self.gibbs_steps, "steps"),
        }

    def build(self, experiment: Experiment, net: FlatNetwork, plan: ReleasePlan | None) -> Trainer:
        """Return the trainer."""
        from fed_dp.clients.crbm.trainer import ContrastiveTrainer

        return ContrastiveTrainer(self, net)

    @classmethod
    def smallest(cls) -> Tables:
        """Train on a generated week-by-week network of people."""
        return {"data": {"name": "health-weekly"}, "model": {"name": "crbm-behaviour", "hidden": 8}}
