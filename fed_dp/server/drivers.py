"""How the messages of a round travel: in waves, or freely."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from flwr.app import Message
from flwr.serverapp import Grid

from fed_dp.errors import EmptyRound
from fed_dp.strategies.failures import NO_REPLY, SILENT
from fed_dp.strategies.site_strategy import SiteStrategy
from fed_dp.strategies.sites import Site


class RoundDriver(Protocol):
    """Who drives a strategy through its rounds."""

    def round(self, server_round: int) -> None:
        """Run one round."""


class SynchronousDriver:
    """One wave after the other; a site that has not replied after `timeout` seconds is left out."""

    def __init__(self, strategy: SiteStrategy, grid: Grid, *, timeout: float) -> None:
        self._strategy, self._grid, self._timeout = strategy, grid, timeout

    def round(self, server_round: int) -> None:
        """Run one round."""
        strategy = self._strategy
        strategy.begin(server_round)
        for wave in strategy.waves(server_round):
            strategy.receive(self.exchange(self.ask(server_round, wave)))
            strategy.abandon()
        strategy.finish(server_round)

    def ask(self, server_round: int, wave: Sequence[Site]) -> list[Message]:
        """Return what the sites of a wave are asked."""
        return self._strategy.ask(server_round, wave)

    def exchange(self, messages: Sequence[Message]) -> Iterable[Message]:
        """Send the messages and return the replies that come in time."""
        return self._grid.send_and_receive(messages, timeout=self._timeout) if messages else []


class AsynchronousDriver:
    """Nobody waits: a reply is added at once, however stale, and its site is asked again.

    Every site goes through all rounds at its own pace. Round r is over when every site that answers
    has finished its own; the faster ones are further on by then. A site that has been silent for
    `timeout` seconds counts as failed and holds nobody back; what it sends later is still added.
    The result depends on who is how fast: it cannot be repeated exactly.
    """

    def __init__(self, strategy: SiteStrategy, grid: Grid, *, rounds: int, timeout: float) -> None:
        self._strategy, self._grid, self._rounds, self._timeout = strategy, grid, rounds, timeout
        self._since: dict[str, tuple[Site, float]] = {}  # message -> whom it asks, and since when
        self._silent: set[int] = set()

    def round(self, server_round: int) -> None:
        """Run until round `server_round` is over."""
        strategy = self._strategy
        strategy.begin(server_round)
        busy = {site.client for site, _ in self._since.values()}
        self._ask([site for site in strategy.sites if site.client not in busy])
        pause = 0.001
        while True:
            answered = self._collect()
            self._look_at_the_clock()
            if not self._behind(server_round):
                break
            pause = 0.001 if answered else min(0.2, 2 * pause)
            if not answered:
                time.sleep(pause)
        if not strategy.stats.uploads and len(self._silent) == len(strategy.sites):
            raise EmptyRound(f"round {server_round}: no client has replied for {self._timeout:g} s")
        if server_round == self._rounds:
            self._count_missed_rounds()
        strategy.finish(server_round)

    def _behind(self, server_round: int) -> bool:
        """Return whether a site that answers has not finished this round."""
        rounds_done = self._strategy.rounds_done
        return any(
            rounds_done[site.client] < server_round and site.client not in self._silent
            for site in self._strategy.sites
        )

    def _ask(self, sites: list[Site]) -> None:
        for site in sites:
            if (server_round := int(self._strategy.rounds_done[site.client]) + 1) <= self._rounds:
                [identity] = self._grid.push_messages(self._strategy.ask(server_round, [site]))
                self._since[identity] = site, time.monotonic()

    def _collect(self) -> bool:
        """Use what has come; return whether anything has."""
        replies = list(self._grid.pull_messages(list(self._since)))
        for request in self._strategy.receive(replies):
            del self._since[request.message.metadata.message_id]
            if request.site.client in self._silent:
                self._silent.remove(request.site.client)
                self._strategy.stats.late += 1
            self._strategy.rounds_done[request.site.client] += 1
            self._ask([request.site])
        return bool(replies)

    def _look_at_the_clock(self) -> None:
        for site, since in self._since.values():
            if time.monotonic() - since > self._timeout and site.client not in self._silent:
                self._silent.add(site.client)
                self._strategy.stats.failed[site.client, self._next(site)] = NO_REPLY

    def _count_missed_rounds(self) -> None:
        for site in self._strategy.sites:
            for server_round in range(self._next(site) + 1, self._rounds + 1):  # the next was asked for
                self._strategy.stats.failed[site.client, server_round] = SILENT

    def _next(self, site: Site) -> int:
        return int(self._strategy.rounds_done[site.client]) + 1
