"""The Grid on Ray actors: hundreds of clients on a few processes, on one machine or a cluster.

The ClientApp is loaded once per actor and the data set is shared through Ray's object store.
Messages travel in batches. An actor that dies is replaced and its messages run again: with the
same seed they give the same bytes, so nothing is released twice and nothing is charged twice.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from flwr.app import Error, Message
from ray.exceptions import RayActorError, RayError

from fed_dp.data import DataSet
from fed_dp.errors import ResourceError, RunError
from fed_dp.experiment import Data
from fed_dp.simulations.grid import Config, Job, SimulationGrid, answer, identify

TRIES = 3  # how often a message may lose its actor before its client counts as failed
WORKER_DIED = 1  # Flower's ErrorCode for an unknown reason
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Keep freed memory for the next step: halves the cost of per-record gradients.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}


@contextmanager
def ray_session(address: str | None) -> Iterator[None]:
    """Connect to Ray: one that this process has already, the one at `address`, or a new local one."""
    if ray.is_initialized():
        yield
        return
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address,
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
        )
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        where = f"ray.address = {address!r}" if address else "a local Ray"
        raise RunError(f"{where} cannot be reached: {str(error).strip().splitlines()[0]}") from None
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_terminate)  # ray.init replaces it
        yield
    finally:
        ray.shutdown()


class _Worker:
    """The actor: it runs the project's ClientApp on batches of messages."""

    def __init__(self, section: Data, dataset: DataSet) -> None:
        from fed_dp.clients.app import app
        from fed_dp.experiment.federation import adopt

        identify()
        adopt(section, dataset)
        self._app = app

    def answer(self, jobs: list[Job]) -> list[Job]:
        return [answer(self._app, message, context) for message, context in jobs]


class Pool:
    """The actors: as many as the resources allow and the clients need; dead ones are replaced."""

    def __init__(self, *, clients: int, cpus: float, gpus: float, section: Data, dataset: DataSet) -> None:
        resources = ray.cluster_resources()
        fits = [_how_many("clients.cpus", "CPU", cpus, resources)]
        if gpus:
            fits.append(_how_many("clients.gpus", "GPU", gpus, resources))
        self.size = max(1, min(clients, *fits))
        self._options = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0}
        self._section, self._dataset = section, ray.put(dataset)
        self.actors: list[Any] = [self.start() for _ in range(self.size)]

    def start(self) -> Any:
        """Start one actor."""
        return ray.remote(_Worker).options(**self._options).remote(self._section, self._dataset)

    def close(self) -> None:
        """Stop all actors."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []


def _how_many(key: str, kind: str, each: float, resources: dict[str, float]) -> int:
    there = resources.get(kind, 0.0)
    if each > there:
        raise ResourceError(f"{key} = {each:g}: this Ray has {there:g} {kind}(s); allowed: at most {there:g}")
    return math.floor(there / each + 1e-9)


class RayGrid(SimulationGrid):
    """All clients on the actors of a pool."""

    def __init__(self, nodes: int, run_config: Config, pool: Pool) -> None:
        super().__init__(nodes, run_config)
        self._pool = pool
        self._idle = list(pool.actors)
        self._waiting: deque[Message] = deque()
        self._running: dict[Any, tuple[Any, list[Message]]] = {}
        self._losses: dict[str, int] = {}
        self._replies: dict[str, Message] = {}
        self._forgotten: set[str] = set()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue the messages and hand them to idle actors."""
        ids = []
        for message in messages:
            ids.append(self.stamp(message))
            self._waiting.append(message)
        self._dispatch()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are ready, in the order asked for."""
        self._collect(0)
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Wait for all replies or for the timeout; a reply that comes later is dropped."""
        ids = list(self.push_messages(messages))
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while any(i not in self._replies for i in ids) and (left := deadline - time.monotonic()) > 0:
            self._collect(min(left, 1.0))
        self._forgotten.update(i for i in ids if i not in self._replies)
        self._waiting = deque(m for m in self._waiting if m.metadata.message_id not in self._forgotten)
        return [self._replies.pop(i) for i in ids if i in self._replies]

    def _dispatch(self) -> None:
        busy = {m.metadata.dst_node_id for _, batch in self._running.values() for m in batch}
        while self._idle and (batch := self._next_batch(busy)):
            actor = self._idle.pop()
            jobs = [(message, self.contexts[message.metadata.dst_node_id]) for message in batch]
            self._running[actor.answer.remote(jobs)] = actor, batch
            busy |= {m.metadata.dst_node_id for m in batch}

    def _next_batch(self, busy: set[int]) -> list[Message]:
        """Take a share of the queue: large for few calls, small for even finishing. One node, one turn."""
        size = max(1, min(16, len(self._waiting) // (2 * self._pool.size)))
        batch: list[Message] = []
        nodes = set(busy)
        for _ in range(len(self._waiting)):
            message = self._waiting.popleft()
            if len(batch) < size and message.metadata.dst_node_id not in nodes:
                batch.append(message)
                nodes.add(message.metadata.dst_node_id)
            else:
                self._waiting.append(message)
        return batch

    def _collect(self, timeout: float) -> None:
        if not self._running:
            return
        ready, _ = ray.wait(list(self._running), timeout=timeout)
        for reference in ready:
            actor, batch = self._running.pop(reference)
            try:
                answers = ray.get(reference)
            except RayActorError:
                self._replace(actor)
                for message in batch:
                    self._again(message)
                continue
            except RayError as error:  # the batch cannot be read back: its clients fail, the run goes on
                self._idle.append(actor)
                for message in batch:
                    self._fail(message, f"worker: {str(error).splitlines()[0]}")
                continue
            self._idle.append(actor)
            for message, (reply, context) in zip(batch, answers, strict=True):
                self.contexts[message.metadata.dst_node_id] = context
                self._keep(message, reply)
        self._dispatch()

    def _replace(self, dead: Any) -> None:
        fresh = self._pool.start()
        self._pool.actors[self._pool.actors.index(dead)] = fresh
        self._idle.append(fresh)

    def _again(self, message: Message) -> None:
        identity = message.metadata.message_id
        self._losses[identity] = self._losses.get(identity, 0) + 1
        if self._losses[identity] < TRIES:
            self._waiting.appendleft(message)
        else:
            self._fail(message, f"its worker process died {TRIES} times")

    def _fail(self, message: Message, reason: str) -> None:
        self._keep(message, Message(Error(WORKER_DIED, reason), reply_to=message))

    def _keep(self, message: Message, reply: Message) -> None:
        identity = message.metadata.message_id
        if identity in self._forgotten:
            self._forgotten.discard(identity)
        else:
            self._replies[identity] = reply
