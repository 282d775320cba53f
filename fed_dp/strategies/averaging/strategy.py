"""Federated averaging: the model moves by the mean of the sites' changes, weighted by records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fed_dp.models import Evaluator, Vector
from fed_dp.sharing.message import Upload
from fed_dp.strategies.averaging import Averaging
from fed_dp.strategies.site_strategy import PendingRequest, SiteStrategy, State
from fed_dp.strategies.sites import Site


class AveragingStrategy(SiteStrategy):
    """w += η v, v = μ v + Σ n_k Δw_k / Σ n_k over the sites that uploaded; n_k is public and fixed.

    η = 1 and μ = 0 is federated averaging; with one step a round and momentum it is federated SGD. In rounds
    before `first`, sites send released moments: the model takes those as they are.

    References: McMahan et al., AISTATS 2017, Algorithm 1; Reddi et al., "Adaptive Federated Optimization",
    ICLR 2021 (the server's steps).
    """

    def __init__(
        self,
        weights: Vector,
        sites: Sequence[Site],
        *,
        options: Averaging | None = None,
        rounds: int = 1,
        first: int = 1,
        **common: Any,
    ) -> None:
        super().__init__(weights, sites, **common)
        self._options = options or Averaging()
        self._rounds, self._first = rounds, first
        self._round = 0
        self._velocity = np.zeros(weights.size if self._options.momentum else 0)
        self._mean: Vector | None = None

    def begin(self, server_round: int) -> None:
        """Begin a round."""
        super().begin(server_round)
        self._round = server_round

    def combine(self, uploads: Sequence[tuple[PendingRequest, Upload]]) -> None:
        """Add the weighted mean, summed in client order in double precision."""
        if not uploads:
            return
        total = sum(upload.records for _, upload in uploads)
        mean = np.zeros(self.weights.size, np.float64)
        scaled = np.empty_like(mean)
        for _, upload in uploads:
            np.multiply(upload.update.values, upload.records / total, out=scaled)
            mean += scaled
        self.weights = (self.weights + self._step(mean)).astype(np.float32)

    def _step(self, mean: np.ndarray) -> np.ndarray:
        """Return by what the model moves."""
        options = self._options
        if self._round < self._first:
            return mean
        if options.momentum:
            self._velocity *= options.momentum
            self._velocity += mean
            mean = self._velocity
        return mean * (options.learning_rate * self._decayed())

    def _decayed(self) -> float:
        """Return what the schedule leaves of the learning rate in this round."""
        done = (self._round - self._first) / (self._rounds - self._first + 1)
        match self._options.schedule:
            case "linear":
                return 1 - done
            case "cosine":
                return (1 + math.cos(math.pi * done)) / 2
            case _:
                return 1.0

    def finish(self, server_round: int) -> None:
        """End a round."""
        super().finish(server_round)
        if self._options.ema is None:
            return
        steps = server_round - self._first + 1  # while there are few, the first model must not outweigh them
        decay = (
            min(self._options.ema, (1 + steps) / (10 + steps))
            if steps > 0 and self._mean is not None
            else 0.0
        )
        before = self.weights if self._mean is None else self._mean
        self._mean = (decay * before + (1 - decay) * self.weights).astype(np.float32)

    @property
    def model(self) -> Vector:
        """The model that the run ends with: the moving average of models, where one is asked for."""
        return self.weights if self._mean is None else self._mean

    def scores(self, evaluator: Evaluator) -> dict[str, float]:
        """Return the test scores of that model."""
        return evaluator.scores(self.model)

    def weights_of(self, client: int) -> Vector:
        """Return that model: all clients end with it."""
        return self.model

    def state(self) -> State:
        """Return everything a resumed run needs."""
        state = super().state()
        if self._velocity.size:
            state["velocity"] = self._velocity
        if self._mean is not None:
            state["mean"] = self._mean
        return state

    def restore(self, state: State) -> None:
        """Take over the state of an earlier run."""
        super().restore(state)
        self._velocity = state.get("velocity", self._velocity)
        self._mean = state.get("mean")
