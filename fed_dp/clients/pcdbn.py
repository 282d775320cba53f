"""pCDBN: convolutional layers and head from perturbed objectives; proved from released moments of patches.

Reference: Phan, Wu, Dou, "Preserving Differential Privacy in Convolutional Deep Belief Networks", 2017.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from fed_dp.accounting.guarantee import Guarantee
from fed_dp.clients.functional import DECLARED, PUBLIC, Functional
from fed_dp.experiment.components import AuditSetup
from fed_dp.mechanisms.functional import ApproximationName, approximation

if TYPE_CHECKING:
    from fed_dp.clients.trainer import Trainer
    from fed_dp.experiment.schema import Experiment
    from fed_dp.models import FlatNetwork

CLAIMED = Guarantee(
    "pcdbn_paper",
    "claimed",
    "record",
    "replace one",
    "pCDBN (Phan et al. 2017) adds noise once to the coefficients of an energy whose normaliser Z "
    "changes with every step and with the records; of its monomials those of degree 1 get noise, since the "
    "others are too many; dropout doubles hidden units beyond what the head's sensitivity allows; one "
    "noisy copy for all groups, budget shared by layers and head, sensitivity over the domain",
)


class Pcdbn(Functional):
    """pCDBN: proved on filters that are made of released moments."""

    name: Literal["pcdbn"] = "pcdbn"
    approximation: ApproximationName = "chebyshev"  # of the sigmoid in the energy
    degree: Annotated[int, Field(ge=1, le=15)] = 7  # L
    balanced: bool = False  # as the paper classifies: as many records of each class in every batch

    needs = "filters"
    paper_needs = "energy"
    takes_targets = ("class", "labels", "numbers")
    guarantees = (PUBLIC, DECLARED, CLAIMED)
    in_paper: ClassVar[dict[str, Guarantee]] = {"paper": CLAIMED}
    variants = tuple(in_paper)
    later_keys = ("balanced",)
    paper_keys = (*Functional.paper_keys, "approximation", "degree", "balanced")

    def check(self, experiment: Experiment) -> None:
        """Refuse a degree for an approximation that has its own."""
        super().check(experiment)
        if self.approximation in ("piecewise", "printed") and self.is_set("degree"):
            raise ValueError(
                f"trainer.degree = {self.degree}: trainer.approximation = {self.approximation!r} has its own"
            )

    def network_options(self, experiment: Experiment) -> dict[str, Any]:
        """Return the polynomial in place of the sigmoid."""
        if self.as_in_paper(experiment.model) and self.truncate:
            return {"polynomial": approximation(self.approximation, self.degree)}
        return {}

    def build_paper_form(self, experiment: Experiment, net: FlatNetwork) -> Trainer:
        """Return the trainer of the paper's form."""
        from fed_dp.clients.functional.perturbed import PerturbedTrainer

        return PerturbedTrainer(self, net, epsilon=self.own_epsilon(experiment), balanced=self.balanced)

    @classmethod
    def audits(cls) -> Mapping[str, Mapping[str, AuditSetup]]:
        """Return the smallest experiment of each form."""
        proved = AuditSetup(
            strategy={"name": "statistics"},
            rounds=3,
            model={"name": "patch-filters", "components": 30},
            trainer={"name": "pcdbn"},
        )
        paper = AuditSetup(
            model={"name": "cdbn", "filters": 2, "hidden": 8},
            trainer={"name": "pcdbn", "local_epochs": 5, "batch_size": 1000},
        )
        return {"pcdbn": {"proved": proved, "paper": paper}}
