"""The generated health social network: the papers' counts, and marginals that make sense."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from fed_dp.data import DataSet, read, without_influence
from fed_dp.data.health import (
    ATTRIBUTES,
    BEHAVIOUR,
    BIOMARKERS,
    BOUNDS,
    COMPETITIONS,
    DAYS,
    FRIENDSHIPS,
    KINDS,
    MESSAGES,
    PEOPLE,
    WEEKS,
    WINDOW,
    Network,
    _attributes,
    generate,
    health_network,
    most_points,
)
from fed_dp.data.sets.health import HealthDaily, HealthWeekly
from fed_dp.errors import ConfigError
from fed_dp.experiment import build


@pytest.fixture(scope="module", params=[False, True], ids=["daily", "weekly"])
def network(request: pytest.FixtureRequest) -> Network:
    return generate(weekly=request.param)


def test_it_has_the_papers_counts(network: Network) -> None:
    assert (PEOPLE, DAYS, WEEKS, FRIENDSHIPS, MESSAGES, COMPETITIONS) == (254, 300, 48, 1383, 2766, 11_458)
    assert (len(BEHAVIOUR), len(KINDS), len(BIOMARKERS)) == (6, 20, 4)
    assert network.friends.sum() == 2 * FRIENDSHIPS
    assert (network.messages, network.competitions) == (MESSAGES, COMPETITIONS)
    assert network.attributes.shape[0] == PEOPLE
    assert network.attributes.shape[1] in (DAYS, WEEKS)
    assert network.attributes.shape[2] == len(ATTRIBUTES) == 30


def test_friendship_is_mutual_and_like_meets_like(network: Network) -> None:
    friends = network.friends
    assert (friends == friends.T).all()
    assert not friends.diagonal().any()
    degree = friends.sum(1)
    assert degree.max() > 3 * np.median(degree)  # some people meet many
    speed = network.attributes[:, :, 5].mean(1)  # fitter people are faster
    first, second = np.nonzero(np.triu(friends))
    strangers = np.abs(speed[:, None] - speed[None]).mean()
    assert np.abs(speed[first] - speed[second]).mean() < 0.9 * strangers


def test_attributes_lie_within_their_public_bounds_but_for_a_few(network: Network) -> None:
    low, high = BOUNDS.T
    outside = ((network.attributes < low) | (network.attributes > high)).mean((0, 1))
    assert outside.max() < 0.02
    bmi = network.attributes[:, :, ATTRIBUTES.index("bmi")]
    assert 28 < bmi.mean() < 34  # overweight or obese
    assert (bmi > 25).mean() > 0.9
    days = network.attributes[:, :, ATTRIBUTES.index("exercising days")]
    assert set(np.unique(days)) <= set(range(8))
    assert (network.attributes.std((0, 1)) > 0).all()


def test_influence_is_a_mean_of_probabilities_and_moves_people(network: Network) -> None:
    assert network.influence.shape == network.attributes.shape[:2]
    assert network.influence.min() >= 0
    assert network.influence.max() <= 1
    moved = np.diff(network.exercise, axis=1)
    felt = network.influence[:, :-1]
    assert np.corrcoef(felt.ravel(), moved.ravel())[0, 1] > 0.05


def test_nothing_of_now_is_computed_from_what_comes_after() -> None:
    rng = np.random.default_rng(0)
    walked, joined = 3 + rng.normal(size=(30, PEOPLE)), rng.integers(2, size=(30, PEOPLE)).astype(float)
    kinds, fitness = np.zeros((30, PEOPLE, len(KINDS))), rng.normal(size=PEOPLE)
    later = walked.copy()
    later[20:] += 2.0
    before, after = (
        _attributes(w, joined, kinds, fitness, np.random.default_rng(1)) for w in (walked, later)
    )
    slopes = [ATTRIBUTES.index(name) for name in ("bmi slope", "wellness slope")]
    for k in (*slopes, 4):
        moved = np.abs(before[:, :, k] - after[:, :, k]).max(1)
        assert moved[20] > 0
    assert np.array_equal(before[:20], after[:20])
    score = before[:, :, ATTRIBUTES.index("wellness score")]
    assert np.allclose(np.diff(score, axis=0), before[1:, :, slopes[1]])  # of today and yesterday


def test_it_is_the_same_every_time(network: Network) -> None:
    again = generate(weekly=network.attributes.shape[1] == WEEKS)
    assert again.attributes.tobytes() == network.attributes.tobytes()
    assert again.influence.tobytes() == network.influence.tobytes()


@pytest.fixture(scope="module", params=["health-daily", "health-weekly"])
def records(request: pytest.FixtureRequest) -> DataSet:
    return read(request.param)


def test_a_record_is_a_window_with_friends_beside_it(records: DataSet) -> None:
    network = generate(weekly=records.name == "health-weekly")
    x, y, owner = records.train.x, records.train.y, records.train.owner
    assert owner is not None
    own = x[owner == "007"]
    assert own[5, 0, WINDOW, 0] == pytest.approx(network.influence[7, 5 + WINDOW - 1])
    assert not own[:, 0, WINDOW, 1:].any()
    assert np.array_equal(own[5, 0, 1:WINDOW], own[6, 0, : WINDOW - 1])  # the window slides
    now = 5 + WINDOW - 1
    assert y[owner == "007"][5] == (network.exercise[7, now + 1] > network.exercise[7, now])
    assert np.abs(x).max() <= 1
    assert 0.4 < y.mean() < 0.6
    assert "not of a person" in records.notes[1]


def test_nobody_is_tested_on_their_past(records: DataSet) -> None:
    whole = generate(weekly=records.name == "health-weekly").attributes.shape[1]
    train, test = (np.unique(r.owner, return_counts=True) for r in (records.train, records.test))  # type: ignore[arg-type]
    assert len(train[0]) == len(test[0]) == PEOPLE
    assert set(train[1] + test[1]) == {whole - WINDOW}
    assert 0.15 < test[1][0] / (whole - WINDOW) < 0.25


def test_friends_tell_something_that_people_themselves_do_not(records: DataSet) -> None:
    def score(data: DataSet) -> float:
        train, test = (r.x[::3].reshape(len(r.x[::3]), -1) for r in (data.train, data.test))
        model = LogisticRegression(C=0.1, max_iter=2000).fit(train, data.train.y[::3])
        return float(model.score(test, data.test.y[::3]))

    alone = without_influence(records)
    assert not alone.train.x[:, 0, WINDOW].any()
    assert "left out" in alone.notes[-1]
    together, without = score(records), score(alone)
    assert 0.65 < without < together < 0.95


def test_m_time_points_are_the_last_before_the_test_records() -> None:
    whole, twelve = (health_network(weekly=True, points=points) for points in (None, 12))
    assert len(twelve.train) == PEOPLE * (12 - WINDOW + 1)  # as the paper counts them
    assert twelve.test.x.tobytes() == whole.test.x.tobytes()
    own = whole.train.x[whole.train.owner == "007"][-9:]
    assert np.array_equal(twelve.train.x[twelve.train.owner == "007"], own)
    assert len(whole.train) == PEOPLE * (most_points(weekly=True, test="latest") - WINDOW + 1)


def test_a_random_tenth_of_38_weeks_is_what_the_paper_classifies() -> None:
    found = health_network(weekly=True, points=38, test="random", label="now")
    assert len(found.train) + len(found.test) == 9652
    assert len(found.test) == 965
    assert len(np.unique(found.test.owner)) > 200  # type: ignore[arg-type]
    network = generate(weekly=True)
    own = (found.train.owner == "007").nonzero()[0]
    last = found.train.x[own[-1], 0, WINDOW - 1]
    low, high = BOUNDS.T
    scaled = 2 * (np.clip(network.attributes[7], low, high) - low) / (high - low) - 1
    [[now]] = np.nonzero((np.abs(scaled - last) < 1e-6).all(1))
    assert found.train.y[own[-1]] == (network.exercise[7, now] > network.exercise[7, now - 1])


def test_a_share_of_the_time_points_is_as_many_as_there_are_of_them() -> None:
    weekly = {0.1: 4, 0.3: 11, 0.6: 23, 1.0: 38, 12: 12, None: None}
    assert {points: HealthWeekly(points=points).used_points for points in weekly} == weekly
    assert HealthDaily(points=0.3).used_points == 72


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"points": 3}, r"data.points = 3: .* 38 time points, and a record spans 4; expected 4..38"),
        ({"points": 0.01}, r"data.points = 0.01: .* expected 4..38, or a share of them"),
        ({"points": 1.5}, r"data.points.* = 1.5: expected"),
        ({"points": 45, "test": "random"}, r"data.points = 45: .*'random' has 44 .* expected 1..44"),
    ],
)
def test_points_that_are_not_there_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build({"data": {"name": "health-weekly", **options}})
