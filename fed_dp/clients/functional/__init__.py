"""The functional mechanism: what dPA, pCDBN, AdLM and ILM share.

In their proved form, statistics of an encoder's features are released once, and everything after that is
computed from them (`statistics`). As their papers have them, noise is added once to the coefficients of an
objective that gradient descent then follows (`perturbed`): that is only claimed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from fed_dp.accounting.guarantee import Guarantee
from fed_dp.experiment.components import Limit, TrainerOptions
from fed_dp.options import Count, Positive

if TYPE_CHECKING:
    from fed_dp.clients.trainer import Trainer
    from fed_dp.experiment.plan import ReleasePlan
    from fed_dp.experiment.schema import Experiment
    from fed_dp.models import FlatNetwork

_REASON = (
    "sums over records of vectors of bounded norm, divided by {}, released once with Gaussian or Laplace "
    "noise (functional mechanism on an encoder that no record decides, or that was released before); "
    "everything after that, in however many rounds, is computed from what was released"
)
PUBLIC = Guarantee(
    "statistics", "proved", "record", "zero-out one", _REASON.format("the public number of records")
)
DECLARED = Guarantee(
    "statistics_add_remove", "proved", "record", "add/remove one", _REASON.format("a declared public number")
)
PROVED_KEYS = ("encoder_share", "cross", "ridge", "local_steps")


class Functional(TrainerOptions):
    """Options of the functional mechanism: released once, however many rounds follow."""

    perturb: bool = True  # false: no noise, no privacy
    # The proved form: statistics, and the head they ask for.
    encoder_share: Annotated[float, Field(gt=0, lt=0.3)] = 0.05  # of the budget, for each learnt layer
    cross: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0  # how much more exact Σ h yᵀ is than Σ h hᵀ
    ridge: Annotated[float, Field(gt=0, le=1e6)] = 0.5  # in units of the noise's spectral norm
    local_steps: Count = 20  # free descent steps a round, under other strategies than 'statistics'
    # The paper's form: gradient descent on a perturbed objective.
    truncate: bool = True  # false: the exact objective, which has no coefficients to perturb
    learning_rate: Positive = 0.001
    batch_size: Count = 100
    local_epochs: Count = 1

    divides_by_records = True
    has_statistics = True
    paper_keys: ClassVar[tuple[str, ...]] = ("truncate", "learning_rate", "batch_size", "local_epochs")
    in_paper: ClassVar[dict[str, Guarantee]]  # the guarantee of each variant

    @property
    def private(self) -> bool:
        """Whether it adds noise."""
        return self.perturb

    def guarantee(self, experiment: Experiment) -> Guarantee:
        """Proved for statistics; claimed or refuted as its paper has it."""
        if experiment.privacy.variant != "proved":
            return self.in_paper[experiment.privacy.variant]
        return PUBLIC if experiment.data.expected_records is None else DECLARED

    def stages(self, experiment: Experiment) -> int:
        """One for each learnt layer and the head; as a paper has it, one."""
        return 1 if self.as_in_paper(experiment.model) else experiment.model.stages

    def release_plan(self, experiment: Experiment, *, client: int, size: int) -> ReleasePlan:
        """Each learnt layer costs `encoder_share` of the budget, the head the rest.

        A paper's form releases one sum of what it charges to each layer and to the head.
        """
        from fed_dp.accounting import Gaussian, Laplace, Release
        from fed_dp.experiment.plan import ReleasePlan, budget_of, one_multiplier

        budget = budget_of(experiment)
        assert budget is not None  # by check_privacy
        learnt = self.stages(experiment) - 1
        shares = [self.encoder_share] * learnt + [1 - self.encoder_share * learnt]
        stages: tuple[Release, ...]
        if budget.delta:
            stages = tuple(Gaussian(one_multiplier(budget, share)) for share in shares)
        else:
            stages = tuple(Laplace(budget.epsilon * share) for share in shares)
        name, source = self.guarantee(experiment).name, experiment.privacy.noise_source
        return ReleasePlan(stages[-1], name, source, stages)

    def limits(self, experiment: Experiment, *, client: int) -> dict[str, Limit]:
        """Local epochs, and descent steps."""
        return {
            "trainer.local_epochs": (self.local_epochs, "local_epochs"),
            "trainer.local_steps": (self.local_steps, "steps"),
        }

    def network_options(self, experiment: Experiment) -> dict[str, Any]:
        """Return what it decides of the network."""
        return {}

    # --------------------------------------------------------------------------------- checks

    def unused_keys(self, experiment: Experiment) -> tuple[str, ...]:
        """Return options that its form uses in general, and not under these settings."""
        return ()

    def check(self, experiment: Experiment) -> None:
        """Refuse options that its form does not use, and exchanges under which it does not work."""
        in_paper = self.as_in_paper(experiment.model)
        self._check_keys(experiment, in_paper=in_paper)
        if in_paper:
            if experiment.task.targets != "class":
                raise ValueError(
                    f"task.name = {experiment.task.name!r}: model.name = {experiment.model.name!r} is "
                    f"trained with trainer.name = {self.name!r} as in its paper, which learns classes; "
                    "allowed: 'classification', 'binary'"
                )
            if self.perturb and not self.truncate:
                raise ValueError(
                    "trainer.truncate = false: the exact objective has no finite number of coefficients to "
                    "perturb; allowed with trainer.perturb = false"
                )
            return
        model, stages = experiment.model, experiment.model.stages
        if experiment.rounds < stages:
            raise ValueError(
                f"rounds = {experiment.rounds}: model.name = {model.name!r} is released in {stages} "
                f"stages, one a round; expected at least {stages}"
            )
        check_learnt_encoder(experiment)
        if self.encoder_share * (stages - 1) >= 1:
            raise ValueError(
                f"trainer.encoder_share = {self.encoder_share:g}: {stages - 1} learnt layers leave "
                f"nothing for the head; expected below {1 / (stages - 1):g}"
            )

    def _check_keys(self, experiment: Experiment, *, in_paper: bool) -> None:
        from fed_dp.experiment.components import networks_offering

        model = experiment.model
        for key in PROVED_KEYS if in_paper else self.paper_keys:
            if self.is_set(key):
                would = networks_offering(self.needs if in_paper else self.paper_needs)
                raise ValueError(
                    f"trainer.{key} is set, but model.name = {model.name!r} does not use it; {would} would"
                )
        for key in self.unused_keys(experiment):
            if self.is_set(key):
                raise ValueError(
                    f"trainer.{key} is set, but model.name = {model.name!r} with trainer.name = {self.name!r}"
                    f"{'' if self.perturb else ', trainer.perturb = false,'} does not use it"
                )

    def check_noise(self, experiment: Experiment) -> None:
        """Refuse privacy keys that do not go together with its form."""
        privacy, model = experiment.privacy, experiment.model
        if experiment.mechanism is None:
            if privacy != type(privacy)():
                raise ValueError("trainer.perturb = false adds no noise: no privacy key can hold")
            return
        if experiment.noisy_part is not self or privacy.budget_epsilon is None:
            return
        if privacy.variant != "proved" and privacy.variant not in self.variants:
            return  # check_privacy says which there are
        in_paper = self.as_in_paper(model)
        if in_paper != (privacy.variant != "proved"):
            wanted = "'paper', which is only claimed," if in_paper else "'proved'"
            raise ValueError(
                f"privacy.variant = {privacy.variant!r}: model.name = {model.name!r} is trained as "
                f"{wanted} with trainer.name = {self.name!r}"
            )
        if in_paper and privacy.delta is not None:
            raise ValueError(
                f"privacy.delta = {privacy.delta:g}: the papers' noise is Laplace; allowed: none"
            )
        if in_paper and privacy.noise_source == "secure" and privacy.variant != "paper":
            raise ValueError(
                f"privacy.noise_source = 'secure': privacy.variant = {privacy.variant!r} is refuted, and for "
                "simulation alone"
            )

    # --------------------------------------------------------------------------------- building

    def build(self, experiment: Experiment, net: FlatNetwork, plan: ReleasePlan | None) -> Trainer:
        """Return the trainer of its form."""
        if self.as_in_paper(experiment.model):
            return self.build_paper_form(experiment, net)
        from fed_dp.clients.functional.statistics import StatisticsTrainer

        strategy = experiment.strategy
        return StatisticsTrainer(
            self,
            net,
            stages=None if plan is None else plan.stages,
            sites=sites_per_model(experiment),
            sends_statistics=strategy.uploads_statistics,
            step=step_of(experiment),
        )

    def without_noise(self, experiment: Experiment, net: FlatNetwork) -> Trainer:
        """Return the same without its noise."""
        from fed_dp.experiment import build
        from fed_dp.models import FlatNetwork

        tables = experiment.tables()
        tables["trainer"]["perturb"] = False
        tables["privacy"] = {}
        plain = build(tables)
        own = FlatNetwork(plain.network(net.spec.shape, net.spec.classes), net.device)
        trainer: Trainer = plain.trainer.build(plain, own, None)
        return trainer

    def own_epsilon(self, experiment: Experiment) -> float | None:
        """Return the ε that its own noise has; None where it adds none."""
        return experiment.privacy.budget_epsilon if self.private else None

    def build_paper_form(self, experiment: Experiment, net: FlatNetwork) -> Trainer:
        """Return the trainer of the form that its paper has."""
        raise NotImplementedError


def sites_per_model(experiment: Experiment) -> int:
    """Return how many sites a round's model comes from."""
    if not experiment.strategy.averages_noise:
        return 1
    return max(1, round(experiment.clients.count * experiment.clients.fraction))


