"""Which coordinates leave a site (Fig. 3, step 4), and how many a fraction allows.

Reference: Shokri and Shmatikov, "Privacy-Preserving Deep Learning", CCS 2015. No privacy: which
coordinates are chosen depends on the records. (Where the change is private already, choosing is
post-processing and costs nothing.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fed_dp.errors import UploadRefused
from fed_dp.seeds import Generator
from fed_dp.sharing.update import MAX_ABS_VALUE, Indices, SparseUpdate, Vector

Selection = Literal["largest_values", "random_with_threshold"]
_STRIDE = 31  # one coordinate in so many is looked at to guess a threshold


def share(fraction: float, size: int) -> int:
    """Return how many of `size` coordinates a fraction θ allows: ⌊θ · size⌋, and at least one."""
    return max(1, int(fraction * size + 1e-9))


@dataclass(frozen=True, slots=True)
class Selector:
    """What of a change leaves a site: at most `count` values, each within ±γ (`bound`)."""

    count: int  # θ_u · |w|
    selection: Selection = "largest_values"
    threshold: float = 0.0  # τ
    bound: float | None = None  # γ

    def select(self, change: Vector, *, rng: Generator) -> SparseUpdate:
        """Return the selected values, truncated to [−γ, γ].

        The largest values are chosen before they are truncated (§5.2), the random ones after (§6.6).
        """
        bound = MAX_ABS_VALUE if self.bound is None else self.bound
        if self.selection == "largest_values":
            chosen = SparseUpdate.of(change, largest_values(change, self.count))
            return SparseUpdate(chosen.indices, np.clip(chosen.values, -bound, bound), chosen.size, bound)
        truncated = np.clip(change, -bound, bound)
        indices = random_with_threshold(truncated, self.count, threshold=self.threshold, rng=rng)
        return SparseUpdate.of(truncated, indices, bound=bound)


def largest_values(change: Vector, count: int) -> Indices:
    """Return the `count` coordinates of largest magnitude, sorted; of equal ones the first."""
    size = change.size
    if count >= size:
        return np.arange(size)
    magnitude = np.abs(change)
    if np.isnan(magnitude.max()):  # it would compare as small, and be passed over
        raise UploadRefused("values: nan; the training has diverged")
    some = _candidates(magnitude, count)
    among = magnitude[some]
    threshold = np.partition(among, among.size - count)[among.size - count]
    chosen = np.flatnonzero(among >= threshold)
    if (extra := chosen.size - count) > 0:
        equal = np.flatnonzero(among[chosen] == threshold)
        chosen = np.delete(chosen, equal[-extra:])
    return chosen if isinstance(some, slice) else some[chosen]


def _candidates(magnitude: Vector, count: int) -> Indices | slice:
    """Return coordinates that surely hold the `count` largest: few, by a threshold from a sample.

    Twice as fast as looking at all when `count` is small; when the sample misleads, it is all.
    """
    if count > magnitude.size // 8:
        return slice(None)
    sample = magnitude[::_STRIDE]
    rank = sample.size - min(sample.size, int(1.3 * count / _STRIDE) + 12)
    some = np.flatnonzero(magnitude >= np.partition(sample, rank)[rank])
    return some if some.size >= count else slice(None)


def random_with_threshold(change: Vector, count: int, *, threshold: float, rng: Generator) -> Indices:
    """Go through the coordinates in random order and take those of magnitude ≥ τ, at most `count`.

    The random order is that of one uniform key per coordinate.
    """
    keys = rng.random(change.size)
    above = np.flatnonzero(np.abs(change) >= threshold)
    return above if above.size <= count else np.sort(above[_smallest(keys[above], count)])


def most_updated(stat: Vector, count: int, *, rng: Generator) -> Indices:
    """Return the `count` coordinates of largest `stat` (Fig. 4), sorted; equal ones at random.

    Without random ties the first layer would always win. Of equal ones those with the smallest of
    one uniform key per coordinate are taken.
    """
    size = stat.size
    if count >= size:
        return np.arange(size)
    keys = rng.random(size)
    threshold = np.partition(stat, size - count)[size - count]
    above, equal = np.flatnonzero(stat > threshold), np.flatnonzero(stat == threshold)
    chosen = equal[_smallest(keys[equal], count - above.size)]
    return np.sort(np.concatenate((above, chosen)))


def _smallest(keys: np.ndarray, count: int) -> Indices:
    return np.argpartition(keys, count - 1)[:count] if count < keys.size else np.arange(keys.size)
