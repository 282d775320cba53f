"""The experiment: a frozen model of everything that decides a result. Unknown keys are errors."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from fed_dp.experiment.pairs import MODEL_OPTIONS, PAPER_MODELS, RELEVANCE_MODELS, check_pair, check_privacy
from fed_dp.mechanisms import NoiseSource, Split
from fed_dp.mechanisms.functional import ApproximationName, approximation
from fed_dp.sharing.codec import Precision
from fed_dp.sharing.exchange import Exchange
from fed_dp.sharing.private_selection import PrivateSelection
from fed_dp.sharing.selection import Selection

Fraction = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=1, le=10_000)]  # of a layer


DataName = Literal[
    "digits", "mnist", "mnist-32", "mnist-writers", "svhn", "cifar10", "adult", "adult-numbers", "heart",
    "lifesnaps", "lifesnaps-windows", "health-daily", "health-weekly", "folder",
]  # fmt: skip
ModelName = Literal[
    "linear", "small-mlp", "small-cnn", "dssgd-mlp", "dssgd-cnn-mnist", "dssgd-cnn-svhn",
    "unit-linear", "random-features", "private-pca", "scattering", "scattering-random", "scattering-linear",
    "patch-filters", "behaviour-linear", "patch-behaviour", "patch-cnn",
    "auto-encoder", "dpah", "cdbn", "cdbn-behaviour",
    "class-sums", "relevant-pixels", "relevant-scattering", "adlm-cnn", "rbf",
]  # fmt: skip


class Section(BaseModel):
    """A frozen part of an experiment that refuses unknown keys and wrong types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


# ------------------------------------------------------------------------------------- data


class Iid(Section):
    """Every record to exactly one client, at random, in equal shares."""

    name: Literal["iid"] = "iid"


class FixedFraction(Section):
    """Each client draws its own fraction of all records; clients overlap (as in DSSGD's paper)."""

    name: Literal["fraction"]
    fraction: Fraction = 0.01


class Dirichlet(Section):
    """Class shares per client from a symmetric Dirichlet; small alpha means one-sided clients."""

    name: Literal["dirichlet"]
    alpha: Positive = 0.5
    min_records: Count = 10


class Shards(Section):
    """Records sorted by label, cut into equal shards, `per_client` random shards each."""

    name: Literal["shards"]
    per_client: Count = 2


class Natural(Section):
    """One client per natural owner of the records: a writer, a hospital, a person."""

    name: Literal["natural"]


Partition = Annotated[Iid | FixedFraction | Dirichlet | Shards | Natural, Field(discriminator="name")]
Bounds = Annotated[tuple[float, float], Field(strict=False)]
Words = Annotated[tuple[str, ...], Field(strict=False)]


def _number_or_list(value: Any) -> str:
    return "list" if isinstance(value, list | tuple) else "number"


Counts = Annotated[
    Annotated[Count, Tag("number")] | Annotated[tuple[Count, ...], Field(strict=False), Tag("list")],
    Discriminator(_number_or_list),
]

EMBEDDED = ("digits", "health-daily", "health-weekly")  # these have no files
LARGEST_BOUND = 1e30  # of a column: beyond it, scaling could overflow for some records and not for others
FOLDER_KEYS = ("label", "client", "bounds", "classes", "categories", "gaps", "test_fraction")


