"""How the messages of a round travel: in waves, or freely."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from flwr.app import Message
from flwr.serverapp import Grid

from fed_dp.errors import EmptyRound
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
            strategy.receive(self.exchange(self.ask(server_round, wave)))
            strategy.abandon()
        strategy.finish(server_round)

    def ask(self, server_round: int, wave: Sequence[Site]) -> list[Message]:
        """Return what the sites of a wave are asked."""
        return self._strategy.ask(server_round, wave)

    def exchange(self, messages: Sequence[Message]) -> Iterable[Message]:
        """Send the messages and return the replies that come in time."""
        return self._grid.send_and_receive(messages, timeout=self._timeout) if messages else []


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
        while True:
            answered = self._collect()
            self._look_at_the_clock()
            if not self._behind(server_round):
                break
            pause = 0.001 if answered else min(0.2, 2 * pause)
            if not answered:
                time.sleep(pause)
        if not strategy.tally.uploads and len(self._silent) == len(strategy.sites):
            raise EmptyRound(f"round {server_round}: no client has replied for {self._timeout:g} s")
        if server_round == self._rounds:
            self._count_missed_turns()
        strategy.finish(server_round)

    def _behind(self, server_round: int) -> bool:
        """Return whether a site that answers has not finished this turn."""
        turns = self._strategy.turns
        return any(
            turns[site.client] < server_round and site.client not in self._silent
            for site in self._strategy.sites
        )

    def _ask(self, sites: list[Site]) -> None:
        for site in sites:
            if (turn := int(self._strategy.turns[site.client]) + 1) <= self._rounds:
                [identity] = self._grid.push_messages(self._strategy.ask(turn, [site]))
                self._since[identity] = site, time.monotonic()

    def _collect(self) -> bool:
        """Use what has come; return whether anything has."""
        replies = list(self._grid.pull_messages(list(self._since)))
        for question in self._strategy.receive(replies):
            del self._since[question.message.metadata.message_id]
            if question.site.client in self._silent:
                self._silent.remove(question.site.client)
                self._strategy.tally.late += 1
            self._strategy.turns[question.site.client] += 1
            self._ask([question.site])
        return bool(replies)

    def _look_at_the_clock(self) -> None:
        for site, since in self._since.values():
            if time.monotonic() - since > self._timeout and site.client not in self._silent:
                self._silent.add(site.client)
                self._strategy.tally.failed[site.client, self._next(site)] = NO_REPLY

    def _count_missed_turns(self) -> None:
        for site in self._strategy.sites:
            for turn in range(self._next(site) + 1, self._rounds + 1):  # the next was asked for
                self._strategy.tally.failed[site.client, turn] = "not asked any more, being silent"

    def _next(self, site: Site) -> int:
        return int(self._strategy.turns[site.client]) + 1
