"""dPA: auto-encoder and head from perturbed objectives; proved on an encoder that no record decides.

Reference: Phan, Wang, Wu, Dou, "Differential Privacy Preservation for Deep Auto-Encoders", AAAI 2016.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fed_dp.accounting.guarantee import Guarantee
from fed_dp.clients.functional import DECLARED, PUBLIC, Functional
from fed_dp.experiment.components import Attack, AuditSetup

if TYPE_CHECKING:
    from fed_dp.clients.trainer import Trainer
    from fed_dp.experiment.schema import Experiment
    from fed_dp.models import FlatNetwork

CLAIMED = Guarantee(
    "dpa_paper",
    "claimed",
    "record",
    "replace one",
    "dPA (Phan et al. 2016) adds noise once to coefficients Σ (½ − x) h and Σ h h that change with "
    "every step, because h does: one draw does not cover what all steps reveal together; budget "
    "shared by layers and head, normalisation by public bounds",
)
AS_PRINTED = Guarantee(
    "dpa_as_printed",
    "refuted",
    "record",
    "replace one",
    "dPA (Phan et al. 2016), Eq. 13, normalises by the smallest and largest activation of the "
    "records and ships both with the model, without noise",
)
AS_RELEASED = Guarantee(
    "dpa_as_released",
    "refuted",
    "record",
    "replace one",
    "dPA's released program adds one and the same noise vector to the hidden units of all records, "
    "and the head's intercept absorbs it: the weights are those of a training without noise",
)


_AUDITED: tuple[tuple[str, Attack, dict[str, Any]], ...] = (
    ("paper", "projection", {"local_epochs": 5}),
    ("paper_as_printed", "bounds", {"local_epochs": 5}),
    ("paper_as_released", "residual", {"local_epochs": 300, "learning_rate": 0.05}),  # to its end
)


class Dpa(Functional):
    """dPA: proved on fixed encoders and on such as are made of released moments; dPAH for behaviour."""

    name: Literal["dpa"] = "dpa"

    needs = "encoder"
    paper_needs = "auto-encoder"
    takes_targets = ("class", "labels", "numbers")
    guarantees = (PUBLIC, DECLARED, CLAIMED, AS_PRINTED, AS_RELEASED)
    in_paper: ClassVar[dict[str, Guarantee]] = {
        "paper": CLAIMED,
        "paper_as_printed": AS_PRINTED,
        "paper_as_released": AS_RELEASED,
    }
    variants = tuple(in_paper)

    def network_options(self, experiment: Experiment) -> dict[str, Any]:
        """As released, the head learns an intercept."""
        return {"intercept": True} if self.variant(experiment) == "paper_as_released" else {}

    def build_paper_form(self, experiment: Experiment, net: FlatNetwork) -> Trainer:
        """Return the trainer of the paper's form, as claimed, printed or released."""
        from fed_dp.clients.functional.perturbed import PerturbedTrainer

        variant = self.variant(experiment)
        return PerturbedTrainer(
            self,
            net,
            epsilon=self.own_epsilon(experiment),
            as_printed=variant == "paper_as_printed" or not self.perturb,
            as_released=variant == "paper_as_released",
        )

    @classmethod
    def audits(cls) -> Mapping[str, Mapping[str, AuditSetup]]:
        """Return the smallest experiment of each form."""
        proved = AuditSetup(
            strategy={"name": "statistics"},
            rounds=2,
            model={"name": "scattering", "components": 30},
            trainer={"name": "dpa"},
        )
        in_paper = {
            variant: AuditSetup(
                attack=attack,
                model={"name": "auto-encoder", "hidden": 4, "layers": 1},
                trainer={"name": "dpa", "batch_size": 1000, **more},
            )
            for variant, attack, more in _AUDITED
        }
        return {"dpa": {"proved": proved, **in_paper}}
