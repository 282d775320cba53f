"""Distributed selective SGD: the parameter server adds what sites select, and averages nothing.

Reference: Shokri and Shmatikov, "Privacy-Preserving Deep Learning", CCS 2015, Figs. 3 and 4.
Guarantee: that of the trainer. Under a private one, selection is post-processing and costs nothing;
under plain SGD there is none: the selected changes, and which they are, reveal the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fed_dp import seeds
from fed_dp.errors import ResumeError
from fed_dp.models import Vector
from fed_dp.sharing.exchange import Order, order
from fed_dp.sharing.message import Upload
from fed_dp.sharing.parameter_server import ParameterServer
from fed_dp.sharing.selection import share
from fed_dp.sharing.update import MAX_ABS_VALUE
from fed_dp.strategies.dssgd import Dssgd
from fed_dp.strategies.site_strategy import PendingRequest, SiteStrategy, State, record
from fed_dp.strategies.sites import Site


class DssgdStrategy(SiteStrategy):
    """On upload: w_j += Δw_j and stat_j += 1 for all j in S. On download: the θ_d of largest stat.

    `rounds_done` counts each site's finished rounds; only the free-running exchange lets them differ.
    """

    sparse = True

    def __init__(self, weights: Vector, sites: Sequence[Site], *, options: Dssgd, **rest: Any) -> None:
        super().__init__(weights, sites, **rest)
        self.options = options
        self.value_bytes = np.dtype(options.precision).itemsize
        self.server = ParameterServer(weights)
        self._order = Order(())
        self._previous = self.server

    def begin(self, server_round: int) -> None:
        """Keep last round's state for the sites that lag behind."""
        super().begin(server_round)
        if self.options.exchange == "asynchronous":
            self._previous = self.server.copy()

    def waves(self, server_round: int) -> Iterable[Sequence[Site]]:
        """Yield the sites in the order of the exchange."""
        self._order = order(
            self.options.exchange,
            [site.client for site in self.sample_clients(server_round)],
            rng=seeds.generator(self.seed, "exchange", server_round),
            outdated=self.options.outdated,
        )
        for wave in self._order.waves:
            yield [self.sites[client] for client in wave]

    def download(self, server_round: int, site: Site) -> tuple[ArrayRecord, int, int]:
        """Return the most updated share of the parameters, of this round's state or of the last's."""
        late = site.client in self._order.outdated
        server = self._previous if late else self.server
        count = share(self.options.download_share(site.client), server.weights.size)
        if count == server.weights.size and not late:
            return self.whole(), count, server.version
        rng = seeds.generator(self.seed, "download", server_round, site.client)
        return record(server.download(count, rng=rng)), count, server.version

    def allowed(self, site: Site) -> tuple[int, float]:
        """Return the site's θ_u · |w|, and γ."""
        bound = MAX_ABS_VALUE if self.options.bound is None else self.options.bound
        return share(self.options.upload_share(site.client), self.weights.size), bound

    def combine(self, uploads: Sequence[tuple[PendingRequest, Upload]]) -> None:
        """Add each upload to the parameters it names."""
        for request, upload in uploads:
            self.stats.staleness.append(self.server.version - request.version)
            self.server.upload(upload.update)

    def finish(self, server_round: int) -> None:
        """Let the counters fade."""
        if self.options.exchange != "free_running":  # there, a round may pass without an upload
            super().finish(server_round)
        self.server.decay(self.options.decay)

    def state(self) -> State:
        """Return weights, counters and finished rounds."""
        return {
            **super().state(),
            "weights": self.server.weights,
            "stat": self.server.stat,
            "version": np.array(self.server.version),
            "turns": self.rounds_done,
        }

    def restore(self, state: State) -> None:
        """Take over weights, counters and finished rounds."""
        if missing := {"stat", "version", "turns"} - state.keys():
            raise ResumeError(f"the checkpoint has no {', '.join(sorted(missing))}: start a new run")
        super().restore(state)
        self.server = ParameterServer(self.weights, state["stat"], int(state["version"]))
        self.rounds_done = state["turns"]
