"""Reading replies that come over a network: whatever a site sends, or half sends, it cannot stop the run."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from logging import WARNING

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid

POLL = 0.3  # seconds between two looks
MAX_THREADS = 64  # looks at a time
RESEND_AFTER, MAX_RESENDS = 45.0, 3  # seconds until a message is sent again, and how often
MAX_REPLY_TIME = 30.0  # seconds that the rest of a reply may take before its site is asked again


class Looks:
    """Looks for replies, each in a thread of its own.

    Flower waits up to three minutes for the rest of a reply whose sender died in the middle of it; nobody
    else waits with it.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="replies")
        self._looking: dict[str, tuple[float, Future[Message | None]]] = {}

    def reply(self, message: Message, identity: str) -> Message | None:
        """Return the reply to a message that was pushed as `identity`, if it has come; look again if not.

        One that cannot even be read is the site's fault, and becomes an error reply. Where the server's own
        connection fails, that is raised: then the run stops, to be resumed.
        """
        if identity not in self._looking:
            future = self._pool.submit(self._look, message, identity)
            self._looking[identity] = time.monotonic(), future
            return None
        _, future = self._looking[identity]
        if not future.done():
            return None
        del self._looking[identity]
        return future.result()

    def stuck(self, identity: str) -> bool:
        """Return whether a reply has begun to come and its rest has not, for long."""
        since, future = self._looking.get(identity, (math.inf, None))
        return future is not None and not future.done() and time.monotonic() - since > MAX_REPLY_TIME

    def _look(self, message: Message, identity: str) -> Message | None:
        try:
            return next(iter(self._grid.pull_messages([identity])), None)
        except Exception as error:  # whatever it sent that cannot be read
            if type(error).__module__.partition(".")[0] in ("httpx", "httpcore"):
                raise
            log(WARNING, "a reply cannot be read: %s", type(error).__name__)
            reason = f"not an upload: it cannot be read ({type(error).__name__})"
            return Message(Error(ErrorCode.UNKNOWN, reason), reply_to=message)


def collected(grid: Grid, messages: Sequence[Message], *, timeout: float) -> list[Message]:
    """Send messages that may be repeated, and return the replies that come in time, one for each.

    A message or its reply may be lost where the server or a site was restarted: without a reply for PATIENCE
    seconds, the same is sent again, COPIES times at most.
    """
    deadline, looks = time.monotonic() + timeout, Looks(grid)
    waiting = [_Sent(message) for message in messages]
    replies = []
    while waiting and time.monotonic() < deadline:
        for sent in list(waiting):
            if len(sent.ids) <= MAX_RESENDS and time.monotonic() - sent.since > RESEND_AFTER:
                sent.push(grid)
            for identity in filter(None, sent.ids):
                if (reply := looks.reply(sent.message, identity)) is not None:
                    replies.append(reply)
                    waiting.remove(sent)
                    break
        if waiting:
            time.sleep(POLL)
    return replies


@dataclass(slots=True)
class _Sent:
    """A message on its way, and under which ids it was sent."""

    message: Message
    since: float = -math.inf
    ids: list[str] = field(default_factory=list)

    def push(self, grid: Grid) -> None:
        """Send it, or a copy of it."""
        first, copy = self.message.metadata, self.message
        if self.ids:
            copy = Message(
                self.message.content, first.dst_node_id, first.message_type, group_id=first.group_id
            )
        self.ids += [identity for identity in grid.push_messages([copy]) if identity] or [""]
        self.since = time.monotonic()
