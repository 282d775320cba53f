"""Time and threads under a test's control, so that no test depends on how fast the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Any

HANG = 600.0  # seconds: how long a test waits for an event; only there to end a hang


class Clock:
    """Stands in for the module `time`: it passes when somebody sleeps, and a millisecond with every look."""

    def __init__(self) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC).timestamp()

    def monotonic(self) -> float:
        self.now += 0.001
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def iso(self) -> str:
        """The time, as Flower writes it."""
        return datetime.fromtimestamp(self.time(), UTC).isoformat()


class Hangs(BaseException):
    """Raised by a call that would never return."""


class Immediate:
    """Stands in for a pool of threads: a call is made at once; one that raises Hangs is never done."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments))
        except Hangs:
            pass
        except Exception as error:
            future.set_exception(error)
        return future


def wait_until(
    condition: Callable[[], bool], why: Callable[[], str] = lambda: "", *, every: float = 0.05
) -> None:
    """Wait for an event."""
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline, f"nothing within {HANG:g} s\n{why()}"
        time.sleep(every)
