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
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from flwr.app import ArrayRecord, Context, Error, Message
from ray.exceptions import RayActorError, RayError

from fed_dp.data import DataSet
from fed_dp.errors import ResourceError, RunError
from fed_dp.experiment import Data
from fed_dp.simulations.grid import Config, Job, SimulationGrid, answer, identify

AHEAD = 2  # batches an actor has at hand, so that it never waits for the driver
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
    _reachable(address)
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address or "local",  # not whatever cluster RAY_ADDRESS or a file may name
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


def _reachable(address: str | None) -> None:
    """Knock at a cluster's door first: Ray itself waits for minutes before it gives up."""
    host, colon, port = (address or "").rpartition("://")[2].rpartition(":")
    if not colon or not port.isdigit():
        return  # none, or "auto": Ray finds it by itself
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise RunError(f"ray.address = {address!r} cannot be reached: {error.strerror or error}") from None


@dataclass(frozen=True, slots=True)
class _Parcel:
    """A message on its way to an actor, without the records that many messages have in common."""

    message: Message
    common: dict[str, Any]  # name of the record -> where it lies in Ray's object store


class Worker:
    """The actor: it runs the project's ClientApp on batches of messages."""

    def __init__(self, section: Data, dataset: DataSet) -> None:
        from fed_dp.clients.app import app
        from fed_dp.experiment.federation import adopt

        identify()
        adopt(section, dataset)
        self._app = app
        self._common: dict[Any, ArrayRecord] = {}  # records of this round

    def answer(self, jobs: list[tuple[_Parcel, Context]]) -> list[Job]:
        """Answer a batch."""
        return [answer(self._app, self._unpack(parcel), context) for parcel, context in jobs]

    def _unpack(self, parcel: _Parcel) -> Message:
        for name, reference in parcel.common.items():
            if reference not in self._common:
                self._common = {reference: ray.get(reference)}
            parcel.message.content[name] = self._common[reference]
        return parcel.message


class Pool:
    """The actors: as many as the resources allow and the clients need; dead ones are replaced."""

    def __init__(self, *, clients: int, cpus: float, gpus: float, section: Data, dataset: DataSet) -> None:
        self.size = min(clients, _room(cpus=cpus, gpus=gpus))
        self._options = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0}
        self._section, self._dataset = section, ray.put(dataset)
        self.actors: list[Any] = [self.start() for _ in range(self.size)]

    def start(self) -> Any:
        """Start one actor."""
        return ray.remote(Worker).options(**self._options).remote(self._section, self._dataset)

    def close(self) -> None:
        """Stop all actors."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []


def _room(*, cpus: float, gpus: float) -> int:
    """Return how many clients fit at once: an actor must fit on one machine, a share on one GPU."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    for key, kind, each in (("clients.cpus", "CPU", cpus), ("clients.gpus", "GPU", gpus)):
        most = max(node.get(kind, 0.0) for node in nodes)
        if each > most:
            raise ResourceError(
                f"{key} = {each:g}: this Ray has {most:g} {kind}(s) on its largest machine; "
                f"allowed: at most {most:g}"
            )
    return sum(
        min(_share(node.get("CPU", 0.0), cpus), _shared_gpus(node.get("GPU", 0.0), gpus)) for node in nodes
    )


def _share(there: float, each: float) -> int:
    return math.floor(there / each + 1e-9)


def _shared_gpus(there: float, each: float) -> int:
    if each == 0:
        return 10**9
    return int(there) * _share(1, each) if each < 1 else _share(there, each)


