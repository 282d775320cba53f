"""pSGD: DP-SGD through Opacus, the private baseline that every mechanism is compared with.

Reference: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from fed_dp.accounting.events import SampledGaussian
from fed_dp.accounting.guarantee import Guarantee
from fed_dp.clients.functional import check_learnt_encoder, sites_per_model, step_of
from fed_dp.experiment.components import AuditSetup, Limit, Tables, TrainerOptions, networks_offering
from fed_dp.models.network import Capability
from fed_dp.models.optimizers import OptimizerName, check_optimizer
from fed_dp.options import Count, Fraction, NonNegative, Positive

if TYPE_CHECKING:
    from fed_dp.clients.trainer import Trainer
    from fed_dp.experiment.plan import ReleasePlan
    from fed_dp.experiment.schema import Experiment, Privacy
    from fed_dp.models import FlatNetwork, NetworkSpec

_REASON = (
    "subsampled Gaussian mechanism (Abadi et al. 2016), Poisson samples, each record's gradient clipped, "
    "sums divided by the sample rate times {}, composed over all steps of all rounds by privacy loss "
    "distributions"
)
_LEARNT = (
    "moments of bounded features, released once with Gaussian noise, one learnt layer a round; then the "
)
PUBLIC = Guarantee("psgd", "proved", "record", "zero-out one", _REASON.format("the public number of records"))
DECLARED = Guarantee(
    "psgd_add_remove", "proved", "record", "add/remove one", _REASON.format("a declared public number")
)
LEARNT = Guarantee("psgd_learnt", "proved", "record", "zero-out one", _LEARNT + PUBLIC.reason)
LEARNT_DECLARED = Guarantee(
    "psgd_learnt_add_remove", "proved", "record", "add/remove one", _LEARNT + DECLARED.reason
)

Clipping = Literal["flat", "automatic"]
HEADS: tuple[Capability, ...] = (
    "encoder",
    "filters",
)  # what networks offer that have a linear head on features of norm about 1
LOGIT_NOISE, MAX_MOVE = 3.0, 50.0  # of the rule for learning rates: see `rate_for`
AUTOMATIC_FLOOR = 0.01  # γ: gradients much shorter than that are not lengthened to C


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
PATHS |= {
    f"{path}, automatic clipping": {
        **PATHS[path],
        "trainer": {**PATHS[path]["trainer"], "clipping": "automatic"},
    }
    for path in ("client batches", "hooks", "ghost", "secure")
}
PATHS["augmented"] = {
    "trainer": {"augmentations": 3, "shift": 1},
    "data": {"name": "digits"},
    "clients": {"count": 1, "together": 1},
}


class Psgd(TrainerOptions):
    """DP-SGD through Opacus. σ is calibrated for all rounds before the first step.

    Of a network with learnt layers, the first rounds release the moments that these are made of; every later
    round trains the head.
    """

    name: Literal["psgd"] = "psgd"
    later_keys = ("local_steps", "clipping", "augmentations", "shift", "flip", "encoder_share")
    optimizer: OptimizerName = "sgd"
    # auto: from the noise alone, for linear heads on features of norm about 1; see `rate_for`.
    learning_rate: Positive | Literal["auto"] = 0.5
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: NonNegative = 0.0
    sample_rate: Fraction = 0.1  # q: chance of each record to be in a step's batch
    local_epochs: Count = 1
    local_steps: Count | None = None  # steps a round, in place of local epochs: 1 is federated DP-SGD
    clip: Positive = 1.0  # C: L2 bound on each record's gradient
    # flat: gradients longer than C are cut to it (Abadi et al. 2016). automatic: each is brought to about C,
    # so that there is no threshold to choose (Bu et al. 2023).
    clipping: Clipping = "flat"
    # Views of each record whose gradients are averaged before the clip (De et al. 2022): itself, and others
    # that are shifted by up to `shift` pixels and, with `flip`, mirrored. For images.
    augmentations: Count = 1
    shift: Annotated[int, Field(ge=0, le=16)] = 0
    flip: bool = False
    encoder_share: Annotated[float, Field(gt=0, lt=0.3)] = 0.05  # of the budget, for each learnt layer
    gradients: Literal["auto", "hooks", "ghost", "vmap"] = "auto"

    guarantees = (PUBLIC, DECLARED, LEARNT, LEARNT_DECLARED)
    also_trains = ("encoder", "filters", "auto-encoder", "energy", "noisy-inputs")
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
        if self.local_steps is not None:
            return self.local_steps
        return self.local_epochs * max(1, round(1 / self.sample_rate))

    def guarantee(self, experiment: Experiment) -> Guarantee:
        """Proved; neighbours follow from what sums are divided by."""
        declared = experiment.data.expected_records is not None
        if experiment.model.stages > 1:
            return LEARNT_DECLARED if declared else LEARNT
        return DECLARED if declared else PUBLIC

    def release_plan(self, experiment: Experiment, *, client: int, size: int) -> ReleasePlan:
        """Plan the sampled Gaussian mechanism, calibrated such that all rounds cost the budget.

        Each learnt layer's moments are one Gaussian release, in a round of its own before those.
        """
        from fed_dp.accounting import Gaussian, noise_multiplier
        from fed_dp.experiment.plan import ReleasePlan, budget_of, one_multiplier

        budget = budget_of(experiment)
        assert budget is not None  # by check_privacy
        rate, steps = self.sample_rate, self.steps_per_round
        learnt = experiment.model.stages - 1
        stages = (Gaussian(one_multiplier(budget, self.encoder_share)),) * learnt
        sigma = noise_multiplier(
            epsilon=budget.epsilon,
            delta=budget.delta,
            sample_rate=rate,
            steps=(experiment.rounds - learnt) * steps,
            beside=stages,
        )
        name, source = self.guarantee(experiment).name, experiment.privacy.noise_source
        return ReleasePlan(SampledGaussian(sigma, rate, steps), name, source, stages, goes_on=bool(stages))

    def rate_for(self, experiment: Experiment, release: SampledGaussian, *, records: int) -> float:
        """Return the learning rate of a client with so many (public) records.

        By the rule: such that the noise of all steps of all clients together moves a record's logits by
        LOGIT_NOISE (standard deviation). A step of rate η adds noise of η σ C / (q n) to each weight; T
        steps add up, and those of K clients do, or are averaged; momentum multiplies all by `gain`; logits
        are the head's outputs times LOGITS. Where there is little noise, at most MAX_MOVE / gain. The rule
        looks at public numbers alone.
        """
        if self.learning_rate != "auto":
            return self.learning_rate
        from fed_dp.models.encoders import LOGITS

        steps = (experiment.rounds - experiment.model.stages + 1) * release.steps
        gain = experiment.strategy.gain / (1 - self.momentum)
        noise = release.noise_multiplier * self.clip / (self.sample_rate * records)
        clients = 1 / sites_per_model(experiment)
        if experiment.strategy.adds_changes:
            clients = max(1.0, round(experiment.clients.count * experiment.clients.fraction))
        deviation = LOGITS * gain * noise * math.sqrt(steps * clients)
        return min(LOGIT_NOISE / deviation, MAX_MOVE / gain)

    def decided(self, experiment: Experiment, *, records: int, network: NetworkSpec) -> dict[str, float]:
        """Return the learning rate, where the rule decides it."""
        if self.learning_rate != "auto":
            return {}
        plan = self.release_plan(experiment, client=0, size=0)
        assert isinstance(plan.release, SampledGaussian)
        return {"trainer.learning_rate": self.rate_for(experiment, plan.release, records=records)}

    def check(self, experiment: Experiment) -> None:
        """Refuse options that the optimiser does not have, and such as would not be used."""
        check_optimizer(self.optimizer, momentum=self.momentum)
        if self.learning_rate == "auto" and (
            experiment.model.offers not in HEADS
            or self.optimizer != "sgd"
            or not experiment.task.log_probabilities
        ):
            raise ValueError(
                "trainer.learning_rate = 'auto': the rule is for plain steps on a linear head with classes; "
                "allowed with trainer.optimizer = 'sgd' and model.name = "
                + ", ".join(networks_offering(each) for each in HEADS)
            )
        if self.local_steps is not None and self.local_epochs != 1:
            raise ValueError(
                f"trainer.local_steps = {self.local_steps} and trainer.local_epochs = {self.local_epochs}: "
                "both say how long a round is; expected one of them"
            )
        self._check_views()
        model = experiment.model
        learnt = model.stages - 1
        if experiment.rounds <= learnt:
            raise ValueError(
                f"rounds = {experiment.rounds}: model.name = {model.name!r} has {learnt} learnt "
                f"layer{'s' if learnt > 1 else ''}, released one a round before any gradient; expected at "
                f"least {learnt + 1}"
            )
        if not learnt and self.is_set("encoder_share"):
            raise ValueError(
                f"trainer.encoder_share is set, but model.name = {model.name!r} has no learnt layer"
            )
        if learnt:
            check_learnt_encoder(experiment)

    def _check_views(self) -> None:
        views = self.augmentations > 1
        if views and not (self.shift or self.flip):
            raise ValueError(
                f"trainer.augmentations = {self.augmentations}: all views would be the same; expected with "
                "trainer.shift above 0, or trainer.flip = true"
            )
        for key in ("shift", "flip"):
            if not views and self.is_set(key):
                raise ValueError(f"trainer.{key} is set, but trainer.augmentations = 1 uses the record alone")
        if views and self.gradients not in ("auto", "vmap"):
            raise ValueError(
                f"trainer.gradients = {self.gradients!r}: gradients of several views of a record are "
                "averaged before the clip; with trainer.augmentations above 1, allowed: auto, vmap"
            )

    def check_privacy(self, privacy: Privacy) -> None:
        """Refuse gradients whose sums cannot be exact, where noise is."""
        super().check_privacy(privacy)
        if privacy.noise_source == "secure" and self.augmentations > 1:
            raise ValueError(
                f"trainer.augmentations = {self.augmentations}: views are drawn from a seed, for simulation; "
                "with privacy.noise_source = 'secure', allowed: 1"
            )
        if privacy.noise_source == "secure" and self.gradients == "ghost":
            raise ValueError(
                "trainer.gradients = 'ghost': sums of gradients that are never written down cannot be made "
                "exact; with privacy.noise_source = 'secure', allowed: auto, hooks"
            )

    def network_options(self, experiment: Experiment) -> dict[str, Any]:
        """Ask networks that normalise by the batch to normalise by each record itself."""
        return {"apart": True} if experiment.model.offers == "noisy-inputs" else {}

    def trained_alone(self, experiment: Experiment) -> str:
        """Batches of clients take plain steps, with the gradients chosen by measurement."""
        plains = {"gradients": "auto", "optimizer": "sgd", "weight_decay": 0.0, "augmentations": 1}
        for key, plain in plains.items():
            if (value := getattr(self, key)) != plain:
                return f"trainer.{key} = {value!r}"
        return ""

    def limits(self, experiment: Experiment, *, client: int) -> dict[str, Limit]:
        """Local epochs, and steps."""
        steps = self.steps_per_round
        key = (
            "trainer.local_epochs / trainer.sample_rate"
            if self.local_steps is None
            else "trainer.local_steps"
        )
        return {
            "trainer.local_epochs": (self.local_epochs, "local_epochs"),
            key: (steps, "steps"),
            "rounds × steps of a round": (experiment.rounds * steps, "total_steps"),
        }

    def build(self, experiment: Experiment, net: FlatNetwork, plan: ReleasePlan | None) -> Trainer:
        """Return the trainer."""
        from fed_dp.clients.psgd.trainer import LearntPsgdTrainer, PsgdTrainer

        assert plan is not None  # it is always private
        assert isinstance(plan.release, SampledGaussian)
        options: dict[str, Any] = {
            "rate": partial(self.rate_for, experiment, plan.release),
            "release": plan.release,
            "noise_source": experiment.privacy.noise_source,
            "clients_at_once": experiment.clients.at_once,
        }
        if not plan.stages:
            return PsgdTrainer(self, net, **options)
        return LearntPsgdTrainer(self, net, stages=plan.stages, step=step_of(experiment), **options)

    def without_noise(self, experiment: Experiment, net: FlatNetwork) -> Trainer:
        """Return steps on all records at once, with noise that hides nothing."""
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
