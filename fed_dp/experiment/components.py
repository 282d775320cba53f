"""What trainers and strategies declare: the only things that the rest of the program asks of them.

A trainer is the table `trainer` of an experiment, a strategy the table `strategy`. Their classes are
registered under the entry points `fed_dp.trainers` and `fed_dp.strategies`. Everything about one of them is
in its module.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fed_dp import plugins
from fed_dp.accounting.guarantee import Guarantee
from fed_dp.models.network import Capability, Network, NetworkSpec
from fed_dp.options import Section
from fed_dp.sharing.codec import Precision
from fed_dp.tasks import TARGET_WORDS, Targets, Task

if TYPE_CHECKING:
    from fed_dp.accounting import Release
    from fed_dp.data.dataset import Integers
    from fed_dp.experiment.plan import ReleasePlan
    from fed_dp.experiment.schema import Experiment, Privacy

Tables = dict[str, Any]
# How an audit tells two worlds apart: by what is released, projected on the noiseless difference; or, where a
# paper's form shares noise, by inputs that it was added to, by a head that absorbs it, by bounds that ship.
Attack = Literal["projection", "inputs", "residual", "bounds"]
Limit = tuple[float, str]  # what is asked for, and the key of a site's `allow` that limits it


class Mechanism(Section):
    """What may add noise: a trainer, or a strategy's selection."""

    name: str = ""
    guarantees: ClassVar[tuple[Guarantee, ...]] = ()  # all that it can give
    variants: ClassVar[tuple[str, ...]] = ()  # beside 'proved'

    @property
    def mechanism(self) -> tuple[str, str] | None:
        """The key and the value that make its releases private; None where nothing does."""
        return None

    def guarantee(self, experiment: Experiment) -> Guarantee:
        """Return the guarantee of its releases."""
        raise NotImplementedError(f"{self.name} adds noise and states no guarantee")

    def release_plan(self, experiment: Experiment, *, client: int, size: int) -> ReleasePlan:
        """Return what a client releases, such that all rounds together cost its budget.

        `size` is the number of the model's parameters.
        """
        raise NotImplementedError(f"{self.name} adds noise and plans no release")

    @property
    def requires_delta(self) -> bool:
        """Whether its noise needs δ > 0."""
        return False

    @property
    def forms(self) -> tuple[str, ...]:
        """The values that privacy.variant may have."""
        return ("proved", *self.variants)

    def check_privacy(self, privacy: Privacy) -> None:
        """Refuse what its noise needs and is missing."""
        key, value = self.mechanism or ("", "")
        for part in ("budget_epsilon", *(("delta",) if self.requires_delta else ())):
            if getattr(privacy, part) is None:
                raise ValueError(
                    f"privacy.{part} is missing: {key} = {value!r} needs privacy.budget_epsilon > 0"
                    + (" and 0 < privacy.delta < 1" if self.requires_delta else "")
                )
        if privacy.variant not in self.forms:
            has = ", ".join(map(repr, self.forms))
            only = "only " if len(self.forms) == 1 else ""
            raise ValueError(f"privacy.variant = {privacy.variant!r}: {key} = {value!r} has {only}{has}")

    @classmethod
    def audits(cls) -> Mapping[str, Mapping[str, AuditSetup]]:
        """Return the smallest experiments that audit it: by the name of the audit, then by variant."""
        return {}


class AuditSetup:
    """The smallest experiment that shows what is released: on digits, one site, one round of each stage."""

    def __init__(
        self,
        *,
        records: int = 40,
        attack: Attack = "projection",
        paths: Mapping[str, Tables] | None = None,
        **tables: Any,
    ) -> None:
        self.records, self.attack = records, attack  # of the site; what tells the worlds apart
        self.tables: Tables = tables
        self.paths = paths or {}  # ways in which the same is computed, each with its changes to the tables


