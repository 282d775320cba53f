"""Noisy histograms of bounded records: all cells (DPME), or those that pass a filter (Filter-Priority).

A grid of cells is public: equal intervals of [−1, 1] for each of some attributes, times the classes. A record
is in one cell, so that one record more or less moves one count by 1: Laplace noise of scale 1/ε on
*every* cell, empty ones included, is ε-DP. What is computed from noisy counts is free.

References: Lei, "Differentially Private M-Estimators", NIPS 2011; Cormode, Procopiuc, Srivastava, Tran,
"Differentially Private Summaries for Sparse Data", ICDT 2012.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fed_dp.errors import PrivacyError
from fed_dp.mechanisms.laplace import check
from fed_dp.mechanisms.noise import Integers, Noise, Reals, SecureNoise

Exact = NDArray[np.float64]
MAX_CELLS = 2**53  # of a grid: numbers of cells are exact in floating point
LISTED = 2**16  # cells up to which Filter-Priority lists them all
BLOCK = 1024  # gaps between survivors that are drawn at once


@dataclass(frozen=True, slots=True)
class Grid:
    """`bins` equal intervals of [−1, 1] of each of `attributes` numbers, for each of `classes` labels."""

    attributes: int
    bins: int
    classes: int

    @property
    def cells(self) -> int:
        """How many cells there are."""
        return int(self.classes * self.bins**self.attributes)

    def cells_of(self, rows: Reals, labels: NDArray[np.int64]) -> Integers:
        """Return the number of each record's cell; what is no number is in an attribute's first interval."""
        bounded = np.clip(np.nan_to_num(rows.astype(np.float64), nan=-1.0), -1, 1)
        digits = np.minimum(((bounded + 1) / 2 * self.bins).astype(np.int64), self.bins - 1)
        found = labels.astype(np.int64)
        for column in digits.T:
            found = found * self.bins + column
        return found

    def centres(self, cells: Integers) -> tuple[Exact, Integers]:
        """Return the middle of each cell, and its label."""
        rest, columns = cells, []
        for _ in range(self.attributes):
            columns.append(rest % self.bins)
            rest = rest // self.bins
        digits = np.stack(columns[::-1], axis=1)
        return (2 * digits + 1) / self.bins - 1, rest


def recommended_bins(*, records: int, attributes: int) -> int:
    """Return the number of intervals, at least 2, of the width that Lei asks for: (√ln n / n)^(2/(d + 2)).

    There, n and the number d of attributes balance the error of cells against that of noise in so many.
    """
    width: float = (math.sqrt(math.log(max(records, 3))) / max(records, 3)) ** (2 / (attributes + 2))
    return max(2, round(1 / width))


def noisy_histogram(cells: Integers, grid: Grid, *, expected: int, epsilon: float, noise: Noise) -> Exact:
    """Return the count of every cell plus Laplace noise of scale 1/ε.

    Guarantee: pure ε-DP; proved. Neighbours: add or remove one record. No count is told beyond `expected`,
    the public number of records: clipping moves no two counts further apart. With a secure source it is
    exact, for counts are whole.
    """
    counts = np.bincount(cells, minlength=grid.cells).astype(np.float64)
    return _noisy(counts, expected=expected, epsilon=epsilon, noise=noise)


def filter_priority(
    cells: Integers, grid: Grid, *, expected: int, epsilon: float, size: int, noise: Noise
) -> tuple[Integers, Exact]:
    """Return about `size` cells, by number, and their noisy counts: filtered, then sampled by priority.

    Guarantee: pure ε-DP; proved: that of `noisy_histogram`, of whose output this is a function. Where there
    are many cells, those without records are not listed: how many of them pass the filter, where, and with
    which counts is drawn as if they were. So it needs a source in floating point.
    Neighbours: add or remove one record.

    A noisy count passes if it is at least θ, which depends on public numbers alone: about `size` of the cells
    that are empty pass. Of those that pass, `size` are kept by the priority count/u, u uniform in (0, 1]; a
    count below the largest priority that is left out, τ, becomes τ (Duffield, Lund, Thorup 2007), which keeps
    sums unbiased.
    """
    check(epsilon=epsilon)
    threshold = filter_threshold(grid, epsilon=epsilon, size=size)
    if grid.cells <= LISTED:
        counts = noisy_histogram(cells, grid, expected=expected, epsilon=epsilon, noise=noise)
        uniform = np.exp(-np.abs(noise.laplace(np.zeros(grid.cells), scale=1.0)))
        passed = np.flatnonzero((counts >= threshold) & (counts > 0))
        return _sampled(passed, counts[passed], uniform[passed], size)
    if isinstance(noise, SecureNoise):
        raise PrivacyError(unlisted(grid))
    found, each = np.unique(cells, return_counts=True)
    listed = _noisy(each.astype(np.float64), expected=expected, epsilon=epsilon, noise=noise)
    kept = listed >= threshold
    empty, excess = _empty_survivors(grid.cells - len(found), threshold * epsilon, noise)
    # The k-th empty cell has as many cells with records before it as there are with fewer empty ones before.
    where = empty + np.searchsorted(found - np.arange(len(found)), empty, side="right")
    passed = np.concatenate([found[kept], where])
    weights = np.concatenate([listed[kept], threshold + excess / epsilon])
    uniform = np.exp(-np.abs(noise.laplace(np.zeros(len(passed)), scale=1.0)))
    return _sampled(passed, weights, uniform, size)


def filter_threshold(grid: Grid, *, epsilon: float, size: int) -> float:
    """Return θ, such that about `size` of so many empty cells have noise of at least θ."""
    return max(0.0, math.log(grid.cells / (2 * size)) / epsilon)


def unlisted(grid: Grid) -> str:
    """Say why a secure source cannot be used on a grid of so many cells."""
    return (
        f"privacy.noise_source = 'secure': of {grid.cells} cells, those without records are not listed, and "
        f"no exact sampler of which of them pass a filter is known to us; expected up to {LISTED} cells "
        "(fewer trainer.attributes or trainer.bins), or trainer.name = 'dpme'"
    )


def _noisy(counts: Exact, *, expected: int, epsilon: float, noise: Noise) -> Exact:
    check(epsilon=epsilon)
    scale = 1 / epsilon
    if isinstance(noise, SecureNoise):
        noise.check(expected, scale=scale)
    return noise.laplace(np.minimum(counts, expected), scale=scale)


def _empty_survivors(count: int, threshold: float, noise: Noise) -> tuple[Integers, Exact]:
    """Return which of `count` empty cells pass, in order, and by how much, in units of the noise's scale.

    Each passes with the chance p = ½ e^−θ that noise is at least θ > 0. So there are ⌊E/−ln(1 − p)⌋ that
    do not before one that does, E exponential; what lies above θ is exponential, too.
    """
    rate = -math.log1p(-math.exp(-threshold) / 2)
    parts, reached = list[Exact](), -1.0
    while reached < count:
        gaps = np.floor(np.abs(noise.laplace(np.zeros(BLOCK), scale=1.0)) / rate) + 1
        parts.append(reached + np.cumsum(np.minimum(gaps, float(count) + 1)))
        reached = float(parts[-1][-1])
    drawn = np.concatenate(parts)
    places: Integers = drawn[drawn < count].astype(np.int64)
    return places, np.abs(noise.laplace(np.zeros(len(places)), scale=1.0))


def _sampled(cells: Integers, counts: Exact, uniform: Exact, size: int) -> tuple[Integers, Exact]:
    """Return the cells of the largest priorities, in order, with counts that keep sums unbiased."""
    if len(cells) > size:
        priority = counts / uniform
        order = np.argsort(-priority, kind="stable")
        kept = np.sort(order[:size])
        least = priority[order[size]]
        cells, counts = cells[kept], np.maximum(counts[kept], least)
    order = np.argsort(cells, kind="stable")
    return cells[order], counts[order]
