"""The parameter server's state (Fig. 4): weights, and how often each of them was updated."""

from __future__ import annotations

import numpy as np

from fed_dp.seeds import Generator
from fed_dp.sharing.selection import most_updated
from fed_dp.sharing.update import SparseUpdate, Vector


class ParameterServer:
    """It adds what arrives and never averages. `version` counts the updates it has added."""

    def __init__(self, weights: Vector, stat: Vector | None = None, version: int = 0) -> None:
        self.weights = weights
        self.stat = np.zeros(weights.size, np.float32) if stat is None else stat
        self.version = version

    def upload(self, update: SparseUpdate) -> None:
        """For all j in S: w_j += Δw_j and stat_j += 1."""
        update.add_to(self.weights)
        if update.indices is None:
            self.stat += 1
        else:
            self.stat[update.indices] += 1
        self.version += 1

    def decay(self, factor: float) -> None:
        """Set stat := β · stat, so that recent updates weigh more."""
        self.stat *= np.float32(factor)

    def download(self, count: int, *, rng: Generator) -> SparseUpdate:
        """Return the values of the `count` most updated parameters."""
        if count >= self.weights.size:
            return SparseUpdate.dense(self.weights)
        return SparseUpdate.of(self.weights, most_updated(self.stat, count, rng=rng))

    def copy(self) -> ParameterServer:
        """Return the state as it is now."""
        return ParameterServer(self.weights.copy(), self.stat.copy(), self.version)
