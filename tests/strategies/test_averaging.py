"""The server's steps: momentum, schedules and averages of models, against their formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from fed_dp.errors import ConfigError
from fed_dp.experiment import build
from fed_dp.sharing.message import Upload
from fed_dp.sharing.update import SparseUpdate
from fed_dp.strategies.averaging import Averaging
from fed_dp.strategies.averaging.strategy import AveragingStrategy
from fed_dp.strategies.sites import Site

ROUNDS = 5


class Always(AveragingStrategy):
    """Rounds in which sites upload the same change, without messages."""

    def run(self, changes: Sequence[np.ndarray], start: int = 1) -> list[np.ndarray]:
        models = []
        for server_round, change in enumerate(changes, start):
            self.begin(server_round)
            uploads = [(None, Upload(SparseUpdate.dense(change), records)) for records in (1, 3)]
            self.combine(uploads)  # type: ignore[arg-type]
            self.stats.uploads = 2
            self.finish(server_round)
            models.append(self.model.copy())
        return models


def strategy(first: int = 1, **options: object) -> Always:
    sites = [Site(0, 1, 1), Site(1, 2, 3)]
    averaging = Averaging(**options)  # type: ignore[arg-type]
    return Always(np.zeros(2, np.float32), sites, options=averaging, rounds=ROUNDS, first=first)


def changes(count: int = ROUNDS) -> list[np.ndarray]:
    return [np.array([1.0, -(k + 1.0)], np.float32) for k in range(count)]


def test_without_options_the_model_moves_by_the_mean_change() -> None:
    models = strategy().run(changes())
    assert models[-1] == pytest.approx(sum(changes()))


def test_momentum_adds_up_as_in_sgd() -> None:
    velocity, weights = np.zeros(2), np.zeros(2)
    for found, change in zip(
        strategy(momentum=0.5, learning_rate=0.1).run(changes()), changes(), strict=True
    ):
        velocity = 0.5 * velocity + change
        weights = weights + 0.1 * velocity
        assert found == pytest.approx(weights, rel=1e-6)
    assert Averaging(momentum=0.5, learning_rate=0.1).gain == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("schedule", "factor"),
    [("linear", lambda f: 1 - f), ("cosine", lambda f: (1 + math.cos(math.pi * f)) / 2)],
)
def test_the_learning_rate_falls_over_the_rounds_that_train(schedule: str, factor: object) -> None:
    assert callable(factor)
    models = [np.zeros(2), *strategy(first=2, schedule=schedule).run(changes())]
    steps = [after - before for before, after in pairwise(models)]
    assert steps[0] == pytest.approx(changes()[0])  # released moments, which are taken as they are
    for k, step in enumerate(steps[1:]):
        assert step == pytest.approx(factor(k / (ROUNDS - 1)) * changes()[k + 1], abs=1e-6)


def test_the_moving_average_begins_with_the_first_model_and_forgets_it() -> None:
    average = strategy(ema=0.9)
    found = average.run(changes())
    models = np.cumsum(changes(), 0)
    mean = models[0]
    for k, model in enumerate(models[1:], 2):
        decay = min(0.9, (1 + k) / (10 + k))
        mean = decay * mean + (1 - decay) * model
    assert found[-1] == pytest.approx(mean, rel=1e-5)
    assert average.weights == pytest.approx(models[-1])  # what sites go on from
    assert average.weights_of(1) == pytest.approx(mean, rel=1e-5)  # what the run ends with


def test_a_resumed_run_goes_on_with_velocity_and_average() -> None:
    options = {"momentum": 0.9, "ema": 0.5, "schedule": "linear"}
    whole = strategy(**options)
    expected = whole.run(changes())[-1]
    first, second = strategy(**options), strategy(**options)
    first.run(changes()[:2])
    second.restore(first.state())
    assert second.run(changes()[2:], start=3)[-1].tobytes() == expected.tobytes()


@pytest.mark.parametrize("key", ["momentum", "learning_rate", "ema"])
def test_steps_of_the_server_are_refused_where_statistics_are_released(key: str) -> None:
    tables = {
        "model": {"name": "unit-linear"},
        "trainer": {"name": "dpa"},
        "strategy": {"name": "averaging", key: 0.5},
        "privacy": {"budget_epsilon": 1.0, "delta": 1e-5},
    }
    with pytest.raises(ConfigError, match=rf"strategy\.{key} = 0\.5: trainer\.name = 'dpa' releases"):
        build(tables)