class Data(Section):
    """Which records, from where, and how they are divided among the clients."""

    name: DataName = "digits"
    path: str | None = None
    partition: Partition = Iid()
    influence: bool = True  # of friends, in the health networks: false leaves it out
    attributes: Literal[5, 8, 11, 14] | None = None  # of adult-numbers: the first so many; without it, all
    # What is public, for encoders that are fitted to it: so many training records, which are set aside and
    # not protected, or another data set.
    public_records: Annotated[int, Field(ge=0)] = 0
    public_data: Literal["digits"] | None = None
    # What private sums are divided by in place of the number of records: one number, or one for each client.
    # Public, and not chosen by looking at the records; then their number is protected, too.
    expected_records: Counts | None = None
    # Cross-validation: the training records in so many folds, of which one takes the test records' place.
    folds: Annotated[int, Field(ge=2)] | None = None
    fold: Annotated[int, Field(ge=0)] = 0
    # The rest describes a user's own data (name = "folder"). Bounds are public knowledge about
    # the columns; they are never taken from the data, because that would reveal its extremes.
    label: str | None = None
    client: str | None = None
    bounds: dict[str, Bounds] | Bounds | None = None
    classes: Annotated[int, Field(ge=2)] | Words | None = None
    categories: dict[str, Words] = {}
    gaps: bool = False  # whether values may be missing: then an input beside each number says so
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2

    @model_validator(mode="after")
    def _statements_make_sense(self) -> Data:
        pairs = self.bounds if isinstance(self.bounds, dict) else {"every input": self.bounds}
        for name, pair in pairs.items():
            if pair is not None and not -LARGEST_BOUND <= pair[0] < pair[1] <= LARGEST_BOUND:
                raise ValueError(
                    f"data.bounds of {name} = {list(pair)}: expected low < high, within ±{LARGEST_BOUND:g}"
                )
        lists = {f"categories.{name}": words for name, words in self.categories.items()}
        lists |= {"classes": self.classes} if isinstance(self.classes, tuple) else {}
        for name, words in lists.items():
            if not words or len(set(words)) < len(words):
                raise ValueError(f"data.{name} = {list(words)}: expected words that differ")
        return self

    def expected(self, client: int) -> int | None:
        """Return the declared number of a client's records; None where the number itself is public."""
        return None if self.expected_records is None else _of(self.expected_records, client)

    @model_validator(mode="after")
    def _public_and_folds(self) -> Data:
        if self.attributes is not None and self.name != "adult-numbers":
            raise ValueError(
                f"data.attributes = {self.attributes}: data.name = {self.name!r} has them all; allowed with "
                "adult-numbers"
            )
        if self.public_records and self.public_data is not None:
            raise ValueError("data.public_records and data.public_data are both set: expected one of them")
        if self.fold >= (self.folds or 1):
            raise ValueError(f"data.fold = {self.fold}: expected below data.folds = {self.folds or 'none'}")
        return self

    @model_validator(mode="after")
    def _friends_only_where_there_are(self) -> Data:
        if not self.influence and not self.name.startswith("health-"):
            raise ValueError(
                f"data.influence = false: data.name = {self.name!r} has no friends; allowed: health-daily, "
                "health-weekly"
            )
        return self

    @model_validator(mode="after")
    def _folder_keys_only_for_folders(self) -> Data:
        given = self.model_fields_set
        if self.name == "folder":
            for key in ("path", "bounds", "classes"):
                if getattr(self, key) is None:
                    raise ValueError(
                        f"data.{key} is missing: data.name = 'folder' needs path, bounds and "
                        "classes (and label, for tables)"
                    )
        elif self.name in EMBEDDED and self.path is not None:
            raise ValueError(
                f"data.path = {self.path!r}: data.name = {self.name!r} is embedded and has no path"
            )
        elif extra := [key for key in FOLDER_KEYS if key in given]:
            raise ValueError(
                f"data.{extra[0]} is set, but only data.name = 'folder' takes it (data.name = {self.name!r})"
            )
        return self


# -------------------------------------------------------------------------- model, clients, …