class TrainerOptions(Mechanism):
    """Options of a trainer; subclasses add theirs."""

    needs: ClassVar[Capability] = "gradients"  # of the network, in its proved form or without noise
    paper_needs: ClassVar[Capability | None] = None  # … in the form that its paper has
    also_trains: ClassVar[tuple[Capability, ...]] = ()  # networks made for others, which it can train as well
    divides_by_records: ClassVar[bool] = False  # whether sums are divided by data.expected_records
    takes_loss: ClassVar[bool] = False  # whether it minimises the task's own loss, whatever that is
    takes_targets: ClassVar[tuple[Targets, ...]] = ("class",)  # what it can learn
    has_statistics: ClassVar[bool] = False  # whether its proved form releases statistics that can be added up

    @property
    def mechanism(self) -> tuple[str, str] | None:
        """`trainer.name`, where it adds noise of its own."""
        return ("trainer.name", self.name) if self.private else None

    @property
    def private(self) -> bool:
        """Whether it adds noise of its own."""
        return False

    def variant(self, experiment: Experiment) -> str:
        """Return which form of its noise is asked for; 'proved' where it adds none itself."""
        return experiment.privacy.variant if experiment.noisy_part is self else "proved"

    def as_in_paper(self, model: Network) -> bool:
        """Return whether it trains a network as its paper has it, which is not proved."""
        return self.paper_needs is not None and model.offers == self.paper_needs

    def check(self, experiment: Experiment) -> None:
        """Refuse what does not go together with it; each message names key, value and what is allowed."""

    def check_noise(self, experiment: Experiment) -> None:
        """Refuse options that do not go together with its noise, or with there being none."""

    def trained_alone(self, experiment: Experiment) -> str:
        """Return why each client is trained by itself; empty where batches of clients can be."""
        return f"trainer.name = {self.name!r}"

    def network_options(self, experiment: Experiment) -> dict[str, Any]:
        """Return what it decides of the network, beside the network's own options."""
        return {}

    def fits_to_public(self, experiment: Experiment) -> bool:
        """Return whether an encoder is fitted to public records before the first round."""
        return experiment.model.fitted and experiment.data.has_public

    def limits(self, experiment: Experiment, *, client: int) -> dict[str, Limit]:
        """Return what a site's own file limits, by the key that asks for it."""
        return {}

    @classmethod
    def smallest(cls) -> Tables:
        """Return the smallest experiment of a trainer without privacy that cannot train the default one."""
        return {}

    def decided(self, experiment: Experiment, *, records: int, network: NetworkSpec) -> dict[str, float]:
        """Return, by key, what it decides itself for a site of so many (public) records."""
        return {}

    def without_noise(self, experiment: Experiment, net: Any) -> Any:
        """Return the trainer with next to no noise: what an audit holds releases against."""
        raise NotImplementedError(f"{self.name} draws its own noise and cannot be trained without it")

    @abstractmethod
    def build(self, experiment: Experiment, net: Any, plan: ReleasePlan | None) -> Any:
        """Return the trainer (`clients.trainer.Trainer`) on a network (`models.FlatNetwork`)."""


