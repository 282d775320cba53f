"""pSGD: DP-SGD through Opacus, the private baseline that every mechanism is compared with.

Reference: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fed_dp.accounting.guarantee import Guarantee
from fed_dp.experiment.components import AuditSetup, Limit, Tables, TrainerOptions
from fed_dp.models.optimizers import OptimizerName, check_optimizer
from fed_dp.options import Count, Fraction, NonNegative, Positive

if TYPE_CHECKING:
    from fed_dp.clients.trainer import Trainer
    from fed_dp.experiment.plan import ReleasePlan
    from fed_dp.experiment.schema import Experiment, Privacy
    from fed_dp.models import FlatNetwork

_REASON = (
    "subsampled Gaussian mechanism (Abadi et al. 2016), Poisson samples, each record's gradient clipped, "
    "sums divided by the sample rate times {}, composed over all steps of all rounds by privacy loss "
    "distributions"
)
PUBLIC = Guarantee("psgd", "proved", "record", "zero-out one", _REASON.format("the public number of records"))
DECLARED = Guarantee(
    "psgd_add_remove", "proved", "record", "add/remove one", _REASON.format("a declared public number")
)


# Every way in which gradients are computed and noise is drawn, and how it is asked for.
PATHS: dict[str, Tables] = {
    path: {
        "trainer": {"gradients": gradients},
        "privacy": {"noise_source": source},
        "clients": {"count": 1, "together": together},
    }
    for path, gradients, source, together in (
        ("client batches", "auto", "simulation", "auto"),
        ("hooks", "hooks", "simulation", 1),
        ("ghost", "ghost", "simulation", 1),
        ("vmap", "vmap", "simulation", 1),
        ("secure", "auto", "secure", 1),
    )
}


class Psgd(TrainerOptions):
    """DP-SGD through Opacus. σ is calibrated for all rounds before the first step."""

    name: Literal["psgd"] = "psgd"
    optimizer: OptimizerName = "sgd"
    learning_rate: Positive = 0.5
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: NonNegative = 0.0
    sample_rate: Fraction = 0.1  # q: chance of each record to be in a step's batch
    local_epochs: Count = 1
    clip: Positive = 1.0  # C: L2 bound on each record's gradient
    gradients: Literal["auto", "hooks", "ghost", "vmap"] = "auto"

    guarantees = (PUBLIC, DECLARED)
    divides_by_records = True
    takes_loss = True
    takes_targets = ("class", "labels", "numbers")

    @property
    def private(self) -> bool:
        """It always adds noise."""
        return True

    @property
    def requires_delta(self) -> bool:
        """Its noise is Gaussian."""
        return True

    @property
    def steps_per_round(self) -> int:
        """Steps of one round: a local epoch is 1/q steps."""
        return self.local_epochs * max(1, round(1 / self.sample_rate))

    def guarantee(self, experiment: Experiment) -> Guarantee:
        """Proved; neighbours follow from what sums are divided by."""
        return PUBLIC if experiment.data.expected_records is None else DECLARED

    def release_plan(self, experiment: Experiment, *, client: int, size: int) -> ReleasePlan:
        """Plan the sampled Gaussian mechanism, calibrated such that all rounds cost the budget."""
        from fed_dp.accounting import SampledGaussian, noise_multiplier
        from fed_dp.experiment.plan import ReleasePlan, budget_of

        budget = budget_of(experiment)
        assert budget is not None  # by check_privacy
        rate, steps = self.sample_rate, self.steps_per_round
        sigma = noise_multiplier(
            epsilon=budget.epsilon, delta=budget.delta, sample_rate=rate, steps=experiment.rounds * steps
        )
        release = SampledGaussian(sigma, rate, steps)
        return ReleasePlan(release, self.guarantee(experiment).name, experiment.privacy.noise_source)

    def check(self, experiment: Experiment) -> None:
        """Refuse options that the optimiser does not have."""
        check_optimizer(self.optimizer, momentum=self.momentum)

    def check_privacy(self, privacy: Privacy) -> None:
        """Refuse gradients whose sums cannot be exact, where noise is."""
        super().check_privacy(privacy)
        if privacy.noise_source == "secure" and self.gradients == "ghost":
            raise ValueError(
                "trainer.gradients = 'ghost': sums of gradients that are never written down cannot be made "
                "exact; with privacy.noise_source = 'secure', allowed: auto, hooks"
            )

    def trained_alone(self, experiment: Experiment) -> str:
        """Batches of clients take plain steps, with the gradients chosen by measurement."""
        for key, plain in (("gradients", "auto"), ("optimizer", "sgd"), ("weight_decay", 0.0)):
            if (value := getattr(self, key)) != plain:
                return f"trainer.{key} = {value!r}"
        return ""

    def limits(self, experiment: Experiment, *, client: int) -> dict[str, Limit]:
        """Local epochs, and steps."""
        steps = self.steps_per_round
        return {
            "trainer.local_epochs": (self.local_epochs, "local_epochs"),
            "trainer.local_epochs / trainer.sample_rate": (steps, "steps"),
            "rounds × steps of a round": (experiment.rounds * steps, "total_steps"),
        }

    def build(self, experiment: Experiment, net: FlatNetwork, plan: ReleasePlan | None) -> Trainer:
        """Return the trainer."""
        from fed_dp.accounting import SampledGaussian
        from fed_dp.clients.psgd.trainer import PsgdTrainer

        assert plan is not None  # it is always private
        assert isinstance(plan.release, SampledGaussian)
        return PsgdTrainer(
            self,
            net,
            release=plan.release,
            noise_source=experiment.privacy.noise_source,
            clients_at_once=experiment.clients.at_once,
        )

    def without_noise(self, experiment: Experiment, net: FlatNetwork) -> Trainer:
        """Return steps on all records at once, with noise that hides nothing."""
        from fed_dp.accounting import SampledGaussian
        from fed_dp.experiment.plan import ReleasePlan

        everybody = self.model_copy(update={"sample_rate": 1.0})
        release = SampledGaussian(1e-3, 1.0, everybody.steps_per_round)
        plan = ReleasePlan(release, PUBLIC.name, experiment.privacy.noise_source)
        return everybody.build(experiment, net, plan)

    @classmethod
    def audits(cls) -> Mapping[str, Mapping[str, AuditSetup]]:
        """Audit a linear network whose weights hardly move: each sum is known but for samples and noise."""
        setup = AuditSetup(
            records=1,
            paths=PATHS,
            model={"name": "linear"},
            trainer={"name": "psgd", "sample_rate": 0.25, "local_epochs": 3, "learning_rate": 1e-4},
        )
        return {"psgd": {"proved": setup}}