class Model(Section):
    """The network. Sizes that are not given are the network's own."""

    name: ModelName = "small-mlp"
    features: Size | None = None  # of the head
    components: Size | None = None  # principal components that are kept
    filters: Size | None = None  # of a convolution
    hidden: Size | None = None  # units of a layer
    layers: Annotated[int, Field(ge=1, le=3)] | None = None
    gamma: Annotated[float, Field(gt=0, le=1e3)] | None = None  # of the kernel exp(−γ²‖x − y‖²/2)
    whitening: Annotated[float, Field(ge=0, le=1)] | None = None  # 0: variances as they are, 1: all alike
    width: Annotated[float, Field(gt=0, le=1e6)] | None = None  # σ of the kernel exp(−‖x − y‖²/σ²)

    @property
    def options(self) -> dict[str, Any]:
        """The sizes that are given."""
        return self.model_dump(exclude={"name"}, exclude_none=True)

    @model_validator(mode="after")
    def _own_options(self) -> Model:
        allowed = MODEL_OPTIONS[self.name]
        for key, value in self.options.items():
            if key not in allowed:
                has = ", ".join(allowed) or "none"
                raise ValueError(f"model.{key} = {value!r}: model.name = {self.name!r} takes {has}")
        return self

    @property
    def learnt(self) -> int:
        """How many layers of its encoder are learnt from released moments, one release each."""
        layers = self.layers or 1
        return {
            "private-pca": layers,
            "scattering": 1,
            "patch-filters": layers + 1,
            "patch-behaviour": 1,
        }.get(self.name, 0)


class Clients(Section):
    """How many clients, how many of them per round, and what each may use."""

    count: Count = 30
    fraction: Fraction = 1.0
    quorum: Count = 1  # fewest uploads of a round; with fewer, it is not used and the run stops
    cpus: Positive = 1.0
    gpus: NonNegative = 0.0
    together: Literal["auto"] | Count = "auto"  # how many a worker trains at once; 1: one after the other

    @property
    def at_once(self) -> int | None:
        """How many a worker trains at once; None where what was measured decides."""
        return None if self.together == "auto" else self.together

    @model_validator(mode="after")
    def _possible_quorum(self) -> Clients:
        if self.quorum > (asked := max(1, round(self.fraction * self.count))):
            raise ValueError(f"clients.quorum = {self.quorum}: a round asks {asked} clients")
        return self

    @model_validator(mode="after")
    def _whole_gpus(self) -> Clients:
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError(f"clients.gpus = {self.gpus:g}: expected a share of one GPU or a whole number")
        return self


class Sgd(Section):
    """Plain local SGD. No privacy."""

    name: Literal["sgd"] = "sgd"
    learning_rate: Positive = 0.1
    learning_rate_decay: NonNegative = 0.0  # lr / (1 + decay · step), per mini-batch
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: NonNegative = 0.0
    batch_size: Count = 32
    local_epochs: Count = 1
    update_fraction: Fraction = 1.0  # selective SGD: each step changes only this share, the largest


class Psgd(Section):
    """DP-SGD through Opacus. σ is calibrated for all rounds before the first step."""

    name: Literal["psgd"]
    learning_rate: Positive = 0.5
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    sample_rate: Fraction = 0.1  # q: chance of each record to be in a step's batch
    local_epochs: Count = 1
    clip: Positive = 1.0  # C: L2 bound on each record's gradient
    gradients: Literal["auto", "hooks", "ghost", "vmap"] = "auto"

    @property
    def steps_per_round(self) -> int:
        """Steps of one round: a local epoch is 1/q steps."""
        return self.local_epochs * max(1, round(1 / self.sample_rate))


class Functional(Section):
    """What the trainers of the functional mechanism share: released once, however many rounds follow."""

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


class Dpa(Functional):
    """dPA: auto-encoder and head from perturbed objectives; proved on an encoder that no record decides."""

    name: Literal["dpa"]


class Pcdbn(Functional):
    """pCDBN: convolutional layers and head from perturbed objectives; proved from released moments."""

    name: Literal["pcdbn"]
    approximation: ApproximationName = "chebyshev"  # of the sigmoid in the energy
    degree: Annotated[int, Field(ge=1, le=15)] = 7  # L


class LaplaceMechanism(Functional):
    """What AdLM and ILM share."""

    # The paper's form: of the budget, ε1 goes to relevances, ε3 to labels, and the rest, ε2, to inputs.
    relevance_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    label_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    relevance_epochs: Count = 12
    batch_size: Count = 1800  # |L|, which the noise is divided by


class Adlm(LaplaceMechanism):
    """AdLM: more noise on inputs that matter less. Proved: statistics, with relevance of public records."""

    name: Literal["adlm"]
    relevance_share: Annotated[float, Field(gt=0, lt=1)] = 1 / 3
    label_share: Annotated[float, Field(gt=0, lt=1)] = 1 / 3


