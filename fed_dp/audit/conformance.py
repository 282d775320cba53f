"""What every trainer must do, tried on the smallest experiments that it names itself.

`fed-dp conformance NAME` runs it, for built-in trainers and for anybody's; so do fed_dp's own tests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fed_dp import plugins, seeds
from fed_dp.clients.building import make_trainer
from fed_dp.clients.trainer import ClientData, Fit, StagedTrainer, Trainer
from fed_dp.data.dataset import Integers
from fed_dp.errors import ConfigError, FedDpError
from fed_dp.experiment import Experiment, build
from fed_dp.experiment.components import TrainerOptions
from fed_dp.experiment.federation import make_federation
from fed_dp.experiment.plan import release_plan
from fed_dp.experiment.start import network_of, starting_weights
from fed_dp.mechanisms import SimulationNoise
from fed_dp.models import Vector, use_one_thread

CLIENTS, EPSILON, DELTA = 4, 4.0, 1e-5  # of the experiments
PLAIN_ROUNDS = 4  # enough for every stage of what is released in stages


class Nonconformance(AssertionError):
    """A trainer does not do what every trainer must."""


@dataclass(frozen=True, slots=True)
class Result:
    """One check of one form of a trainer; `why` is empty where it passed."""

    form: str
    check: str
    why: str = ""


class Bench:
    """A trainer with the records of its experiment's clients."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.federation = make_federation(experiment)
        self.data = self.federation.dataset
        self.network = network_of(experiment, self.federation)
        self.start: Vector = starting_weights(experiment, self.federation)
        self.plan = release_plan(experiment, client=0, size=self.start.size)
        self.last = len(self.plan.stages) if self.plan and self.plan.stages else 1  # stage, and round

    def trainer(self) -> Trainer:
        """Return a fresh trainer."""
        return make_trainer(self.experiment, self.data)[0]

    def fit(
        self,
        trainer: Trainer,
        *,
        client: int = 0,
        server_round: int = 0,
        seed: int = 3,
        y: Integers | None = None,
        start: Vector | None = None,
    ) -> Fit:
        """Train as the ClientApp does: one that releases does that first, and goes on without records."""
        server_round = server_round or self.last
        weights = self.start.copy() if start is None else start
        x, labels = self.federation.client(client)
        site = ClientData(x, labels if y is None else y, client, server_round, seed)
        if self.plan is None or not isinstance(trainer, StagedTrainer):
            return trainer.fit(weights, site, {})
        stage = trainer.stage(server_round)
        noise = SimulationNoise(seeds.generator(seed, "privacy noise", server_round, client))
        released = trainer.release(weights, site, stage, noise)
        return trainer.follow(weights, released, stage, records=len(site.y))


def _require(held: bool, why: str) -> None:
    if not held:
        raise Nonconformance(why)


def the_change_is_a_finite_float32_vector_of_the_models_size(bench: Bench) -> None:
    """Its change is a float32 vector of the model's size, finite, and not all 0."""
    change = bench.fit(bench.trainer()).change
    _require(change.dtype == np.float32, f"the change is {change.dtype}, expected float32")
    if not bench.experiment.strategy.uploads_statistics:  # else it is the statistic
        expected = bench.start.shape
        _require(change.shape == expected, f"its shape is {change.shape}, expected {expected}")
    _require(bool(np.isfinite(change).all()), "the change holds NaN or infinity")
    _require(bool(np.abs(change).max() > 0), "nothing has changed")


def the_same_place_gives_the_same_bytes_in_a_used_and_in_a_fresh_trainer(bench: Bench) -> None:
    """Round, client and seed decide everything: a retry sends the same bytes."""
    used = bench.trainer()
    first = bench.fit(used).change.tobytes()
    bench.fit(used, client=1)
    _require(bench.fit(used).change.tobytes() == first, "a trainer that was used gives other bytes")
    _require(bench.fit(bench.trainer()).change.tobytes() == first, "a fresh trainer gives other bytes")


def round_client_and_seed_each_draw_anew(bench: Bench) -> None:
    """Another round, client or seed gives another change."""
    trainer, last = bench.trainer(), bench.last
    changes = {
        bench.fit(trainer, client=client, server_round=server_round, seed=seed).change.tobytes()
        for client, server_round, seed in ((0, last, 3), (0, last + 1, 3), (1, last, 3), (0, last, 4))
    }
    _require(len(changes) == 4, f"of 4 changes that should differ, {len(changes)} do")


