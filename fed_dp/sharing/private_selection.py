"""Selection that is itself private: which coordinates leave a site, and with how much noise.

Any change at all may be given, also one that is not finite: what leaves is bounded and noised, so
not even a diverged training can be told from another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fed_dp.mechanisms import Noise, Split, figure_12, gaussian, sparse_vector
from fed_dp.sharing.update import MAX_ABS_VALUE, Indices, SparseUpdate, Vector

PrivateSelection = Literal["sparse_vector", "random_mask"]
Variant = Literal["proved", "paper", "paper_as_printed"]


@dataclass(frozen=True, slots=True)
class SparseVectorSelector:
    """At most `count` values that noisily reach `threshold`, noised, each within ±γ (`bound`)."""

    count: int  # c = θ_u · |w|
    bound: float  # γ
    threshold: float  # τ
    epsilon: float  # of one turn
    variant: Variant = "proved"
    split: Split = "lyu"

    def select(self, change: Vector, *, noise: Noise) -> SparseUpdate:
        """Return what is uploaded."""
        release = (
            partial(sparse_vector, split=self.split)
            if self.variant == "proved"
            else partial(figure_12, as_printed=self.variant == "paper_as_printed")
        )
        found = release(
            change,
            bound=self.bound,
            threshold=self.threshold,
            count=self.count,
            epsilon=self.epsilon,
            noise=noise,
        )
        return _update(found.indices, found.values, change.size, self.bound)


@dataclass(frozen=True, slots=True)
class RandomMask:
    """`count` coordinates drawn without looking, clipped in L2 norm, with Gaussian noise."""

    count: int
    clip: float
    multiplier: float  # σ over the sensitivity, 2 · clip
    bound: float = MAX_ABS_VALUE

    def select(self, change: Vector, *, noise: Noise) -> SparseUpdate:
        """Return what is uploaded."""
        indices = np.sort(noise.shuffled(np.arange(change.size))[: self.count])
        noised = gaussian(change[indices], clip=self.clip, multiplier=self.multiplier, noise=noise)
        return _update(indices, np.clip(noised, -self.bound, self.bound), change.size, self.bound)


def _update(indices: Indices, values: NDArray[np.float64], size: int, bound: float) -> SparseUpdate:
    where = None if indices.size == size else indices  # all of them, sorted: dense
    return SparseUpdate(where, values.astype(np.float32), size, bound)
