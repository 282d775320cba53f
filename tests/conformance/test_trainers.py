"""What every trainer must do. A new trainer is added to TRAINERS and passes all of it."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from fed_dp import plugins, seeds
from fed_dp.clients.building import make_trainer
from fed_dp.clients.trainer import ClientData, Fit, StagedTrainer, Trainer
from fed_dp.data.dataset import Integers
from fed_dp.experiment import Experiment
from fed_dp.experiment.federation import make_federation
from fed_dp.experiment.plan import release_plan
from fed_dp.experiment.start import network_of, starting_weights
from fed_dp.mechanisms import SimulationNoise
from fed_dp.models import Evaluator, Vector
from tests.conftest import small

BUDGET = {"budget_epsilon": 4.0, "delta": 1e-5}


def paper(name: str, model: dict[str, Any], **options: Any) -> Experiment:
    """A paper's form without its noise. It takes many rounds to learn: whole runs show that it does."""
    return small(model=model, trainer={"name": name, "perturb": False, **options})


def as_claimed(name: str, model: dict[str, Any], variant: str = "paper") -> Experiment:
    """A paper's form with its noise."""
    return small(model=model, trainer={"name": name}, privacy={"budget_epsilon": 4.0, "variant": variant})


def proved(name: str, model: dict[str, Any], **changes: Any) -> Experiment:
    """What is released once, by stages, and followed without records."""
    return small(**{"model": model, "trainer": {"name": name}, "privacy": BUDGET, "rounds": 4, **changes})


PUBLIC = {"data": {"public_records": 200}}
AUTO_ENCODER, CDBN = {"name": "auto-encoder", "hidden": 12}, {"name": "cdbn", "filters": 2, "hidden": 8}
ADLM_CNN = {"name": "adlm-cnn", "filters": 2, "hidden": 6}
TRAINERS = {
    "sgd": small("sgd"),
    "sgd, selective": small(trainer={"name": "sgd", "learning_rate": 0.2, "update_fraction": 0.1}),
    "psgd": small("psgd"),
    "psgd, ghost": small("psgd", trainer={"name": "psgd", "gradients": "ghost", "sample_rate": 0.25}),
    "psgd on scattering": small("psgd", model={"name": "scattering-linear"}),
    "sgd on scattering": small("sgd", model={"name": "scattering-linear"}),
    "psgd, patch cnn": small("psgd", model={"name": "patch-cnn", "filters": 4}),
    "dpa, exact": paper("dpa", AUTO_ENCODER, truncate=False),
    "dpa, truncated": paper("dpa", AUTO_ENCODER),
    "adlm": paper("adlm", ADLM_CNN),
    "ilm, exact": paper("ilm", ADLM_CNN, truncate=False),
    "pcdbn, truncated": paper("pcdbn", CDBN),
    "dpa, claimed": as_claimed("dpa", AUTO_ENCODER),
    "dpa, as printed": as_claimed("dpa", AUTO_ENCODER, "paper_as_printed"),
    "pcdbn, claimed": as_claimed("pcdbn", CDBN),
    "adlm, claimed": as_claimed("adlm", ADLM_CNN),
    "ilm, as released": as_claimed("ilm", ADLM_CNN, "paper_as_released"),
    "dpa, statistics": proved("dpa", {"name": "random-features", "features": 40}),
    "dpa, learnt": proved("dpa", {"name": "private-pca", "features": 40, "components": 12}),
    "dpa, pure": proved("dpa", {"name": "unit-linear"}, privacy={"budget_epsilon": 4.0}),
    "pcdbn, statistics": proved("pcdbn", {"name": "patch-filters", "filters": 4, "components": 30}),
    "adlm, class sums": proved("adlm", {"name": "class-sums"}, **PUBLIC),
    "ilm, statistics": proved("ilm", {"name": "relevant-scattering", "features": 40}),
    "svm, hybrid": proved("svm", {"name": "rbf", "features": 40}, **PUBLIC),
    "svm, pure": proved("svm", {"name": "rbf", "features": 40}, privacy={"budget_epsilon": 4.0}, **PUBLIC),
}
QUICK = [name for name, experiment in TRAINERS.items() if experiment.trainer.name in ("sgd", "psgd")]
PRIVATE = [name for name, experiment in TRAINERS.items() if experiment.private]


