"""AdLM and ILM: Laplace noise on inputs by their relevance, or identical; proved as statistics.

Reference: Phan, Wu, Hu, Dou, "Adaptive Laplace Mechanism", ICDM 2017 (arXiv 1709.05750v2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from fed_dp.accounting.guarantee import Guarantee
from fed_dp.clients.functional import DECLARED, PROVED_KEYS, PUBLIC, Functional
from fed_dp.experiment.components import AuditSetup, Limit
from fed_dp.options import Count

if TYPE_CHECKING:
    from fed_dp.clients.trainer import Trainer
    from fed_dp.experiment.schema import Experiment
    from fed_dp.models import FlatNetwork

CLAIMED = Guarantee(
    "adlm_paper",
    "claimed",
    "record",
    "replace one",
    "AdLM and ILM (Phan et al. 2017) divide the noise of every input and label by the batch size, as "
    "if a batch's draws added up to one draw (their sum is √batch smaller than its lemmas need); and "
    "relevance comes from a network trained on the records without noise",
)
AS_RELEASED = Guarantee(
    "adlm_as_released",
    "refuted",
    "record",
    "replace one",
    "AdLM's and ILM's released program adds one and the same noise image to all records of a step: the "
    "difference of any two of them is exact wherever it is not cut off at ±10; every step draws another "
    "image, and the budget pays for one",
)
_NOISE_KEYS = ("relevance_share", "label_share", "relevance_epochs")


class LaplaceMechanism(Functional):
    """What AdLM and ILM share."""

    # The paper's form: of the budget, ε1 goes to relevances, ε3 to labels, and the rest, ε2, to inputs.
    relevance_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    label_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    relevance_epochs: Count = 12
    batch_size: Count = 1800  # |L|, which the noise is divided by

    adaptive: ClassVar[bool]  # whether noise follows relevance
    needs = "relevance"
    paper_needs = "noisy-inputs"
    guarantees = (PUBLIC, DECLARED, CLAIMED, AS_RELEASED)
    in_paper: ClassVar[dict[str, Guarantee]] = {"paper": CLAIMED, "paper_as_released": AS_RELEASED}
    variants = tuple(in_paper)
    paper_keys = (*Functional.paper_keys, *_NOISE_KEYS)

    def unused_keys(self, experiment: Experiment) -> tuple[str, ...]:
        """Options of noise without any, of relevance where there is none, of descent in a closed form."""
        unused: tuple[str, ...] = PROVED_KEYS if experiment.model.closed_form else ()
        if self.as_in_paper(experiment.model) and not self.perturb:
            return _NOISE_KEYS
        return unused if self.adaptive else (*unused, "relevance_epochs")

    def check(self, experiment: Experiment) -> None:
        """Refuse relevance without public records."""
        if self.adaptive and not self.as_in_paper(experiment.model) and not experiment.data.has_public:
            raise ValueError(
                f"trainer.name = {self.name!r} needs public records: set data.public_records, or "
                "data.public_data = 'digits'"
            )
        super().check(experiment)

    def check_noise(self, experiment: Experiment) -> None:
        """Refuse shares that leave nothing for the inputs."""
        super().check_noise(experiment)
        shares = self.relevance_share + self.label_share
        if self.private and self.as_in_paper(experiment.model) and shares >= 1:
            raise ValueError(
                f"trainer.relevance_share + trainer.label_share = {shares:g}: nothing is left for the "
                "inputs; expected below 1"
            )

    def network_options(self, experiment: Experiment) -> dict[str, Any]:
        """Return whether relevance weighs features; or whether the network is the released program's."""
        if not self.as_in_paper(experiment.model):
            return {"adaptive": self.adaptive}
        return {"released": True} if self.variant(experiment) == "paper_as_released" else {}

    def limits(self, experiment: Experiment, *, client: int) -> dict[str, Limit]:
        """Local epochs, those of the relevance, and descent steps."""
        return super().limits(experiment, client=client) | {
            "trainer.relevance_epochs": (self.relevance_epochs, "local_epochs")
        }

    def build_paper_form(self, experiment: Experiment, net: FlatNetwork) -> Trainer:
        """Return the trainer of the paper's form, as claimed or released."""
        from fed_dp.clients.adlm.trainer import AdlmTrainer

        return AdlmTrainer(
            self,
            net,
            epsilon=self.own_epsilon(experiment),
            released=self.variant(experiment) == "paper_as_released",
        )

    @classmethod
    def _audits(cls, name: str, **more: Any) -> Mapping[str, Mapping[str, AuditSetup]]:
        proved = AuditSetup(
            strategy={"name": "statistics"},
            data={"name": "digits", "public_records": 100},
            model={"name": "class-sums"},
            trainer={"name": name},
        )
        paper = AuditSetup(
            attack="inputs",
            model={"name": "adlm-cnn", "filters": 4, "hidden": 8},
            trainer={"name": name, "batch_size": 40, **more},
        )
        return {name: {"proved": proved, **dict.fromkeys(cls.variants, paper)}}


class Adlm(LaplaceMechanism):
    """AdLM: more noise on inputs that matter less. Proved: statistics, with relevance of public records."""

    name: Literal["adlm"] = "adlm"
    relevance_share: Annotated[float, Field(gt=0, lt=1)] = 1 / 3
    label_share: Annotated[float, Field(gt=0, lt=1)] = 1 / 3
    adaptive = True

    @classmethod
    def audits(cls) -> Mapping[str, Mapping[str, AuditSetup]]:
        """Return the smallest experiment of each form."""
        return cls._audits("adlm", relevance_epochs=1)


class Ilm(LaplaceMechanism):
    """ILM: the same with identical noise on all inputs."""

    name: Literal["ilm"] = "ilm"
    relevance_share: Annotated[float, Field(ge=0, le=0)] = 0.0
    adaptive = False

    @classmethod
    def audits(cls) -> Mapping[str, Mapping[str, AuditSetup]]:
        """Return the smallest experiment of each form."""
        return cls._audits("ilm")
