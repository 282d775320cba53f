"""From the sites' statistics to a model: what the server computes, free of charge."""

from __future__ import annotations

import numpy as np

from fed_dp.mechanisms.noise import Reals
from fed_dp.mechanisms.statistics import Amount, Kind, OfHead, Statistic, deviation
from fed_dp.models.encoders import Encoded
from fed_dp.models.flat import FlatNetwork, Vector
from fed_dp.models.networks import Options, Shape


def solved_head(
    statistic: OfHead, mean: Reals, *, amount: Amount | None, ridge: float, records: float
) -> Vector:
    """Return the head's weights, as the network stores them, from the mean of its statistic.

    `records` is over how many records the noise of one site is spread, such that its standard deviation
    in the mean is deviation / records.
    """
    noise = deviation(statistic, amount) / records
    kind: Kind = "laplace" if amount is None else amount.kind
    solution = statistic.head(mean, noise=noise, kind=kind, ridge=ridge)
    return np.clip(solution.T.ravel(), -1e3, 1e3).astype(np.float32)


class Solver:
    """Put the mean of a stage's statistic into a network's weights: moments as they are, heads solved."""

    def __init__(self, name: str, shape: Shape, classes: int, options: Options, *, cross: float) -> None:
        self._net = FlatNetwork(name, shape, classes, options=options)
        network = self._net.network
        assert isinstance(network, Encoded)  # by schema
        self._network, self._cross = network, cross
        learnt: list[Statistic] = [layer.statistic for layer in network.learnt]
        self.statistics = [*learnt, network.head_statistics(cross)]

    def put(
        self, weights: Vector, stage: int, mean: Reals, *, amount: Amount | None, ridge: float, records: float
    ) -> Vector:
        """Return the weights with stage `stage` (from 1) solved from the mean of its statistic."""
        found = weights.copy()
        if stage < len(self.statistics):
            start = sum(statistic.size for statistic in self.statistics[: stage - 1])
            found[start : start + len(mean)] = mean
            return found
        self._net.load(weights)
        statistic = self._network.head_statistics(self._cross)
        head = solved_head(statistic, mean, amount=amount, ridge=ridge, records=records)
        found[-len(head) :] = head
        return found
