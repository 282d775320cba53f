"""The two reference lines: everything pooled, and nobody sharing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fed_dp.models import Evaluator, Vector
from fed_dp.sharing.message import Upload
from fed_dp.strategies.averaging.strategy import AveragingStrategy
from fed_dp.strategies.site_strategy import PendingRequest, SiteStrategy, State, record
from fed_dp.strategies.sites import Site


class CentralisedStrategy(AveragingStrategy):
    """All records in one place: averaging over the one node that holds them all."""

    shares = False


class StandaloneStrategy(SiteStrategy):
    """Every site trains alone from the same start; nothing is shared. Scores are means over sites."""

    shares = False

    def __init__(self, weights: Vector, sites: Sequence[Site], **options: Any) -> None:
        super().__init__(weights, sites, **options)
        self.own = np.tile(weights, (len(self.sites), 1))

    def download(self, server_round: int, site: Site) -> tuple[ArrayRecord, int, int]:
        """Give the site its own model back."""
        return record(self.own[site.client]), self.weights.size, 0

    def combine(self, uploads: Sequence[tuple[PendingRequest, Upload]]) -> None:
        """Move each site's own model by its own change."""
        for request, upload in uploads:
            upload.update.add_to(self.own[request.site.client])

    def scores(self, evaluator: Evaluator) -> dict[str, float]:
        """Return the mean over all sites' own models."""
        each = [evaluator.scores(weights) for weights in self.own]
        return {key: float(np.mean([scores[key] for scores in each])) for key in each[0]}

    def weights_of(self, client: int) -> Vector:
        """Return its own model."""
        found: Vector = self.own[client]
        return found

    def state(self) -> State:
        """Return all sites' models."""
        return {**super().state(), "own": self.own}

    def restore(self, state: State) -> None:
        """Take over all sites' models."""
        super().restore(state)
        self.own = state["own"].copy()
