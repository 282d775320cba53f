"""Records of behaviour: windows of time points, the influence of friends, persons' numbers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fed_dp.data import FolderOptions, behaviour, health, read, read_part
from fed_dp.data.behaviour import UNKNOWN, influence, influence_of_friends, lines_of, numbered, windows
from fed_dp.data.dataset import DataSet, Records, identity
from fed_dp.data.persons import PersonColumns
from fed_dp.errors import ConfigError, DataMissing
from fed_dp.experiment import build


def test_a_window_slides_and_is_whole_between_enough_past_and_a_next_point() -> None:
    own = np.arange(12, dtype=np.float32).reshape(6, 2) / 12
    x, y, whole = windows(own, np.linspace(0, 1, 6), np.array([3.0, 1, 2, 2, 5, 4]), 3)
    assert x.shape == (6, 1, 4, 2)
    assert whole.tolist() == [False, False, True, True, True, False]
    assert y[whole].tolist() == [0, 1, 0]  # the same again is no rise
    assert np.array_equal(x[3, 0, :3], own[1:4])
    assert x[3, 0, 3].tolist() == [pytest.approx(0.6), 0]
    assert not x[:2].any()


def test_where_the_target_is_unknown_now_or_then_a_record_is_not_whole() -> None:
    own, target = np.ones((6, 1), np.float32), np.array([1, 2, 3, np.nan, 4, 5])
    assert windows(own, np.zeros(6), target, 2)[2].tolist() == [False, True, False, False, True, False]


def test_lines_are_put_in_the_order_of_time_wherever_they_stand() -> None:
    rng = np.random.default_rng(0)
    person, time = np.repeat([0, 1, 2], [7, 2, 6]), np.concatenate([np.arange(7), [5, 9], np.arange(6)])
    inputs, target = rng.normal(size=(15, 3)).astype(np.float32), rng.normal(size=15)
    shuffled = rng.permutation(15)
    one = lines_of(person, time.astype(float), inputs, target, target, window=4)
    other = lines_of(
        person[shuffled],
        time[shuffled].astype(float),
        inputs[shuffled],
        target[shuffled],
        target[shuffled],
        window=4,
    )
    for name in ("x", "y", "whole", "place", "count"):
        assert np.array_equal(getattr(one, name)[shuffled], getattr(other, name))
    assert one.whole[person == 1].tolist() == [False, False]  # too few time points
    assert np.array_equal(one.x[3, 0, :4], inputs[:4])


def test_friends_count_by_their_mean_and_who_is_not_there_by_a_half() -> None:
    person, time = np.array([0, 0, 1, 2, -1]), np.array([1.0, 2, 1, 2, np.nan])
    friends = {0: np.array([1, 2, 7]), 1: np.array([0])}
    felt = influence_of_friends(person, time, np.array([0.0, 1, 1, 0.25, 0.9]), friends)
    assert felt[0] == pytest.approx((1 + UNKNOWN + UNKNOWN) / 3)
    assert felt[1] == pytest.approx((UNKNOWN + 0.25 + UNKNOWN) / 3)
    assert felt[2] == 0
    assert felt[3] == felt[4] == UNKNOWN  # without friends, and nobody
    assert influence(np.zeros((0, 3))).tolist() == [UNKNOWN] * 3
    assert influence(np.array([[0.0, 1], [1, 1]])).tolist() == [0.5, 1]


DPA: dict[str, Any] = {"trainer": {"name": "dpa", "perturb": False}}
# Of the records as they were before one builder made all of them: whatever is changed, these are the same.
DAILY = "482fbf83aaae91e675c8f880e72309fef95615ef0c2c26c9bf1da537ddb5dc2f"
WEEKLY = "6fd60a9011d08df1d45fdd970bc3013352c533778323b220b1d44debd6fcd902"
LIFESNAPS = "4d985cb74093a0a1ee4810cac2d7739162c2859981bbafd148be7fedb8c10ccf"


@pytest.fixture(scope="module")
def network() -> health.Network:
    return health.generate(weekly=True)


def digest_of(network: health.Network) -> str:
    digest = hashlib.sha256()
    for parts in health.windows(network.attributes, network.influence, network.exercise, health.BOUNDS):
        for part in parts:
            digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()


def test_the_generated_records_are_what_they_were(network: health.Network) -> None:
    assert digest_of(network) == WEEKLY


@pytest.mark.exhaustive
def test_and_those_of_days() -> None:
    assert digest_of(health.generate(weekly=False)) == DAILY


def test_it_reads_the_generated_network_as_the_network_itself_is_read(
    network: health.Network, tmp_path: Path
) -> None:
    count, weeks, width = network.attributes.shape
    columns = [f"{k:02d}" for k in range(width)]
    values = network.attributes.reshape(-1, width)
    frame = pd.DataFrame(values, columns=columns).assign(
        id=np.repeat(range(count), weeks), week=np.tile(range(weeks), count), done=network.exercise.ravel()
    )
    frame.sample(frac=1, random_state=0).sort_index().to_parquet(tmp_path / "train.parquet")
    bounds = dict(zip(columns, map(tuple, health.BOUNDS.tolist()), strict=True))
    stated = PersonColumns("id", "week", "done", health.WINDOW)
    options = FolderOptions(tmp_path, {**bounds, "done": (0.0, 12.0)}, 2, persons=stated)
    found = read_part("train", options)
    parts = list(health.windows(network.attributes, network.influence, network.exercise, health.BOUNDS))
    expected = np.concatenate([x for x, _, _ in parts])
    assert found.x[:, :, : health.WINDOW, :width].tobytes() == expected[:, :, : health.WINDOW].tobytes()
    assert np.array_equal(found.y, np.concatenate([y for _, y, _ in parts]))
    assert not found.x[:, :, health.WINDOW].any()  # no friends are stated


def test_those_of_lifesnaps_are_what_they_were() -> None:
    try:
        found = read("lifesnaps-windows")
    except DataMissing as missing:
        pytest.skip(str(missing))
    assert found.fingerprint() == LIFESNAPS


def test_persons_are_numbered_where_that_is_asked_for_and_nothing_else_changes() -> None:
    def some(owners: str) -> Records:
        count = len(owners)
        rng = np.random.default_rng(count)
        x = rng.normal(size=(count, 1, 5, 3)).astype(np.float32)
        return Records(x, np.arange(count) % 2, np.array(list(owners)))

    plain = DataSet("people", some("bbca"), some("cd"), 2, *identity())
    assert numbered(plain, None) is plain
    found = numbered(plain, 7)
    assert found.train.x[:, 0, -1, 1].tolist() == [2, 2, 3, 1]
    assert found.test.x[:, 0, -1, 1].tolist() == [3, 4]
    rest = found.train.x.copy()
    rest[:, 0, -1, 1] = plain.train.x[:, 0, -1, 1]
    assert np.array_equal(rest, plain.train.x)
    with pytest.raises(ConfigError, match=r"data\.persons = 3: people has 4; expected 4 or more"):
        numbered(plain, 3)


@pytest.mark.parametrize(
    ("data", "model"),
    [
        ({"persons": 254}, {"name": "dpah"}),
        ({}, {"name": "dpah", "users": 254}),
        ({"persons": 254}, {"name": "dpah", "users": 253}),
        ({"persons": 254}, {"name": "behaviour-linear"}),
    ],
)
def test_persons_of_the_records_and_of_the_network_must_be_alike(
    data: dict[str, Any], model: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"model\.users = .*data\.persons = .*alike, or neither"):
        build({"data": {"name": "health-weekly"} | data, "model": model, **DPA})


def test_a_key_that_came_later_changes_no_digest_of_an_experiment_without_it() -> None:
    tables = {"data": {"name": "health-weekly"}, "model": {"name": "dpah"}}
    plain = build({**tables, **DPA}).digest
    assert plain == "9e14313437e59e68e9ed667d50ca7665819a2e95f565768e81ae78909257417b"
    tables = {"data": {"name": "health-weekly", "persons": 254}, "model": {"name": "dpah", "users": 254}}
    assert build({**tables, **DPA}).digest != plain


def test_the_notes_say_what_a_record_is() -> None:
    assert "one time point with three time points before" in behaviour.notes()[0]
    assert "up to four records of its person and in the label of one more" in behaviour.notes()[0]
    assert "one time point before: a" in behaviour.notes(2)[0]
    assert "up to 12 records" in behaviour.notes(12)[0]
