"""Distributed selective SGD: selected changes up, the most updated parameters down.

Reference: Shokri and Shmatikov, "Privacy-Preserving Deep Learning", CCS 2015.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field

from fed_dp.accounting.guarantee import Guarantee
from fed_dp.experiment.components import AuditSetup, StrategyOptions, StrategySetting
from fed_dp.mechanisms import Split
from fed_dp.options import Fraction, Fractions, NonNegative, Positive, of_client
from fed_dp.sharing.codec import Precision
from fed_dp.sharing.exchange import ONE_AT_A_TIME, Exchange
from fed_dp.sharing.private_selection import PrivateSelection, RandomMask, SparseVectorSelector
from fed_dp.sharing.selection import Selection, Selector, share
from fed_dp.sharing.update import MAX_ABS_VALUE

if TYPE_CHECKING:
    from fed_dp.accounting import Release
    from fed_dp.experiment.plan import ReleasePlan
    from fed_dp.experiment.schema import Experiment, Privacy
    from fed_dp.strategies.site_strategy import SiteStrategy

_SITE = "; it holds for all records of a site at once, because truncation bounds any change"
SPARSE_VECTOR = Guarantee(
    "sparse_vector",
    "proved",
    "participant",
    "replace one",
    "sparse vector technique (Lyu, Su, Li 2017, Algorithm 1) on magnitudes truncated to γ, then "
    "Laplace noise on truncated values (sensitivity 2γ each)" + _SITE,
)
PAPER = Guarantee(
    "sparse_vector_paper",
    "proved",
    "participant",
    "replace one",
    "Fig. 12 of Shokri and Shmatikov 2015 with values truncated before noise, which the figure "
    "omits: c segments of ε₁/c each and c releases of ε₂/(2c)" + _SITE,
)
AS_PRINTED = Guarantee(
    "sparse_vector_as_printed",
    "refuted",
    "participant",
    "replace one",
    "Fig. 12 as printed truncates released values only after noise: a change of 20γ costs ten "
    "times the stated ε, and there is no bound",
)
RANDOM_MASK = Guarantee(
    "random_mask",
    "proved",
    "participant",
    "replace one",
    "Gaussian mechanism (analytic calibration, Balle and Wang 2018) on coordinates drawn without "
    "looking at the records, clipped in L2 norm" + _SITE,
)
_SPARSE = {"proved": SPARSE_VECTOR, "paper": PAPER, "paper_as_printed": AS_PRINTED}


class Dssgd(StrategyOptions):
    """Distributed selective SGD; its selection can be private."""

    name: Literal["dssgd"] = "dssgd"
    exchange: Exchange = "round_robin"
    upload_fraction: Fractions = 0.1  # θ_u, of all clients or a list with one of each
    download_fraction: Fractions = 1.0  # θ_d, likewise
    selection: Selection | PrivateSelection = "largest_values"
    threshold: NonNegative = 0.0001  # τ, of random_with_threshold and sparse_vector
    bound: Annotated[float, Field(ge=1e-9, le=1e3)] | None = None  # γ, of every uploaded value
    clip: Positive | None = None  # L2 bound of all uploaded values together, of random_mask
    split: Split = "lyu"  # of ε between threshold and search, of sparse_vector
    decay: Fraction = 0.8  # β, of stat, once per round
    outdated: Annotated[float, Field(ge=0, le=1)] = 0.5  # asynchronous: chance of last round's state
    precision: Precision = "float32"  # of uploaded values on the wire

    guarantees = (SPARSE_VECTOR, PAPER, AS_PRINTED, RANDOM_MASK)
    deployable = True
    adds_changes = True
    averages_noise = True

    @property
    def mechanism(self) -> tuple[str, str] | None:
        """`strategy.selection`, where that is private."""
        return (
            ("strategy.selection", self.selection) if self.selection in get_args(PrivateSelection) else None
        )

    @property
    def one_at_a_time(self) -> bool:
        """Whether one client trains at a time."""
        return self.exchange in ONE_AT_A_TIME

    @property
    def free_running(self) -> bool:
        """Whether nobody waits."""
        return self.exchange == "free_running"

    @property
    def upload_summary(self) -> str:
        """θ_u, where all clients have the same."""
        return "" if isinstance(self.upload_fraction, tuple) else f"θ_u = {self.upload_fraction:g}"

    def upload_share(self, client: int) -> float:
        """Return a client's θ_u."""
        return of_client(self.upload_fraction, client)

    def download_share(self, client: int) -> float:
        """Return a client's θ_d."""
        return of_client(self.download_fraction, client)

    @property
    def upload_bound(self) -> float | None:
        """γ, if there is one."""
        return self.bound

    @property
    def upload_precision(self) -> Precision:
        """How uploaded values are written."""
        return self.precision

    # ---------------------------------------------------------------------------------- checks

    def check(self, experiment: Experiment) -> None:
        """Refuse what cannot be run, or would silently not be used."""
        clients = experiment.clients
        for key in ("upload_fraction", "download_fraction"):
            given = getattr(self, key)
            if isinstance(given, tuple) and len(given) != clients.count:
                raise ValueError(
                    f"strategy.{key} has {len(given)} numbers: expected one number, or one for each of "
                    f"{clients.count} clients"
                )
        self.check_options()
        if self.free_running and clients.fraction != 1:
            raise ValueError(
                f"clients.fraction = {clients.fraction:g}: strategy.exchange = 'free_running' asks every "
                "client as soon as it is free; allowed: 1.0"
            )

    def check_options(self) -> None:
        """Refuse options that do not go together."""
        for key, owners, value in (
            ("threshold", ("random_with_threshold", "sparse_vector"), self.selection),
            ("clip", ("random_mask",), self.selection),
            ("split", ("sparse_vector",), self.selection),
            ("outdated", ("asynchronous",), self.exchange),
        ):
            if value not in owners and self.is_set(key):
                who = " and ".join(map(repr, owners))
                raise ValueError(f"strategy.{key} is set, but only {who} uses it, not {value!r}")
        for key, owner in (("bound", "sparse_vector"), ("clip", "random_mask")):
            if self.selection == owner and getattr(self, key) is None:
                raise ValueError(
                    f"strategy.{key} is missing: strategy.selection = {owner!r} derives its noise from it"
                )
        bound = 1e3 if self.bound is None else self.bound
        if self.selection in ("random_with_threshold", "sparse_vector") and self.threshold > bound:
            raise ValueError(
                f"strategy.threshold = {self.threshold:g}: no value within ±{bound:g} reaches it "
                "(strategy.bound)"
            )
        if self.precision == "float16" and bound < 1e-4:
            raise ValueError(
                f"strategy.precision = 'float16': too coarse for values within strategy.bound = {bound:g}; "
                "allowed: float32, or a bound of at least 0.0001"
            )

    @property
    def requires_delta(self) -> bool:
        """A random mask's noise is Gaussian."""
        return self.selection == "random_mask"

    @property
    def forms(self) -> tuple[str, ...]:
        """The sparse vector technique also comes as in its paper."""
        return tuple(_SPARSE) if self.selection == "sparse_vector" else ("proved",)

    def check_privacy(self, privacy: Privacy) -> None:
        """Refuse a split of ε for a form that has its own."""
        super().check_privacy(privacy)
        if self.is_set("split") and privacy.variant != "proved":
            raise ValueError(
                f"strategy.split = {self.split!r}: privacy.variant = {privacy.variant!r} has its own"
            )

    def check_deployable(self) -> None:
        """Refuse an exchange that an interrupted run could not repeat."""
        if self.free_running:
            raise ValueError(
                "strategy.exchange = 'free_running': across sites, a run that was interrupted could not "
                "go on; allowed: parallel, round_robin, random_order, asynchronous"
            )

    # --------------------------------------------------------------------------------- privacy

    def guarantee(self, experiment: Experiment) -> Guarantee:
        """Return the guarantee of the selection."""
        if self.selection == "random_mask":
            return RANDOM_MASK
        return _SPARSE[experiment.privacy.variant]

    def release_plan(self, experiment: Experiment, *, client: int, size: int) -> ReleasePlan:
        """One release in every round: of c values by sparse vector, or of a Gaussian mask."""
        from fed_dp.accounting import Gaussian, SparseVector, pure_share
        from fed_dp.accounting.composition import MIN_NOISE_MULTIPLIER
        from fed_dp.experiment.plan import ReleasePlan, budget_of
        from fed_dp.mechanisms import gaussian_multiplier

        budget, rounds = budget_of(experiment), experiment.rounds
        assert budget is not None  # by check_privacy
        name, source = self.guarantee(experiment).name, experiment.privacy.noise_source
        if self.selection == "random_mask":
            multiplier = gaussian_multiplier(epsilon=budget.epsilon, delta=budget.delta, releases=rounds)
            return ReleasePlan(Gaussian(max(multiplier, MIN_NOISE_MULTIPLIER)), name, source)
        each = pure_share(epsilon=budget.epsilon, delta=budget.delta, releases=rounds)
        return ReleasePlan(SparseVector(each, share(self.upload_share(client), size)), name, source)

    def selector(
        self, experiment: Experiment, *, client: int, size: int, release: Release | None
    ) -> Selector | SparseVectorSelector | RandomMask:
        """Return what selects a client's uploads."""
        from fed_dp.accounting import Gaussian, SparseVector

        count = share(self.upload_share(client), size)
        bound, variant = MAX_ABS_VALUE if self.bound is None else self.bound, experiment.privacy.variant
        if self.selection == "sparse_vector":
            assert isinstance(release, SparseVector)  # by release_plan
            assert variant != "paper_as_released"  # by check_privacy
            return SparseVectorSelector(count, bound, self.threshold, release.epsilon, variant, self.split)
        if self.selection == "random_mask":
            assert isinstance(release, Gaussian)
            assert self.clip is not None  # by check
            return RandomMask(count, self.clip, release.noise_multiplier, bound)
        return Selector(count, self.selection, self.threshold, self.bound)

    def build(self, setting: StrategySetting) -> SiteStrategy:
        """Return the strategy."""
        from fed_dp.strategies.dssgd.strategy import DssgdStrategy

        return DssgdStrategy(setting.weights, setting.sites, options=self, **setting.common)

    @classmethod
    def audits(cls) -> Mapping[str, Mapping[str, AuditSetup]]:
        """Audit a linear network that takes large steps: every value is truncated."""
        common: dict[str, Any] = {
            "model": {"name": "linear"},
            "trainer": {"name": "sgd", "learning_rate": 5.0},
        }
        dssgd = {"name": "dssgd", "upload_fraction": 0.1}
        sparse = AuditSetup(strategy={**dssgd, "selection": "sparse_vector", "bound": 0.001}, **common)
        mask = AuditSetup(strategy={**dssgd, "selection": "random_mask", "clip": 0.1}, **common)
        return {"dssgd": dict.fromkeys(_SPARSE, sparse), "random_mask": {"proved": mask}}