class Ilm(LaplaceMechanism):
    """ILM: the same with identical noise on all inputs."""

    name: Literal["ilm"]
    relevance_share: Annotated[float, Field(ge=0, le=0)] = 0.0


class Svm(Section):
    """The private SVM with an RBF kernel: ½‖w‖² + (C/n) Σ hinge, solved, then noise on w; once."""

    name: Literal["svm"]
    cost: Annotated[float, Field(ge=1e-3, le=1e6)] = 300.0  # C
    frequencies: Literal["public", "random"] = "public"  # ρ: fitted to public records (hybrid), or drawn
    noise: Literal["auto", "gamma", "laplace", "gaussian"] = "auto"  # gaussian with a delta, else gamma
    perturb: bool = True  # false: no noise, no privacy


Trainer = Annotated[Sgd | Psgd | Dpa | Pcdbn | Adlm | Ilm | Svm, Field(discriminator="name")]
PRIVATE_TRAINERS = ("psgd", "dpa", "pcdbn", "adlm", "ilm", "svm")


class Averaging(Section):
    """The mean of all changes, weighted by records; everything is exchanged in every round."""

    name: Literal["averaging"] = "averaging"


class Statistics(Section):
    """Every site's statistics once, added up; the server solves for the model. Later rounds are free."""

    name: Literal["statistics"]


class Centralised(Section):
    """All records in one place."""

    name: Literal["centralised"]


class Public(Section):
    """The public records alone (data.public_records), in one place: what can be had without the others."""

    name: Literal["public"]


class Standalone(Section):
    """Every site alone."""

    name: Literal["standalone"]


Fractions = Annotated[
    Annotated[Fraction, Tag("number")] | Annotated[tuple[Fraction, ...], Field(strict=False), Tag("list")],
    Discriminator(_number_or_list),
]


class Dssgd(Section):
    """Distributed selective SGD: selected changes up, the most updated parameters down."""

    name: Literal["dssgd"]
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

    def upload_share(self, client: int) -> float:
        """Return a client's θ_u."""
        return _of(self.upload_fraction, client)

    def download_share(self, client: int) -> float:
        """Return a client's θ_d."""
        return _of(self.download_fraction, client)

    def check(self, clients: Clients) -> None:
        """Refuse what cannot be run, or would silently not be used."""
        for key in ("upload_fraction", "download_fraction"):
            given = getattr(self, key)
            if isinstance(given, tuple) and len(given) != clients.count:
                raise ValueError(
                    f"strategy.{key} has {len(given)} numbers: expected one number, or one for each of "
                    f"{clients.count} clients"
                )
        for key, owners, value in (
            ("threshold", ("random_with_threshold", "sparse_vector"), self.selection),
            ("clip", ("random_mask",), self.selection),
            ("split", ("sparse_vector",), self.selection),
            ("outdated", ("asynchronous",), self.exchange),
        ):
            if value not in owners and getattr(self, key) != type(self).model_fields[key].default:
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
        if self.exchange == "free_running" and clients.fraction != 1:
            raise ValueError(
                f"clients.fraction = {clients.fraction:g}: strategy.exchange = 'free_running' asks every "
                "client as soon as it is free; allowed: 1.0"
            )


Number = TypeVar("Number", int, float)


def _of(numbers: Number | tuple[Number, ...], client: int) -> Number:
    return numbers[client] if isinstance(numbers, tuple) else numbers


Strategy = Annotated[
    Averaging | Centralised | Public | Standalone | Dssgd | Statistics, Field(discriminator="name")
]
POOLED = ("centralised", "public")  # one node has all that is used


class Privacy(Section):
    """The budget of each site over the whole run, and how noise is drawn."""

    budget_epsilon: Annotated[float, Field(gt=0, le=1e9)] | None = None
    delta: Annotated[float, Field(ge=1e-10, lt=1)] | None = None  # none: pure ε
    variant: Literal["proved", "paper", "paper_as_printed", "paper_as_released"] = "proved"
    noise_source: NoiseSource = "simulation"


