"""From the sites' statistics to a model: what the server computes, free of charge."""

from __future__ import annotations

import math

import numpy as np

from fed_dp.mechanisms.noise import Reals
from fed_dp.mechanisms.statistics import Amount, Statistic, deviation, minimiser
from fed_dp.models.encoders import Encoded
from fed_dp.models.flat import Vector
from fed_dp.models.networks import Options, Shape, build

LEAST_RIDGE = 1e-6  # of a mean of matrices of norm 1


def head_ridge(factor: float, noise: float, *, features: int, sites: int) -> float:
    """Return `factor` times the size of the noise in the mean of `sites` matrices, and never nothing.

    `noise` is the standard deviation at one site; a symmetric random matrix has a spectral norm of
    about √b of it.
    """
    return max(factor * noise * math.sqrt(features / sites), LEAST_RIDGE)


class Solver:
    """Put the mean of a stage's statistic into a network's weights: moments as they are, heads solved."""

    def __init__(self, name: str, shape: Shape, classes: int, options: Options, *, cross: float) -> None:
        network = build(name, shape, classes, options)
        assert isinstance(network, Encoded)  # by schema
        self.statistics: list[Statistic] = [layer.statistic for layer in network.learnt]
        self._head = network.head_statistics(cross)
        self.statistics.append(self._head)

    def put(
        self, weights: Vector, stage: int, mean: Reals, *, amount: Amount | None, ridge: float, records: float
    ) -> Vector:
        """Return the weights with stage `stage` (from 1) solved from the mean over records of its statistic.

        `records` is over how many records the noise of one site is spread, such that its standard
        deviation in the mean is deviation / records.
        """
        start = sum(statistic.size for statistic in self.statistics[: stage - 1])
        found = weights.copy()
        if stage < len(self.statistics):
            found[start : start + len(mean)] = mean
            return found
        gram, cross = self._head.unpack(mean)
        noise = deviation(self._head, amount) / records
        size = head_ridge(ridge, noise, features=self._head.features, sites=1)
        solution = minimiser(gram, cross, ridge=size)
        found[start:] = np.clip(solution.T.ravel(), -1e3, 1e3).astype(np.float32)
        return found