class RayGrid(SimulationGrid):
    """All clients on the actors of a pool."""

    def __init__(self, nodes: int, run_config: Config, pool: Pool) -> None:
        super().__init__(nodes, run_config)
        self._pool = pool
        self._free: list[Any] = []  # an actor stands here once per batch it can still take
        self._waiting: deque[_Parcel] = deque()
        self._running: dict[Any, tuple[Any, list[_Parcel]]] = {}
        self._losses: dict[str, int] = {}
        self._replies: dict[str, Job] = {}  # ready, not pulled: their nodes' new state is not in force yet
        self._latest: dict[int, Context] = {}  # the state a node works on, which its next message sees
        self._forgotten: set[str] = set()
        self._stillborn = 0
        for actor in pool.actors:
            self._greet(actor)

    def _greet(self, actor: Any) -> None:
        """Send empty batches: an actor gets messages once it has answered them, so once it lives."""
        for _ in range(AHEAD):
            self._running[actor.answer.remote([])] = actor, []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue the messages and hand them to actors; what many share (the model) travels once."""
        messages = list(messages)
        uses = Counter(id(record) for m in messages for record in m.content.array_records.values())
        stored: dict[int, Any] = {}
        ids = []
        for message in messages:
            ids.append(self.stamp(message))
            common = {}
            for name, record in list(message.content.array_records.items()):
                if uses[id(record)] > 1:
                    if id(record) not in stored:
                        stored[id(record)] = ray.put(record)
                    common[name] = stored[id(record)]
                    del message.content[name]
            self._waiting.append(_Parcel(message, common))
        self._dispatch()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are ready, in the order asked for; wait a little if none is."""
        self._collect(0 if self._replies else 0.05)
        return [self._take(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Wait for all replies or for the timeout; a reply that comes later is dropped."""
        ids = list(self.push_messages(messages))
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while any(i not in self._replies for i in ids) and (left := deadline - time.monotonic()) > 0:
            self._collect(min(left, 1.0))
        self._forgotten.update(i for i in ids if i not in self._replies)
        unsent = {_id(p) for p in self._waiting if _id(p) in self._forgotten}
        self._waiting = deque(p for p in self._waiting if _id(p) not in unsent)
        self._forgotten -= unsent
        return [self._take(i) for i in ids if i in self._replies]

    def _take(self, identity: str) -> Message:
        """Hand a reply over. Its node's state changes now, so that a checkpoint holds both or neither."""
        reply, context = self._replies.pop(identity)
        self.contexts[context.node_id] = context
        return reply

    def _dispatch(self) -> None:
        busy = {_node(parcel) for _, batch in self._running.values() for parcel in batch}
        while self._free and (batch := self._next_batch(busy)):
            # The idlest, and of those the one that worked last: its caches are warm.
            actor = max(reversed(self._free), key=self._free.count)
            self._free.remove(actor)
            jobs = [(parcel, self._working_on(_node(parcel))) for parcel in batch]
            self._running[actor.answer.remote(jobs)] = actor, batch
            busy.update(map(_node, batch))

    def _working_on(self, node: int) -> Context:
        return self._latest.get(node, self.contexts[node])

    def _next_batch(self, busy: set[int]) -> list[_Parcel]:
        """Take a share of the queue: large for few calls, small for even finishing. One node, one turn."""
        size = max(2, min(16, len(self._waiting) // (AHEAD * self._pool.size)))
        batch: list[_Parcel] = []
        nodes = set(busy)
        for _ in range(len(self._waiting)):
            parcel = self._waiting.popleft()
            if len(batch) < size and _node(parcel) not in nodes:
                batch.append(parcel)
                nodes.add(_node(parcel))
            else:
                self._waiting.append(parcel)
        return batch

    def _collect(self, timeout: float) -> None:
        if not self._running:
            return
        ready, _ = ray.wait(list(self._running), timeout=timeout)
        for reference in ready:
            actor, batch = self._running.pop(reference)
            try:
                answers = ray.get(reference)
            except RayActorError as error:
                self._replace(actor, "" if batch else str(error))
                for parcel in batch:
                    self._again(parcel)
                continue
            except RayError as error:  # the batch cannot be read back: its clients fail, the run goes on
                self._free.append(actor)
                for parcel in batch:
                    self._fail(parcel, f"worker: {str(error).splitlines()[0]}")
                continue
            self._free.append(actor)
            for parcel, (reply, context) in zip(batch, answers, strict=True):
                self._keep(parcel, reply, context)
        self._dispatch()

    def _replace(self, dead: Any, stillborn: str) -> None:
        self._stillborn += bool(stillborn)
        if self._stillborn > AHEAD * TRIES * self._pool.size:
            raise RunError(f"worker processes die as they start: {stillborn.strip().splitlines()[-1]}")
        if dead in self._pool.actors:  # not replaced yet by the failure of its other batch
            fresh = self._pool.start()
            self._pool.actors[self._pool.actors.index(dead)] = fresh
            self._free = [actor for actor in self._free if actor != dead]
            self._greet(fresh)

    def _again(self, parcel: _Parcel) -> None:
        identity = _id(parcel)
        self._losses[identity] = self._losses.get(identity, 0) + 1
        if self._losses[identity] < TRIES:
            self._waiting.appendleft(parcel)
        else:
            self._fail(parcel, f"its worker process died {TRIES} times")

    def _fail(self, parcel: _Parcel, reason: str) -> None:
        reply = Message(Error(WORKER_DIED, reason), reply_to=parcel.message)
        self._keep(parcel, reply, self._working_on(_node(parcel)))

    def _keep(self, parcel: _Parcel, reply: Message, context: Context) -> None:
        self._latest[_node(parcel)] = context
        if (identity := _id(parcel)) in self._forgotten:
            self._forgotten.discard(identity)  # too late to be used, but its site has spent what it spent
            self.contexts[_node(parcel)] = context
        else:
            self._replies[identity] = reply, context


def _id(parcel: _Parcel) -> str:
    return parcel.message.metadata.message_id


def _node(parcel: _Parcel) -> int:
    return parcel.message.metadata.dst_node_id
