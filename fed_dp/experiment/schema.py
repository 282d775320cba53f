"""The experiment: a frozen model of everything that decides a result. Unknown keys are errors."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, model_validator

from fed_dp import plugins
from fed_dp.data.options import Data
from fed_dp.experiment.components import (
    Mechanism,
    StrategyOptions,
    TrainerOptions,
    check_network,
    check_task,
)
from fed_dp.mechanisms import NoiseSource
from fed_dp.models.network import Network, NetworkSpec
from fed_dp.options import Count, Fraction, NonNegative, Positive, Section
from fed_dp.tasks import Classification, Task

BATCHES_OFF = ("auto", 1)  # values of clients.together under which each client may be trained alone


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


DEFAULTS: dict[str, str] = {
    "data": "digits",
    "model": "small-mlp",
    "trainer": "sgd",
    "strategy": "averaging",
    "task": "classification",
}


def _default(kind: plugins.Kind) -> Any:
    """Return a field whose default is a component with its own defaults."""
    return Field(default_factory=lambda: plugins.read(kind, {"name": DEFAULTS[kind]}))


class Experiment(Section):
    """Everything that decides a result. `digest` identifies it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "experiment"
    description: str = ""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    rounds: Count = 10
    evaluate_every: Count = 1
    round_timeout: Positive = 3600.0  # seconds until a missing reply counts as failed
    data: Annotated[SerializeAsAny[Data], plugins.by_name("data", default=DEFAULTS["data"])] = _default(
        "data"
    )
    model: Annotated[SerializeAsAny[Network], plugins.by_name("model", default=DEFAULTS["model"])] = _default(
        "model"
    )
    task: Annotated[SerializeAsAny[Task], plugins.by_name("task", default=DEFAULTS["task"])] = _default(
        "task"
    )
    clients: Clients = Clients()
    trainer: Annotated[
        SerializeAsAny[TrainerOptions], plugins.by_name("trainer", default=DEFAULTS["trainer"])
    ] = _default("trainer")
    strategy: Annotated[
        SerializeAsAny[StrategyOptions], plugins.by_name("strategy", default=DEFAULTS["strategy"])
    ] = _default("strategy")
    privacy: Privacy = Privacy()
    ray: Ray = Ray()

    @model_validator(mode="after")
    def _possible(self) -> Experiment:
        """Ask every part whether it goes together with the others."""
        check_network(self.trainer, self.model)
        check_task(self.trainer, self.task)
        self._check_client_batches()
        self._check_public_records()
        self.trainer.check(self)
        self._check_behaviour()
        self._check_privacy()
        if self.strategy.pooled and self.clients.fraction != 1:
            raise ValueError(
                f"clients.fraction = {self.clients.fraction:g}: strategy.name = {self.strategy.name!r} "
                "has all records in one place; allowed: 1.0"
            )
        self.strategy.check(self)
        return self

    def _check_behaviour(self) -> None:
        """Refuse records without past and friends where a network needs them, and persons that differ."""
        data, model = self.data, self.model
        if model.of_behaviour and not data.has_behaviour:
            sets = (name for name, each in plugins.own_components("data").items() if each.of_behaviour)
            needs = " (data.person, data.time and data.rises are missing)" if data.of_behaviour else ""
            raise ValueError(
                f"data.name = {data.name!r}: model.name = {model.name!r} needs records of behaviour{needs}; "
                f"allowed: {', '.join(sets)}"
            )
        if model.persons != data.numbered_persons:
            raise ValueError(
                f"model.users = {model.persons}, but data.persons = {data.numbered_persons}: parameters of "
                "persons and persons' numbers in the records need each other; expected both (model.name = "
                "'dpah'), and alike, or neither"
            )

    def _check_client_batches(self) -> None:
        """Refuse batches of clients where each is trained alone."""
        if self.clients.together in BATCHES_OFF:
            return
        alone = self.trainer.trained_alone(self)
        if not alone and self.privacy.noise_source == "secure":
            alone = "privacy.noise_source = 'secure'"
        if alone:
            raise ValueError(
                f"clients.together = {self.clients.together}: with {alone}, each client is trained alone; "
                "allowed: 'auto', 1"
            )

    def _check_public_records(self) -> None:
        """Refuse public records that nothing is fitted to, and what they cannot stand for."""
        data, model, trainer = self.data, self.model, self.trainer
        if model.holds_records and not self.strategy.public_alone:
            raise ValueError(
                f"model.name = {model.name!r} consists of the records that it is trained on: expected with "
                f"strategy.name = 'public', which uses public records alone, not {self.strategy.name!r}"
            )
        if self.fits_to_public and any(
            self.strategy.download_share(k) != 1 for k in range(self.clients.count)
        ):
            share = getattr(self.strategy, "download_fraction", None)
            raise ValueError(
                f"strategy.download_fraction = {share!r}: what is fitted to public records "
                "comes from the server, whole; allowed: 1.0"
            )
        if data.public_data is None:
            return
        if not data.of_digits:
            sets = (name for name, each in plugins.own_components("data").items() if each.of_digits)
            raise ValueError(
                f"data.public_data = {data.public_data!r}: data.name = {data.name!r} are no images of "
                f"digits; allowed with {', '.join(sets)}"
            )
        if not self.fits_to_public:
            raise ValueError(
                f"data.public_data = {data.public_data!r}: model.name = {model.name!r} with trainer.name = "
                f"{trainer.name!r} is not fitted to public records"
            )

    def _check_privacy(self) -> None:
        """Refuse a privacy key that nothing holds to, and a mechanism without what it needs."""
        self._check_expected_records()
        self.trainer.check_noise(self)
        source, mechanism = self.noisy_part, self.mechanism
        if source is None or mechanism is None:
            for key in Privacy.model_fields:
                if self.privacy.is_set(key):
                    raise ValueError(
                        f"privacy.{key} = {getattr(self.privacy, key)!r}: trainer.name = "
                        f"{self.trainer.name!r} "
                        "adds no noise, so it cannot hold; allowed with trainer.name = "
                        f"{_private_trainers()}, "
                        "or with strategy.selection = 'sparse_vector' or 'random_mask'"
                    )
            return
        if source is not self.trainer and self.trainer.private:
            key, value = mechanism
            without = ", or trainer.perturb = false" if hasattr(self.trainer, "perturb") else ""
            raise ValueError(
                f"{key} = {value!r}: trainer.name = {self.trainer.name!r} adds noise of its own, and to "
                "select what is private already costs nothing; allowed: largest_values, "
                f"random_with_threshold{without}"
            )
        source.check_privacy(self.privacy)

    def _check_expected_records(self) -> None:
        """Refuse a declared number of records that nothing is divided by, or that some client has not."""
        declared = self.data.expected_records
        if declared is None:
            return
        stated = list(declared) if isinstance(declared, tuple) else declared
        divided = self.noisy_part is self.trainer and self.trainer.divides_by_records
        if not divided or self.trainer.as_in_paper(self.model):
            raise ValueError(
                f"data.expected_records = {stated}: nothing is divided by it; allowed where a trainer "
                f"adds noise in its proved form: {_private_trainers()}"
            )
        if isinstance(declared, tuple) and len(declared) != self.nodes:
            raise ValueError(
                f"data.expected_records = {stated}: expected one number, or one for each of "
                f"{self.nodes} clients"
            )

    @property
    def noisy_part(self) -> Mechanism | None:
        """The part that adds noise: the strategy's selection, the trainer, or none."""
        if self.strategy.mechanism is not None:
            return self.strategy
        return self.trainer if self.trainer.private else None

    @property
    def mechanism(self) -> tuple[str, str] | None:
        """What makes it private, as the key and its value; None where nothing does."""
        return None if self.noisy_part is None else self.noisy_part.mechanism

    @property
    def private(self) -> bool:
        """Whether it spends privacy budget."""
        return self.noisy_part is not None

    @property
    def fits_to_public(self) -> bool:
        """Whether its encoder is fitted to public records before the first round."""
        return self.trainer.fits_to_public(self)

    @property
    def nodes(self) -> int:
        """How many Flower nodes take part: one when all records are pooled."""
        return 1 if self.strategy.pooled else self.clients.count

    @property
    def digest(self) -> str:
        """SHA-256 of what decides the result: not its name, its words, or the machine it runs on.

        Of components of other packages, their code is a part of it.
        """
        content = self.model_dump(mode="json", exclude={"name", "description", "ray"})
        for key in ("cpus", "gpus"):
            del content["clients"][key]
        if self.task == Classification():  # as in earlier versions, which had no other
            del content["task"]
        for kind in plugins.GROUPS:
            section: Section = getattr(self, kind)
            for key in section.later_keys:
                if not section.is_set(key):
                    del content[kind][key]
        parts = {kind: plugins.foreign_code(getattr(self, kind)) for kind in plugins.GROUPS}
        if foreign := {kind: code for kind, code in parts.items() if code is not None}:
            content["code"] = foreign
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def network(self, shape: tuple[int, ...], classes: int) -> NetworkSpec:
        """Return what its network is built from, for records of a shape and a number of classes."""
        return NetworkSpec(self.model, shape, classes, self.trainer.network_options(self), self.task)

    def tables(self) -> dict[str, Any]:
        """Return the resolved experiment as plain tables, without empty keys, for TOML or JSON."""
        return self.model_dump(mode="json", exclude_none=True)


def _private_trainers() -> str:
    """Return the trainers that can add noise, as words."""
    names = [
        repr(name)
        for name, trainer in plugins.own_components("trainer").items()
        if any(guarantee.status == "proved" for guarantee in trainer.guarantees)
    ]
    return ", ".join(names[:-1]) + (" or " if len(names) > 1 else "") + "".join(names[-1:])