class Ray(Section):
    """Which Ray cluster: none starts one on this machine."""

    address: str | None = None
    object_store_gb: Annotated[float, Field(ge=0.08)] | None = None  # of one on this machine

    @model_validator(mode="after")
    def _own_store(self) -> Ray:
        if self.address is not None and self.object_store_gb is not None:
            raise ValueError(
                f"ray.object_store_gb = {self.object_store_gb:g}: the cluster at ray.address = "
                f"{self.address!r} has its own; set it where that is started"
            )
        return self


class Experiment(Section):
    """Everything that decides a result. `digest` identifies it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "experiment"
    description: str = ""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    rounds: Count = 10
    evaluate_every: Count = 1
    round_timeout: Positive = 3600.0  # seconds until a missing reply counts as failed
    data: Data = Data()
    model: Model = Model()
    clients: Clients = Clients()
    trainer: Trainer = Sgd()
    strategy: Strategy = Averaging()
    privacy: Privacy = Privacy()
    ray: Ray = Ray()

    @model_validator(mode="after")
    def _possible(self) -> Experiment:
        strategy = self.strategy
        check_pair(self)
        check_privacy(self)
        if isinstance(strategy, Dssgd):
            strategy.check(self.clients)
        if strategy.name in POOLED and self.clients.fraction != 1:
            raise ValueError(
                f"clients.fraction = {self.clients.fraction:g}: strategy.name = {strategy.name!r} "
                "has all records in one place; allowed: 1.0"
            )
        if strategy.name == "public" and (self.private or not self.data.public_records):
            raise ValueError(
                "strategy.name = 'public' trains on public records alone: expected data.public_records, and "
                "a trainer that adds no noise"
            )
        return self

    @property
    def mechanism(self) -> tuple[str, str] | None:
        """What makes it private, as the key and its value; None where nothing does."""
        if isinstance(self.strategy, Dssgd) and self.strategy.selection in get_args(PrivateSelection):
            return "strategy.selection", self.strategy.selection
        private = self.trainer.name in PRIVATE_TRAINERS and getattr(self.trainer, "perturb", True)
        return ("trainer.name", self.trainer.name) if private else None

    @property
    def network(self) -> dict[str, Any]:
        """What its network is built with: the model's own options, and what a trainer decides of it."""
        trainer = self.trainer
        if isinstance(trainer, Pcdbn) and self.model.name in PAPER_MODELS and trainer.truncate:
            return {**self.model.options, "polynomial": approximation(trainer.approximation, trainer.degree)}
        if self.model.name in RELEVANCE_MODELS:
            return {**self.model.options, "adaptive": trainer.name == "adlm"}
        if isinstance(trainer, Dpa) and self.privacy.variant == "paper_as_released":
            return {**self.model.options, "intercept": True}
        return self.model.options

    @property
    def fits_to_public(self) -> bool:
        """Whether its encoder is fitted to public records before the first round."""
        if isinstance(self.trainer, Svm):
            return self.trainer.frequencies == "public"
        return self.model.name in RELEVANCE_MODELS and bool(self.data.public_records or self.data.public_data)

    @property
    def private(self) -> bool:
        """Whether it spends privacy budget."""
        return self.mechanism is not None

    @property
    def nodes(self) -> int:
        """How many Flower nodes take part: one when all records are pooled."""
        return 1 if self.strategy.name in POOLED else self.clients.count

    @property
    def digest(self) -> str:
        """SHA-256 of what decides the result: not its name, its words, or the machine it runs on."""
        content = self.model_dump(mode="json", exclude={"name", "description", "ray"})
        for key in ("cpus", "gpus"):
            del content["clients"][key]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def tables(self) -> dict[str, Any]:
        """Return the resolved experiment as plain tables, without empty keys, for TOML or JSON."""
        dumped: dict[str, Any] = self.model_dump(mode="json", exclude_none=True)
        if self.data.name != "folder":
            for key in FOLDER_KEYS:
                dumped["data"].pop(key, None)
        return dumped
