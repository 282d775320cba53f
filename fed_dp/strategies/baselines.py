"""The two reference lines: everything pooled, and nobody sharing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from fed_dp.models import Evaluator, Vector
from fed_dp.sharing import message as names
from fed_dp.sharing.message import Upload
from fed_dp.strategies.averaging import Averaging
from fed_dp.strategies.exchange import SiteStrategy, State
from fed_dp.strategies.sites import Site


class Centralised(Averaging):
    """All records in one place: averaging over the one node that holds them all."""

    shares = False


class Standalone(SiteStrategy):
    """Every site trains alone from the same start; nothing is shared. Scores are means over sites."""

    shares = False

    def __init__(self, weights: Vector, sites: Sequence[Site], **options: Any) -> None:
        super().__init__(weights, sites, **options)
        self.own = np.tile(weights, (len(self.sites), 1))

    def download(self, site: Site, whole: ArrayRecord) -> ArrayRecord:
        """Give the site its own model back."""
        return ArrayRecord({names.WEIGHTS: Array(self.own[site.client])})

    def combine(self, uploads: Sequence[tuple[Site, Upload]]) -> None:
        """Move each site's own model by its own change."""
        for site, upload in uploads:
            self.own[site.client] += upload.change

    def scores(self, evaluator: Evaluator) -> dict[str, float]:
        """Return the mean over all sites' own models."""
        each = [evaluator.scores(weights) for weights in self.own]
        return {key: float(np.mean([scores[key] for scores in each])) for key in each[0]}

    def state(self) -> State:
        """Return all sites' models."""
        return {"weights": self.weights, "own": self.own}

    def restore(self, state: State) -> None:
        """Take over all sites' models."""
        super().restore(state)
        self.own = state["own"].copy()