def step_of(experiment: Experiment) -> float:
    """Return how far a site moves the model towards its own, of the whole way.

    Where changes are added up, each of n sites goes 1/n of it: together they come to the mean of all.
    """
    return 1 / sites_per_model(experiment) if experiment.strategy.adds_changes else 1.0


def check_learnt_encoder(experiment: Experiment) -> None:
    """Refuse exchanges in which sites would take statistics under different encoders.

    A learnt encoder follows from the moments of all sites. What the next stage releases is of features
    under that encoder and is never released again, so every site must have the whole of it by then.
    """
    model, strategy = experiment.model, experiment.strategy
    if model.stages == 1 or not strategy.adds_changes:
        return
    why = (
        f"model.name = {model.name!r} learns its encoder from the moments of all sites, one layer a "
        "round, and the next release of every site needs the whole of it"
    )
    if strategy.free_running:
        raise ValueError(
            f"strategy.exchange = 'free_running': {why}, but here no site waits for the others; allowed: "
            "parallel, round_robin, random_order, asynchronous"
        )
    if any(strategy.download_share(client) != 1 for client in range(experiment.clients.count)):
        share = getattr(strategy, "download_fraction", None)
        raise ValueError(f"strategy.download_fraction = {share!r}: {why}; allowed: 1.0")
