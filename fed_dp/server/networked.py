"""Rounds over a network: sites that die, come back, answer late or send nonsense.

A request has a deadline. After a restart of its site it is sent again: the site sends what it had kept,
and pays nothing for that. After a missed deadline a site is skipped until it reconnects.
Whatever a site sends, it cannot stop the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fed_dp.server.discovery import MAX_RECORDS
from fed_dp.server.drivers import SynchronousDriver
from fed_dp.server.replies import POLL, Looks
from fed_dp.strategies.failures import OFFLINE
from fed_dp.strategies.site_strategy import PendingRequest, SiteStrategy
from fed_dp.strategies.sites import Site

MAX_COPIES = 3  # of a request, to a site that was restarted
POLL_INTERVAL = 1.0  # seconds between two looks for sites
LOST = (  # error replies that do not come from the site's own program
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
)


@dataclass(frozen=True, slots=True)
class Deployment:
    """What a server knows where sites are real."""

    data: Path  # its own folder: test records, and public ones
    keys: Mapping[bytes, tuple[int, str]]  # whose public key is whose: client number and name
    join_timeout: float = 600.0  # seconds to wait for sites when a run begins
    max_records: int = MAX_RECORDS  # that a site may announce


@dataclass(slots=True)
class _Asked:
    """A request on its way: when it was last sent, under which message ids."""

    request: PendingRequest
    since: float
    ids: set[str] = field(default_factory=set)
    lost: str = ""  # why the last try came to nothing


class NetworkedDriver(SynchronousDriver):
    """Waves over a network. `timeout` is the deadline of every request."""

    def __init__(self, strategy: SiteStrategy, grid: Grid, *, timeout: float) -> None:
        super().__init__(strategy, grid, timeout=timeout)
        self._silent: set[int] = set()  # clients that let a deadline pass
        self._looks = Looks(grid)
        self._looked, self._there = 0.0, dict[int, float]()

    def ask(self, server_round: int, wave: Sequence[Site]) -> list[Message]:
        """Ask those of a wave that are there, or were there when last asked."""
        online = self._online()
        here = [site for site in wave if site.node in online or site.client not in self._silent]
        for site in wave:
            if site not in here:
                self._strategy.stats.failed[site.client, server_round] = OFFLINE
        return self._strategy.ask(server_round, here)

    def exchange(self, messages: Sequence[Message]) -> Iterable[Message]:
        """Return the replies that came by the deadline; repeat requests to sites that were restarted."""
        deadline = time.monotonic() + self._timeout
        waiting = [_Asked(request, 0.0) for request in self._strategy.waiting(messages)]
        for asked in waiting:
            self._push(asked, asked.request.message)
        replies: list[Message] = []
        while waiting and time.monotonic() < deadline:
            for asked in list(waiting):
                if (reply := self._reply(asked)) is not None:
                    replies.append(reply)
                    waiting.remove(asked)
                    self._silent.discard(asked.request.site.client)
                elif self._was_restarted(asked):
                    self._push(asked, self._strategy.again(asked.request))
            if waiting:
                time.sleep(POLL)
        for asked in waiting:
            self._silent.add(asked.request.site.client)
            if asked.lost:
                error = Error(ErrorCode.NODE_UNAVAILABLE, asked.lost)
                replies.append(Message(error, reply_to=asked.request.message))
        return replies

    def _push(self, asked: _Asked, message: Message) -> None:
        asked.ids |= {identity for identity in self._grid.push_messages([message]) if identity}
        asked.since, asked.lost = time.time(), ""

    def _reply(self, asked: _Asked) -> Message | None:
        """Look for a reply to any copy of a request."""
        for identity in list(asked.ids):
            if (reply := self._looks.reply(asked.request.message, identity)) is None:
                continue
            asked.ids.discard(identity)
            if not (reply.has_error() and reply.error.code in LOST):
                return reply
            asked.lost = reply.error.reason or "lost"
        return None

    def _was_restarted(self, asked: _Asked) -> bool:
        """Return whether the site's node is there and what it was asked is not known to it any more.

        Not for ever: a site whose program dies of the request itself may have been charged for it.
        """
        activated = self._online().get(asked.request.site.node)
        if len(asked.request.copies) >= MAX_COPIES:
            return False
        lost = all(self._looks.stuck(identity) for identity in asked.ids)  # or nothing is on its way
        return activated is not None and (activated > asked.since or lost)

    def _online(self) -> dict[int, float]:
        """Return the nodes that are there, each with the time when it (last) came."""
        if time.monotonic() - self._looked > POLL_INTERVAL:
            self._there = {
                node.node_id: datetime.fromisoformat(node.last_activated_at).timestamp()
                for node in self._grid.get_nodes()
                if node.status == "online"
            }
            self._looked = time.monotonic()
        return self._there