def neither_the_weights_nor_the_records_are_touched(bench: Bench) -> None:
    """Leave inputs, labels and weights as they were."""
    x, y = bench.federation.client(0)
    weights = bench.start.copy()
    given: list[NDArray[Any]] = [x, y, weights]
    kept = [array.copy() for array in given]
    bench.fit(bench.trainer(), y=y, start=weights)
    same = all(np.array_equal(old, new) for old, new in zip(kept, given, strict=True))
    _require(same, "it has changed its inputs, labels or weights in place")


def state_and_metrics_are_plain_numbers_that_survive_json(bench: Bench) -> None:
    """State and metrics can be written down."""
    fit = bench.fit(bench.trainer())
    _require(json.loads(json.dumps(dict(fit.state))) == dict(fit.state), f"its state is {dict(fit.state)}")
    finite = all(isinstance(value, float) and math.isfinite(value) for value in fit.metrics.values())
    _require(finite, f"its metrics are {dict(fit.metrics)}, expected finite floats")


def it_spends_if_and_only_if_it_says_so(bench: Bench) -> None:
    """`is_private`, the experiment and its release plan agree."""
    private = bench.trainer().is_private
    agree = private == bench.experiment.private == (bench.plan is not None)
    _require(agree, f"is_private is {private}, its options' private is {bench.experiment.private}")


def a_private_trainer_sends_nothing_computed_from_records_without_noise(bench: Bench) -> None:
    """Other labels change what is released, and no metric."""
    if bench.plan is None:
        return
    _, y = bench.federation.client(0)
    trainer = bench.trainer()
    one, two = (bench.fit(trainer, y=labels) for labels in (y, np.roll(y, 1)))
    _require(one.change.tobytes() != two.change.tobytes(), "the change does not depend on the records at all")
    _require(dict(one.metrics) == dict(two.metrics), "its metrics depend on the records, and have no noise")


Check = Callable[[Bench], None]
CHECKS: tuple[Check, ...] = (
    the_change_is_a_finite_float32_vector_of_the_models_size,
    the_same_place_gives_the_same_bytes_in_a_used_and_in_a_fresh_trainer,
    round_client_and_seed_each_draw_anew,
    neither_the_weights_nor_the_records_are_touched,
    state_and_metrics_are_plain_numbers_that_survive_json,
    it_spends_if_and_only_if_it_says_so,
    a_private_trainer_sends_nothing_computed_from_records_without_noise,
)


def conformance(name: str) -> Iterator[Result]:
    """Try every check on every form of a trainer.

    Parameters
    ----------
    name
        A registered trainer, or the import path of one ("package.module:Class").

    Raises
    ------
    ConfigError
        When there is none of this name, or it names no experiment that audits it.
    """
    use_one_thread()
    for form, experiment in experiments_of(name).items():
        try:
            bench = Bench(experiment)
        except FedDpError as error:
            yield Result(form, "it can be built", str(error))
            continue
        for check in CHECKS:
            try:
                check(bench)
            except Exception as error:
                why = str(error) if isinstance(error, Nonconformance) else f"{type(error).__name__}: {error}"
                yield Result(form, words(check), why)
            else:
                yield Result(form, words(check))


def words(check: Check) -> str:
    """Return what a check asks, in words."""
    return check.__name__.replace("_", " ")


def experiments_of(name: str) -> dict[str, Experiment]:
    """Return the smallest experiment of each form of a trainer: those that audit it, or plain digits."""
    component: type[TrainerOptions] = plugins.find("trainer", name)
    found: dict[str, Experiment] = {}
    for variants in component.audits().values():
        for variant, setup in variants.items():
            tables = {**setup.tables, "trainer": {**setup.tables.get("trainer", {}), "name": name}}
            found[variant] = _experiment(tables, component, variant)
    if found:
        return found
    if component.guarantees:
        raise ConfigError(
            f"trainer.name = {name!r}: it has guarantees, and audits() names no experiment that shows "
            "what it releases"
        )
    return {"no privacy": _experiment({**component.smallest(), "trainer": {"name": name}}, component, None)}


def _experiment(
    tables: Mapping[str, Any], component: type[TrainerOptions], variant: str | None
) -> Experiment:
    whole: dict[str, Any] = {"rounds": PLAIN_ROUNDS, "clients": {"count": CLIENTS}, "name": "conformance"}
    whole |= tables
    if variant is not None:
        options: TrainerOptions = plugins.read("trainer", whole["trainer"])
        privacy: dict[str, Any] = {"budget_epsilon": EPSILON, "variant": variant}
        whole["privacy"] = privacy | ({"delta": DELTA} if options.requires_delta else {})
    return build(whole, where=f"conformance of {component.__name__}")
