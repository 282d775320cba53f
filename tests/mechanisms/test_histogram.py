"""Noisy histograms: cells, the filter, the sample; and that empty cells are drawn as if they were listed."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fed_dp.errors import PrivacyError
from fed_dp.mechanisms import SecureNoise, SimulationNoise, histogram
from fed_dp.mechanisms.histogram import (
    LISTED,
    Grid,
    filter_priority,
    filter_threshold,
    noisy_histogram,
    recommended_bins,
)
from tests.mechanisms.privacy_loss import Spy, empirical_loss, mutant

GRID = Grid(attributes=2, bins=4, classes=3)  # 48 cells
EPSILON = 1.0


def noise_of(seed: int) -> SimulationNoise:
    return SimulationNoise(np.random.default_rng(seed))


@given(st.integers(1, 4), st.integers(2, 6), st.integers(2, 4), st.integers(0, 2**32 - 1))
def test_a_record_is_in_the_one_cell_whose_middle_is_nearest(
    attributes: int, bins: int, classes: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    grid = Grid(attributes, bins, classes)
    rows, labels = rng.uniform(-1.2, 1.2, (20, attributes)), rng.integers(0, classes, 20)
    cells = grid.cells_of(rows, labels)
    assert ((cells >= 0) & (cells < grid.cells)).all()
    middles, told = grid.centres(cells)
    assert np.array_equal(told, labels)
    assert np.abs(middles - rows.clip(-1, 1)).max() <= 1 / bins + 1e-9
    assert np.array_equal(grid.cells_of(middles, told), cells)


def test_what_is_no_number_is_in_a_cell_as_well() -> None:
    rows = np.array([[np.nan, np.inf], [-np.inf, 2.0]])
    assert GRID.cells_of(rows, np.array([0, 2])).tolist() == [3, 35]


def test_bins_follow_from_the_number_of_records() -> None:
    assert recommended_bins(records=9000, attributes=7) == 6
    assert recommended_bins(records=9000, attributes=31) == 2  # at least
    assert recommended_bins(records=1, attributes=1) == 2


def test_every_cell_gets_noise_of_scale_one_over_epsilon() -> None:
    spy = Spy()
    noisy_histogram(np.array([5, 5, 7]), GRID, expected=10, epsilon=0.5, noise=spy)
    [(values, scale)] = spy.calls
    assert values.shape == (48,)
    assert (values[5], values[7], values.sum()) == (2, 1, 3)
    assert scale == 2.0
    told = noisy_histogram(np.full(90, 5), GRID, expected=10, epsilon=1.0, noise=Spy())
    assert told.max() == 10  # no more records than declared


def test_secure_counts_are_whole_multiples_of_the_grid_and_exact() -> None:
    noisy = noisy_histogram(np.array([5, 5, 7]), GRID, expected=10, epsilon=1.0, noise=SecureNoise())
    whole = noisy * 2.0**40
    assert np.array_equal(whole, np.round(whole))


def many(module: ModuleType, runs: int, listed: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each cell is kept, and its mean count, with so many cells listed at most."""
    cells = np.repeat([3, 3, 4, 47, 20], 2)
    kept, total = np.zeros(48), np.zeros(48)
    module.LISTED = listed  # type: ignore[attr-defined]
    for seed in range(runs):
        # A sample of all that pass: what is drawn of empty cells is what is compared.
        where, counts = module.filter_priority(
            cells, GRID, expected=100, epsilon=EPSILON, size=8, noise=noise_of(seed)
        )
        kept[where] += 1
        total[where] += counts
    return kept / runs, total / np.maximum(kept, 1)


def apart(module: ModuleType, runs: int = 3000) -> float:
    """By how many standard deviations two ways of computing differ, at most, in how often cells are kept."""
    listed, sparse = (many(module, runs, at)[0] for at in (LISTED, 0))
    deviation = np.sqrt((listed * (1 - listed) + sparse * (1 - sparse)) / runs) + 1e-3
    return float(np.abs((listed - sparse) / deviation).max())


