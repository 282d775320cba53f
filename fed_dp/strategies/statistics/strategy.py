"""Statistics: every site sends each statistic once, the server adds them up and solves for the model.

Guarantee: that of what the sites release; all that the server does is post-processing. A round is a
stage; rounds after the last ask only those sites that have not sent it yet, and nobody once all have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fed_dp.errors import ResumeError, RunError
from fed_dp.mechanisms.statistics import NoiseSpec
from fed_dp.models import Solver, Vector
from fed_dp.sharing.message import Upload
from fed_dp.strategies.site_strategy import PendingRequest, SiteStrategy, State
from fed_dp.strategies.sites import Site


class StatisticsStrategy(SiteStrategy):
    """Σ_k n_k s_k / Σ_k n_k of the sites' means s_k is the mean over all records; n_k is public."""

    def __init__(
        self,
        weights: Vector,
        sites: Sequence[Site],
        *,
        solver: Solver,
        noise: Sequence[NoiseSpec | None],
        ridge: float,
        **rest: Any,
    ) -> None:
        super().__init__(weights, sites, **rest)
        if not self.counted:
            raise RunError(
                "strategy.name = 'statistics' needs the number of records of every site (share.records in "
                "its file), or a declared one (data.expected_records)"
            )
        self._solver, self._noise, self._ridge = solver, noise, ridge
        self._stage = 0
        self._sum = np.zeros(0)
        self._sent = np.zeros(len(self.sites), bool)

    def begin(self, server_round: int) -> None:
        """Begin a stage, or go on with the last."""
        super().begin(server_round)
        stage = min(server_round, len(self._solver.statistics))
        if stage != self._stage:
            self._stage = stage
            self._sum = np.zeros(self._solver.statistics[stage - 1].size)
            self._sent = np.zeros(len(self.sites), bool)

    def sample_clients(self, server_round: int) -> tuple[Site, ...]:
        """Return the sites of this round that have not sent this stage's statistic."""
        return tuple(site for site in super().sample_clients(server_round) if not self._sent[site.client])

    def upload_size(self, server_round: int) -> int:
        """Return how many numbers the statistic is."""
        return self._solver.statistics[self._stage - 1].size

    def combine(self, uploads: Sequence[tuple[PendingRequest, Upload]]) -> None:
        """Add up; the model is solved from what there is."""
        if not uploads:
            return
        for request, upload in uploads:
            self._sum += upload.records * upload.update.values.astype(np.float64)
            self._sent[request.site.client] = True
        there = [site.records for site in self.sites if self._sent[site.client]]
        self.weights = self._solver.put(
            self.weights,
            self._stage,
            self._sum / sum(there),
            noise_spec=self._noise[self._stage - 1],
            ridge=self._ridge,
            records=sum(there) / math.sqrt(len(there)),  # every site adds noise of its own
        )

    def finish(self, server_round: int) -> None:
        """End a round: it may pass without an upload once the statistic is there."""
        if self._sent.sum() < self.quorum:
            super().finish(server_round)

    def state(self) -> State:
        """Return the sum so far, and whose it is."""
        return {**super().state(), "stage": np.array(self._stage), "sum": self._sum, "sent": self._sent}

    def restore(self, state: State) -> None:
        """Take over the sum so far."""
        if missing := {"stage", "sum", "sent"} - state.keys():
            raise ResumeError(f"the checkpoint has no {', '.join(sorted(missing))}: start a new run")
        super().restore(state)
        self._stage, self._sum, self._sent = int(state["stage"]), state["sum"], state["sent"]
