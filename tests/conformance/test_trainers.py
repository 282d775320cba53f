"""What every trainer must do. A new trainer is added to TRAINERS and passes all of it."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from fed_dp.clients.registry import make_trainer
from fed_dp.clients.trainer import Fit, Site, State, Trainer
from fed_dp.experiment import Experiment
from fed_dp.experiment.federation import federation
from fed_dp.experiment.release import agreement
from fed_dp.models import Evaluator, Vector, initial_weights
from tests.conftest import small


def paper(name: str, model: dict[str, Any], **options: Any) -> Experiment:
    """A paper's form without its noise. It takes many rounds to learn: whole runs show that it does."""
    return small(model=model, trainer={"name": name, "perturb": False, **options})


TRAINERS = {
    "sgd": small("sgd"),
    "sgd, selective": small(trainer={"name": "sgd", "learning_rate": 0.2, "update_fraction": 0.1}),
    "psgd": small("psgd"),
    "psgd, ghost": small("psgd", trainer={"name": "psgd", "gradients": "ghost", "sample_rate": 0.25}),
    "psgd on scattering": small("psgd", model={"name": "scattering-linear"}),
    "sgd on scattering": small("sgd", model={"name": "scattering-linear"}),
    "psgd, patch cnn": small("psgd", model={"name": "patch-cnn", "filters": 4}),
    "dpa, exact": paper("dpa", {"name": "auto-encoder", "hidden": 12}, truncate=False),
    "dpa, truncated": paper("dpa", {"name": "auto-encoder", "hidden": 12}),
    "adlm": paper("adlm", {"name": "adlm-cnn", "filters": 2, "hidden": 6}),
    "ilm, exact": paper("ilm", {"name": "adlm-cnn", "filters": 2, "hidden": 6}, truncate=False),
    "pcdbn, truncated": paper("pcdbn", {"name": "cdbn", "filters": 2, "hidden": 8}),
}
QUICK = [name for name, experiment in TRAINERS.items() if experiment.trainer.name in ("sgd", "psgd")]
PRIVATE = [name for name, experiment in TRAINERS.items() if experiment.private]


class Bench:
    """A trainer with the records of the experiment's clients."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.members = federation(experiment)
        self.data = self.members.dataset
        self.network = (experiment.model.name, self.data.shape, self.data.classes)
        self.options = experiment.network
        self.start: Vector = initial_weights(*self.network, seed=experiment.seed, options=self.options)

    def trainer(self) -> Trainer:
        return make_trainer(self.experiment, self.data)[0]

    def fit(
        self, trainer: Trainer, *, client: int = 0, turn: int = 1, seed: int = 3, state: State | None = None
    ) -> Fit:
        x, y = self.members.client(client)
        return trainer.fit(self.start.copy(), Site(x, y, client, turn, seed), state or {})


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
    trainer = bench.trainer()
    x, y = bench.members.client(0)
    changes = {
        trainer.fit(bench.start, Site(x, y, client, turn, seed), {}).change.tobytes()
        for client, turn, seed in ((0, 1, 3), (0, 2, 3), (1, 1, 3), (0, 1, 4))
    }
    assert len(changes) == 4


def test_neither_the_weights_nor_the_records_are_touched(bench: Bench) -> None:
    x, y = bench.members.client(0)
    weights = bench.start.copy()
    kept = [array.copy() for array in (x, y, weights)]
    bench.trainer().fit(weights, Site(x, y, 0, 1, 3), {})
    assert all(map(np.array_equal, kept, (x, y, weights)))


@pytest.mark.parametrize("name", QUICK)
def test_training_helps(name: str) -> None:
    bench = Bench(TRAINERS[name])
    x = bench.data.inputs(bench.data.test)
    evaluator = Evaluator(*bench.network, x, bench.data.test.y, bench.options)
    fit = bench.fit(bench.trainer())
    assert evaluator.scores(bench.start + fit.change)["loss"] < evaluator.scores(bench.start)["loss"]


def test_state_and_metrics_are_plain_numbers_that_survive_json(bench: Bench) -> None:
    fit = bench.fit(bench.trainer())
    assert json.loads(json.dumps(dict(fit.state))) == dict(fit.state)
    assert all(isinstance(value, float) and math.isfinite(value) for value in fit.metrics.values())


def test_a_trainer_spends_if_and_only_if_it_says_so(bench: Bench) -> None:
    trainer = bench.trainer()
    agreed = agreement(bench.experiment, client=0, size=bench.start.size)
    assert trainer.spends == bench.experiment.private == (agreed is not None)


def test_a_private_trainer_sends_nothing_computed_from_records_without_noise(private: Bench) -> None:
    x, y = private.members.client(0)
    trainer = private.trainer()
    other = np.roll(y, 1)
    one, two = (trainer.fit(private.start, Site(x, labels, 0, 1, 3), {}) for labels in (y, other))
    assert one.change.tobytes() != two.change.tobytes()
    assert dict(one.metrics) == dict(two.metrics)
