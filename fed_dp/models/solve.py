"""From the sites' statistics to a model: what the server computes, free of charge."""

from __future__ import annotations

import numpy as np

from fed_dp.mechanisms.noise import Reals
from fed_dp.mechanisms.statistics import Kind, NoiseSpec, OfHead, deviation
from fed_dp.models.encoders import Encoded
from fed_dp.models.flat import FlatNetwork, Vector
from fed_dp.models.network import NetworkSpec


def solved_head(
    statistic: OfHead, mean: Reals, *, noise_spec: NoiseSpec | None, ridge: float, records: float
) -> Vector:
    """Return the head's weights, as the network stores them, from the mean of its statistic.

    `records` is over how many records the noise of one site is spread, such that its standard deviation
    in the mean is deviation / records.
    """
    noise = deviation(statistic, noise_spec) / records
    kind: Kind = "laplace" if noise_spec is None else noise_spec.kind
    solution = statistic.head(mean, noise=noise, kind=kind, ridge=ridge)
    return np.clip(solution.T.ravel(), -1e3, 1e3).astype(np.float32)


class Solver:
    """Put the mean of a stage's statistic into a network's weights: moments as they are, heads solved."""

    def __init__(self, spec: NetworkSpec, *, cross: float) -> None:
        self._net = FlatNetwork(spec)
        network = self._net.network
        assert isinstance(network, Encoded)  # by what the model offers
        self._network, self._cross = network, cross
        self.statistics = network.statistics(cross)

    def put(
        self,
        weights: Vector,
        stage: int,
        mean: Reals,
        *,
        noise_spec: NoiseSpec | None,
        ridge: float,
        records: float,
    ) -> Vector:
        """Return the weights with stage `stage` (from 1) solved from the mean of its statistic."""
        found, where = weights.copy(), self._network.segment(stage)
        if stage < self._network.stages:
            found[where] = mean
            return found
        self._net.load(weights)
        statistic = self._network.head_statistics(self._cross)
        found[where] = solved_head(statistic, mean, noise_spec=noise_spec, ridge=ridge, records=records)
        return found