class Bench:
    """A trainer with the records of the experiment's clients."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.members = make_federation(experiment)
        self.data = self.members.dataset
        self.network = network_of(experiment, self.members)
        self.start: Vector = starting_weights(experiment, self.members)
        self.agreed = release_plan(experiment, client=0, size=self.start.size)
        self.last = len(self.agreed.stages) if self.agreed and self.agreed.stages else 1  # stage, and round

    def trainer(self) -> Trainer:
        return make_trainer(self.experiment, self.data)[0]

    def fit(
        self,
        trainer: Trainer,
        *,
        client: int = 0,
        turn: int = 0,
        seed: int = 3,
        y: Integers | None = None,
        start: Vector | None = None,
    ) -> Fit:
        """Train as the ClientApp does: one that releases does that first, and goes on without records."""
        turn, weights = turn or self.last, self.start.copy() if start is None else start
        x, labels = self.members.client(client)
        site = ClientData(x, labels if y is None else y, client, turn, seed)
        if self.agreed is None or not isinstance(trainer, StagedTrainer):
            return trainer.fit(weights, site, {})
        stage = trainer.stage(turn)
        noise = SimulationNoise(seeds.generator(seed, "privacy noise", turn, client))
        released = trainer.release(weights, site, stage, noise)
        return trainer.follow(weights, released, stage, records=len(site.y))


@pytest.fixture(params=TRAINERS)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(TRAINERS[request.param])


@pytest.fixture(params=PRIVATE)
def private(request: pytest.FixtureRequest) -> Bench:
    return Bench(TRAINERS[request.param])


def test_the_change_is_a_finite_float32_vector_of_the_models_size(bench: Bench) -> None:
    fit = bench.fit(bench.trainer())
    assert fit.change.dtype == np.float32
    assert fit.change.shape == bench.start.shape
    assert np.isfinite(fit.change).all()
    assert np.abs(fit.change).max() > 0


def test_the_same_place_gives_the_same_bytes_in_a_used_and_in_a_fresh_trainer(bench: Bench) -> None:
    used = bench.trainer()
    first = bench.fit(used)
    bench.fit(used, client=1)
    assert bench.fit(used).change.tobytes() == first.change.tobytes()
    assert bench.fit(bench.trainer()).change.tobytes() == first.change.tobytes()


def test_round_client_and_seed_each_draw_anew(bench: Bench) -> None:
    trainer, turn = bench.trainer(), bench.last
    changes = {
        bench.fit(trainer, client=client, turn=turn, seed=seed).change.tobytes()
        for client, turn, seed in ((0, turn, 3), (0, turn + 1, 3), (1, turn, 3), (0, turn, 4))
    }
    assert len(changes) == 4


def test_neither_the_weights_nor_the_records_are_touched(bench: Bench) -> None:
    x, y = bench.members.client(0)
    weights = bench.start.copy()
    kept = [array.copy() for array in (x, y, weights)]
    bench.fit(bench.trainer(), y=y, start=weights)
    assert all(map(np.array_equal, kept, (x, y, weights)))


@pytest.mark.parametrize("name", QUICK)
def test_training_helps(name: str) -> None:
    bench = Bench(TRAINERS[name])
    x = bench.data.inputs(bench.data.test)
    evaluator = Evaluator(bench.network, x, bench.data.test.y)
    fit = bench.fit(bench.trainer())
    assert evaluator.scores(bench.start + fit.change)["loss"] < evaluator.scores(bench.start)["loss"]


def test_state_and_metrics_are_plain_numbers_that_survive_json(bench: Bench) -> None:
    fit = bench.fit(bench.trainer())
    assert json.loads(json.dumps(dict(fit.state))) == dict(fit.state)
    assert all(isinstance(value, float) and math.isfinite(value) for value in fit.metrics.values())


def test_a_trainer_spends_if_and_only_if_it_says_so(bench: Bench) -> None:
    assert bench.trainer().is_private == bench.experiment.private == (bench.agreed is not None)


def test_a_private_trainer_sends_nothing_computed_from_records_without_noise(private: Bench) -> None:
    _, y = private.members.client(0)
    trainer = private.trainer()
    one, two = (private.fit(trainer, y=labels) for labels in (y, np.roll(y, 1)))
    assert one.change.tobytes() != two.change.tobytes()
    assert dict(one.metrics) == dict(two.metrics)


def test_every_trainer_and_each_of_its_forms_is_here() -> None:
    known = plugins.components("trainer")
    here = {(e.trainer.name, e.privacy.variant if e.private else "none") for e in TRAINERS.values()}
    assert {name for name, _ in here} == set(known)
    private = {name for name, trainer in known.items() if trainer.guarantees}
    assert {name for name, variant in here if variant == "proved"} == private
    in_paper = {name for name, trainer in known.items() if trainer.paper_needs is not None}
    assert {name for name, variant in here if variant.startswith("paper")} == in_paper