@pytest.mark.statistical
def test_empty_cells_are_drawn_as_if_all_were_listed() -> None:
    plain = mutant(histogram, ("BLOCK = 1024", "BLOCK = 16"))
    assert apart(plain) < 4.5
    listed, sparse = (many(plain, 3000, at)[1] for at in (LISTED, 0))
    assert np.abs(listed - sparse).max() < 0.6  # mean counts


@pytest.mark.statistical
@pytest.mark.parametrize(
    "change",
    [
        ("-math.exp(-threshold) / 2)", "-math.exp(-threshold))"),  # twice as many pass
        ("/ rate) + 1", "/ rate) + 2"),  # one more is skipped
        (', side="right")', ', side="left") * 0'),  # in the wrong places
    ],
)
def test_a_wrong_way_to_draw_them_is_seen(change: tuple[str, str]) -> None:
    assert apart(mutant(histogram, ("BLOCK = 1024", "BLOCK = 16"), change), runs=2000) > 6


def kept_loss(module: ModuleType, one: int, other: int, runs: int = 6000) -> float:
    """A lower bound on the loss of whether a cell is kept, and with which count, between two true counts."""
    module.LISTED = 0  # type: ignore[attr-defined]

    def transcript(rng: np.random.Generator, values: np.ndarray) -> int:
        cells, noise = np.full(int(values[0]), 5), SimulationNoise(rng)
        where, counts = module.filter_priority(cells, GRID, expected=99, epsilon=EPSILON, size=4, noise=noise)
        return round(float(counts[where == 5][0])) if 5 in where else -1

    return empirical_loss(transcript, np.array([float(one)]), np.array([float(other)]), runs=runs)


@pytest.mark.statistical
@pytest.mark.parametrize(("one", "other"), [(1, 0), (11, 10)])
def test_whether_a_cell_is_kept_tells_no_more_than_epsilon(one: int, other: int) -> None:
    assert 0.3 * EPSILON < kept_loss(mutant(histogram), one, other, runs=4000) <= EPSILON


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("change", "worlds"),
    [
        (("scale = 1 / epsilon", "scale = 0.5 / epsilon"), (11, 10)),  # half of the noise
        (("drawn[drawn < count]", "drawn[drawn < -1]"), (1, 0)),  # empty cells are never kept
    ],
)
def test_a_weaker_filter_is_seen(change: tuple[str, str], worlds: tuple[int, int]) -> None:
    assert kept_loss(mutant(histogram, change), *worlds, runs=3000) > EPSILON


def test_a_sample_keeps_sums() -> None:
    """Priority sampling is unbiased: the mean of sampled sums is the sum of what passed."""
    rng = np.random.default_rng(0)
    counts = rng.gamma(2.0, 5.0, 40)
    sums = []
    for _ in range(4000):
        where, kept = histogram._sampled(np.arange(40), counts, 1 - rng.random(40), 12)
        assert len(where) == 12
        sums.append(kept.sum())
    error = np.std(sums) / math.sqrt(len(sums))
    assert abs(np.mean(sums) - counts.sum()) < 4 * error


def test_about_as_many_empty_cells_pass_as_are_wanted() -> None:
    grid = Grid(attributes=31, bins=2, classes=2)
    where, counts = filter_priority(
        np.arange(50), grid, expected=100, epsilon=EPSILON, size=1000, noise=noise_of(0)
    )
    assert 850 < len(where) <= 1000
    assert (np.diff(where) > 0).all()
    assert where.max() < grid.cells
    assert counts.min() >= filter_threshold(grid, epsilon=EPSILON, size=1000)


def test_secure_noise_is_refused_where_cells_are_not_listed() -> None:
    with pytest.raises(PrivacyError, match=r"'secure': of 4294967296 cells.*trainer.name = 'dpme'"):
        filter_priority(np.arange(5), Grid(31, 2, 2), expected=9, epsilon=1.0, size=9, noise=SecureNoise())
    few = filter_priority(np.arange(5), GRID, expected=9, epsilon=1.0, size=9, noise=SecureNoise())
    assert len(few[0]) <= 9
