"""Federated averaging: the model moves by the mean of the sites' changes, weighted by records."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fed_dp.sharing.message import Upload
from fed_dp.strategies.site_strategy import PendingRequest, SiteStrategy


class AveragingStrategy(SiteStrategy):
    """w += Σ n_k Δw_k / Σ n_k over the sites that uploaded; n_k is public and fixed at the start.

    Reference: McMahan et al., AISTATS 2017, Algorithm 1.
    """

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
        self.weights = (self.weights + mean).astype(np.float32)
