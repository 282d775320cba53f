"""The selections and the parameter server against the literal reference, exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fed_dp.errors import UploadRefused
from fed_dp.sharing.parameter_server import ParameterServer
from fed_dp.sharing.selection import Selector, largest_values, most_updated, share
from fed_dp.sharing.update import SparseUpdate
from tests.sharing import reference

SEEDS = st.integers(0, 2**32)
THETAS = st.one_of(st.floats(0.001, 1), st.sampled_from([0.01, 0.1, 0.5, 1.0]))


@st.composite
def changes(draw: st.DrawFn) -> np.ndarray:
    """Vectors with and without many equal magnitudes and zeros."""
    rng = np.random.default_rng(draw(SEEDS))
    values = rng.normal(scale=1e-3, size=draw(st.one_of(st.integers(1, 300), st.just(3000))))
    steps = draw(st.sampled_from([None, 1e-3, 5e-4]))
    return (values if steps is None else np.round(values / steps) * steps).astype(np.float32)


class Keys:
    """A generator whose keys are known."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self._seed)

    def of(self, size: int) -> list[float]:
        return list(self.rng().random(size))


def pairs(update: SparseUpdate) -> list[tuple[int, np.float32]]:
    indices = np.arange(update.size) if update.indices is None else update.indices
    return list(zip(indices.tolist(), update.values, strict=True))


@given(changes(), THETAS, st.sampled_from([None, 1e-3, 1e-4]))
def test_largest_values_are_those_of_the_reference(
    change: np.ndarray, theta: float, gamma: float | None
) -> None:
    selector = Selector(share(theta, change.size), "largest_values", bound=gamma)
    found = selector.select(change, rng=np.random.default_rng())
    assert pairs(found) == reference.largest_values(list(change), theta, gamma)


@pytest.mark.parametrize("kind", ["few", "striped", "falling", "equal"])
def test_largest_values_do_not_depend_on_how_values_are_laid_out(kind: str) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=6200).astype(np.float32)
    change = {
        "few": np.where(rng.random(6200) < 0.001, values, 0),
        "striped": np.where(np.arange(6200) % 31 == 0, values, 10 * values),  # a misleading sample
        "falling": np.sort(values)[::-1],
        "equal": np.ones(6200),
    }[kind].astype(np.float32)
    for count in (1, 6, 60, 700):
        found = largest_values(change, count)
        assert found.tolist() == [j for j, _ in reference.largest_values(list(change), count / 6200)]
        lower = np.where(np.arange(6200) % 31 == 0, 10 * values, values).astype(np.float32)
        expected = [j for j, _ in reference.largest_values(list(lower), count / 6200)]
        assert largest_values(lower, count).tolist() == expected


@given(changes(), THETAS, st.sampled_from([0.0, 1e-4, 1e-3]), st.sampled_from([None, 1e-3]), SEEDS)
def test_random_with_threshold_is_that_of_the_reference(
    change: np.ndarray, theta: float, tau: float, gamma: float | None, seed: int
) -> None:
    keys = Keys(seed)
    selector = Selector(share(theta, change.size), "random_with_threshold", tau, gamma)
    found = selector.select(change, rng=keys.rng())
    expected = reference.random_with_threshold(list(change), theta, tau, keys.of(change.size), gamma)
    assert pairs(found) == expected


@given(changes(), st.lists(st.tuples(THETAS, THETAS, SEEDS), min_size=1, max_size=6), st.floats(0.1, 1))
def test_the_server_is_that_of_the_reference(
    start: np.ndarray, events: list[tuple[float, float, int]], beta: float
) -> None:
    fast, slow = ParameterServer(start.copy()), reference.Server(list(start))
    for up, down, seed in events:
        change = np.random.default_rng(seed).normal(size=start.size).astype(np.float32)
        keys = Keys(seed)
        downloaded = fast.download(share(down, start.size), rng=keys.rng())
        assert pairs(downloaded) == slow.download(down, keys.of(start.size))
        fast.upload(Selector(share(up, start.size)).select(change, rng=keys.rng()))
        slow.upload(reference.largest_values(list(change), up))
        fast.decay(beta)
        slow.decay(beta)
        assert fast.weights.tobytes() == np.array(slow.w, np.float32).tobytes()
        assert fast.stat.tobytes() == np.array(slow.stat, np.float32).tobytes()
    assert fast.version == len(events)


def test_a_fraction_is_rounded_down_but_never_to_nothing() -> None:
    assert [share(theta, 140_106) for theta in (1, 0.1, 0.01, 0.001)] == [140_106, 14_010, 1_401, 140]
    assert share(0.29, 100) == 29  # 0.29 · 100 = 28.999999999999996
    assert share(1e-9, 100) == 1


def test_nothing_above_the_threshold_is_an_empty_update() -> None:
    selector = Selector(3, "random_with_threshold", threshold=1.0)
    assert len(selector.select(np.zeros(10, np.float32), rng=np.random.default_rng(0))) == 0


def test_nan_is_refused_not_passed_over() -> None:
    for count in (1, 2, 4):
        with pytest.raises(UploadRefused, match="diverged"):
            largest_values(np.array([1, np.nan, 2, 3, 4], np.float32), count)


@pytest.mark.statistical
def test_of_equally_updated_parameters_each_is_equally_likely() -> None:
    stat = np.array([5, *([1] * 10), 0], np.float32)
    rng = np.random.default_rng(0)
    counts: Any = np.zeros(12)
    for _ in range(4000):
        counts[most_updated(stat, 4, rng=rng)] += 1
    assert counts[0] == 4000
    assert counts[11] == 0
    assert np.abs(counts[1:11] - 1200).max() < 5 * np.sqrt(4000 * 0.3 * 0.7)