class StrategyOptions(Mechanism):
    """Options of a strategy; subclasses add theirs."""

    pooled: ClassVar[bool] = False  # one node has all that is used
    public_alone: ClassVar[bool] = False  # whether all that is used is public
    one_model: ClassVar[bool] = True  # whether clients work on one model
    audited_by_runs: ClassVar[bool] = True  # whether canaries among the clients' records tell of its model
    deployable: ClassVar[bool] = False  # whether real sites can run it
    adds_changes: ClassVar[bool] = False  # whether changes are added up, and not averaged
    averages_noise: ClassVar[bool] = False  # whether a round's model is made of many clients' changes
    uploads_statistics: ClassVar[bool] = False  # whether clients send statistics in place of changes

    @property
    def gain(self) -> float:
        """How far a constant mean change moves the model in the long run, of that change."""
        return 1.0

    @property
    def one_at_a_time(self) -> bool:
        """Whether one client trains at a time."""
        return False

    @property
    def free_running(self) -> bool:
        """Whether nobody waits: replies are used as they come, however stale."""
        return False

    @property
    def upload_summary(self) -> str:
        """What decides how much is uploaded, for tables; empty: everything."""
        return ""

    def check(self, experiment: Experiment) -> None:
        """Refuse what cannot be run, or would silently not be used."""

    def check_deployable(self) -> None:
        """Refuse what real sites cannot run."""

    def pooled_records(self, parts: Sequence[Integers], public: Integers | None) -> Integers:
        """Return the records of the one node, where all are pooled."""
        raise NotImplementedError

    def upload_share(self, client: int) -> float:
        """Return the share of all parameters that a client uploads (θ_u)."""
        return 1.0

    def download_share(self, client: int) -> float:
        """Return the share of all parameters that a client downloads (θ_d)."""
        return 1.0

    @property
    def upload_bound(self) -> float | None:
        """The bound of every uploaded value (γ); None: the largest that a message may hold."""
        return None

    @property
    def upload_precision(self) -> Precision:
        """How uploaded values are written."""
        return "float32"

    def selector(self, experiment: Experiment, *, client: int, size: int, release: Release | None) -> Any:
        """Return what selects the changes to upload; None: everything is."""
        return None

    @abstractmethod
    def build(self, setting: StrategySetting) -> Any:
        """Return the strategy (`strategies.site_strategy.SiteStrategy`)."""


@dataclass(frozen=True, slots=True)
class StrategySetting:
    """What a strategy is built for: the first weights, the sites, what each of them releases."""

    experiment: Experiment
    network: NetworkSpec
    weights: Any
    sites: Sequence[Any]
    plans: Sequence[ReleasePlan | None]

    @property
    def common(self) -> dict[str, Any]:
        """What every strategy takes beside weights and sites."""
        clients = self.experiment.clients
        return {
            "fraction": clients.fraction,
            "quorum": clients.quorum,
            "seed": self.experiment.seed,
            "plans": self.plans,
        }


def networks_offering(capability: Capability | None) -> str:
    """Return the names of all networks that offer a capability, as words."""
    networks = plugins.own_components("model").items()
    return ", ".join(name for name, network in networks if network.offers == capability)


def check_task(trainer: TrainerOptions, task: Task) -> None:
    """Refuse a task that a trainer cannot learn, and say which can."""
    if task.targets not in trainer.takes_targets:
        wanted, why = "takes_targets", f"learns no {TARGET_WORDS[task.targets]}"
    elif not (trainer.takes_loss or task.has_standard_loss):
        wanted, why = "takes_loss", "does not minimise a loss of the task's own (weights, another error)"
    elif not (trainer.takes_loss or task.bounded):
        raise ValueError(
            f"task.bounds is missing: trainer.name = {trainer.name!r} adds up targets, which must lie within "
            "public bounds"
        )
    else:
        return
    able = [
        repr(name)
        for name, other in plugins.own_components("trainer").items()
        if (other.takes_loss if wanted == "takes_loss" else task.targets in other.takes_targets)
    ]
    raise ValueError(
        f"task.name = {task.name!r}: trainer.name = {trainer.name!r} {why}; allowed with trainer.name = "
        f"{', '.join(able)}"
    )


def check_network(trainer: TrainerOptions, model: Network) -> None:
    """Refuse a network that does not offer what a trainer needs, and say which do."""
    if model.offers in (trainer.needs, trainer.paper_needs, *trainer.also_trains):
        return

    others = [
        repr(name)
        for name, other in plugins.own_components("trainer").items()
        if model.offers in (other.needs, other.paper_needs, *other.also_trains)
    ]
    paper = (
        ""
        if trainer.paper_needs is None
        else f", and as its paper has it, {networks_offering(trainer.paper_needs)}"
    )
    raise ValueError(
        f"model.name = {model.name!r}: expected with trainer.name = {' or '.join(others)}, not "
        f"{trainer.name!r}; trainer.name = {trainer.name!r} fits {networks_offering(trainer.needs)}{paper}"
    )
