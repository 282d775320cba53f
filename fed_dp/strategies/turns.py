"""How the messages of a round travel: in waves, or freely."""

from __future__ import annotations

import time
from typing import Protocol

from flwr.serverapp import Grid

from fed_dp.strategies.dssgd import Dssgd
from fed_dp.strategies.site_strategy import NO_REPLY, SiteStrategy
from fed_dp.strategies.sites import Site


class Turns(Protocol):
    """Who drives a strategy through its rounds."""

    def round(self, server_round: int) -> None:
        """Run one round."""


class Waves:
    """One wave after the other; a site that has not replied after `timeout` seconds is left out."""

    def __init__(self, strategy: SiteStrategy, grid: Grid, *, timeout: float) -> None:
        self._strategy, self._grid, self._timeout = strategy, grid, timeout

    def round(self, server_round: int) -> None:
        """Run one round."""
        strategy = self._strategy
        strategy.begin(server_round)
        for wave in strategy.waves(server_round):
            messages = strategy.ask(server_round, wave)
            strategy.receive(self._grid.send_and_receive(messages, timeout=self._timeout))
            strategy.abandon()
        strategy.finish(server_round)


class FreeRunning:
    """Nobody waits: a reply is added at once, however stale, and its site is asked again.

    Every site takes `rounds` turns at its own pace. Round r is over when every site that answers
    has finished its turn r; the faster ones are further on by then. A site that has been silent for
    `timeout` seconds counts as failed and holds nobody back; what it sends later is still added.
    The result depends on who is how fast: it cannot be repeated exactly.
    """

    def __init__(self, strategy: Dssgd, grid: Grid, *, rounds: int, timeout: float) -> None:
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
        while any(
            strategy.turns[site.client] < server_round and site.client not in self._silent
            for site in strategy.sites
        ):
            answered = self._collect()
            pause = 0.001 if answered else min(0.2, 2 * pause)
            if not answered:
                self._look_at_the_clock()
                time.sleep(pause)
        strategy.finish(server_round)

    def _ask(self, sites: list[Site]) -> None:
        for site in sites:
            if (turn := int(self._strategy.turns[site.client]) + 1) <= self._rounds:
                [identity] = self._grid.push_messages(self._strategy.ask(turn, [site]))
                self._since[identity] = site, time.monotonic()

    def _collect(self) -> bool:
        replies = list(self._grid.pull_messages(list(self._since)))
        for reply in replies:
            self._strategy.receive([reply])
            site, _ = self._since.pop(reply.metadata.reply_to_message_id, (None, 0.0))
            if site is not None:
                self._silent.discard(site.client)
                self._strategy.turns[site.client] += 1
                self._ask([site])
        return bool(replies)

    def _look_at_the_clock(self) -> None:
        for site, since in self._since.values():
            if time.monotonic() - since > self._timeout and site.client not in self._silent:
                self._silent.add(site.client)
                self._strategy.tally.failed[site.client] = NO_REPLY
