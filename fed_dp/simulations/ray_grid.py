"""The Grid on Ray actors: hundreds of clients on a few processes, on one machine or a cluster.

The ClientApp is loaded once per actor and the data set is shared through Ray's object store.
Messages travel in batches; those of a client batch within are answered together. An actor that dies is
replaced and its messages run again, as they do when the machine is lost that held the answers: with the
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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from flwr.app import ArrayRecord, Context, Error, Message
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayError

from fed_dp import plugins
from fed_dp.data import DataSet
from fed_dp.data.options import Data
from fed_dp.errors import ResourceError, RunError
from fed_dp.simulations.grid import Config, Job, SimulationGrid, answer_client_batch, identify

AHEAD = 2  # batches an actor has at hand, so that it never waits for the driver
TRIES = 3  # how often a message may lose its actor before its client counts as failed
LOW_MEMORY = "its machine ran low on memory; fewer workers (a larger clients.cpus) need less"
LOST_MACHINE = "its machine was lost"
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
def ray_session(address: str | None, *, object_store_gb: float | None = None) -> Iterator[None]:
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
            object_store_memory=None if object_store_gb is None else int(object_store_gb * 1e9),
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


ClientBatch = list[_Parcel]


class Worker:
    """The actor: it runs the project's ClientApp on batches of messages."""

    def __init__(self, section: Data, dataset: DataSet, objects: Mapping[str, plugins.Shared]) -> None:
        plugins.adopt(objects)
        from fed_dp.clients.app import app
        from fed_dp.experiment.federation import adopt

        identify()
        adopt(section, dataset)
        self._app = app
        self._common: dict[Any, ArrayRecord] = {}  # records of this round

    def answer(self, batch: list[list[tuple[_Parcel, Context]]]) -> list[Job]:
        """Answer a batch, one client batch after the other."""
        found: list[Job] = []
        for client_batch in batch:
            jobs = [(self._unpack(parcel), context) for parcel, context in client_batch]
            found += answer_client_batch(self._app, jobs)
        return found

    def _unpack(self, parcel: _Parcel) -> Message:
        for name, reference in parcel.common.items():
            if reference not in self._common:
                self._common = {reference: ray.get(reference)}
            parcel.message.content[name] = self._common[reference]
        return parcel.message


class Pool:
    """The actors: as many as the resources allow and the clients need; dead ones are replaced."""

    def __init__(self, *, clients: int, cpus: float, gpus: float, section: Data, dataset: DataSet) -> None:
        self._clients, self._cpus, self._gpus = clients, cpus, gpus
        self.most = self._wanted()
        _check_store(dataset)
        self._options = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0}
        self._section, self._dataset = section, ray.put(dataset)
        self.actors: list[Any] = [self.start() for _ in range(self.most)]

    @property
    def size(self) -> int:
        """How many actors there are."""
        return len(self.actors)

    def _wanted(self) -> int:
        return min(self._clients, _room(cpus=self._cpus, gpus=self._gpus))

    def start(self) -> Any:
        """Start one actor."""
        worker = ray.remote(Worker).options(**self._options)
        return worker.remote(self._section, self._dataset, plugins.shared())

    def replace(self, dead: Any) -> Any | None:
        """Start another in a dead actor's place, if there is room for it: a machine may be gone."""
        self.actors.remove(dead)
        ray.kill(dead)  # it may only be out of reach; then it must not keep its place
        if self.actors and len(self.actors) >= self._wanted():
            return None
        self.actors.append(self.start())
        return self.actors[-1]

    def close(self) -> None:
        """Stop all actors."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []


def _check_store(dataset: DataSet) -> None:
    """Refuse a data set that does not fit where all workers of a machine are to share it."""
    there = [node["Resources"].get("object_store_memory", 0.0) for node in _machines()]
    if (size := dataset.nbytes) > min(there):
        raise ResourceError(
            f"data.name = {dataset.name!r} takes {size / 1e9:.3g} GB, and Ray's object store has "
            f"{min(there) / 1e9:.3g} GB on the smallest machine: set ray.object_store_gb, or give the "
            "cluster more (ray start --object-store-memory)"
        )


def _machines() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _room(*, cpus: float, gpus: float) -> int:
    """Return how many clients fit at once: an actor must fit on one machine, a share on one GPU."""
    nodes = [node["Resources"] for node in _machines()]
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

    def __init__(self, nodes: int, run_config: Config, pool: Pool, client_batch: int = 1) -> None:
        super().__init__(nodes, run_config, client_batch)
        self._pool = pool
        self._free: list[Any] = []  # an actor stands here once per batch it can still take
        self._waiting: deque[ClientBatch] = deque()
        self._running: dict[
            Any, tuple[Any, list[ClientBatch]]
        ] = {}  # in the order in which they were handed out
        self._places: dict[Any, int] = {}  # how many of its actor's places a batch takes; else 1
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
        parcels: dict[str, _Parcel] = {}
        for message in messages:
            identity, common = self.stamp(message), {}
            for name, record in list(message.content.array_records.items()):
                if uses[id(record)] > 1:
                    if id(record) not in stored:
                        stored[id(record)] = ray.put(record)
                    common[name] = stored[id(record)]
                    del message.content[name]
            parcels[identity] = _Parcel(message, common)
        for client_batch in self.client_batches(messages, workers=self._pool.size):
            self._waiting.append([parcels[message.metadata.message_id] for message in client_batch])
        self._dispatch()
        return list(parcels)

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
        while any(i not in self._replies for i in ids) and (time_left := deadline - time.monotonic()) > 0:
            self._collect(min(time_left, 1.0))
        self._forgotten.update(i for i in ids if i not in self._replies)
        unsent = {_id(p) for client_batch in self._waiting for p in client_batch if _id(p) in self._forgotten}
        left = ([p for p in client_batch if _id(p) not in unsent] for client_batch in self._waiting)
        self._waiting = deque(client_batch for client_batch in left if client_batch)
        self._forgotten -= unsent
        return [self._take(i) for i in ids if i in self._replies]

    def _take(self, identity: str) -> Message:
        """Hand a reply over. Its node's state changes now, so that a checkpoint holds both or neither."""
        reply, context = self._replies.pop(identity)
        self.contexts[context.node_id] = context
        return reply

    def _dispatch(self) -> None:
        busy = {
            _node(p) for _, batch in self._running.values() for client_batch in batch for p in client_batch
        }
        while self._free and (batch := self._next_batch(busy)):
            # The idlest, and of those the one that worked last: its caches are warm.
            actor = max(reversed(self._free), key=self._free.count)
            places = AHEAD if self._suspect(batch[0]) else 1
            if self._free.count(actor) < places:
                self._waiting.extendleft(reversed(batch))
                break
            for _ in range(places):
                self._free.remove(actor)
            jobs = [
                [(parcel, self._working_on(_node(parcel))) for parcel in client_batch]
                for client_batch in batch
            ]
            reference = actor.answer.remote(jobs)
            self._running[reference] = actor, batch
            self._places[reference] = places

    def _suspect(self, client_batch: ClientBatch) -> bool:
        """Return whether a client batch has lost its worker before.

        It is then alone in a batch, and its worker has nothing else at hand: whatever a worker was given dies
        with it, also what it had only begun to read.
        """
        return any(_id(parcel) in self._losses for parcel in client_batch)

    def _working_on(self, node: int) -> Context:
        return self._latest.get(node, self.contexts[node])

    def _next_batch(self, busy: set[int]) -> list[ClientBatch]:
        """Take a share of the queue: large for few calls, small for even finishing. One node, one turn."""
        waiting = sum(map(len, self._waiting))
        size = max(2, min(16, waiting // (AHEAD * self._pool.size)))
        batch: list[ClientBatch] = []
        passed: list[ClientBatch] = []
        while self._waiting and sum(map(len, batch)) < size:
            client_batch = self._waiting.popleft()
            suspect = self._suspect(client_batch)
            if batch and suspect:
                passed.append(client_batch)
                continue
            if late := [parcel for parcel in client_batch if _node(parcel) in busy]:  # nobody waits for them
                passed.append(late)
            if ready := [parcel for parcel in client_batch if _node(parcel) not in busy]:
                batch.append(ready)
                busy.update(map(_node, ready))
                if suspect:
                    break
        self._waiting.extendleft(reversed(passed))
        return batch

    def _collect(self, timeout: float) -> None:
        if not self._running:
            return
        ready, _ = ray.wait(list(self._running), timeout=timeout)
        for reference in ready:
            if reference not in self._running:  # its actor died, and that has been seen to
                continue
            actor, batch = self._running[reference]
            try:
                answers = ray.get(reference)
            except (RayActorError, OutOfMemoryError) as error:
                self._bury(actor, _reason(error))
                continue
            except ObjectLostError:  # with the machine that held it
                self._finished(reference)
                self._waiting.extendleft(reversed(batch))
                continue
            except RayError as error:  # the batch cannot be read back: its clients fail, the run goes on
                self._finished(reference)
                for parcel in _parcels(batch):
                    self._fail(parcel, f"worker: {str(error).splitlines()[0]}")
                continue
            self._finished(reference)
            for parcel, (reply, context) in zip(_parcels(batch), answers, strict=True):
                self._keep(parcel, reply, context)
        self._dispatch()

    def _finished(self, reference: Any) -> None:
        actor, _ = self._running.pop(reference)
        self._free += [actor] * self._places.pop(reference, 1)

    def _bury(self, dead: Any, reason: str) -> None:
        """Replace a dead actor. What it was working on counts a loss, unless its machine was lost.

        What it had yet to begin counts none.
        """
        references = [r for r, (actor, _) in self._running.items() if actor == dead]
        batches = [self._running.pop(reference)[1] for reference in references]
        for reference in references:
            self._places.pop(reference, None)
        self._free = [actor for actor in self._free if actor != dead]
        fresh = self._pool.replace(dead)
        if fresh is not None:
            self._greet(fresh)
        first, *others = batches
        self._stillborn += not first and reason != LOST_MACHINE
        if self._stillborn > TRIES * self._pool.most:
            raise RunError(f"worker processes die as they start: {reason}")
        for batch in reversed(others):
            self._waiting.extendleft(reversed(batch))
        if reason == LOST_MACHINE:
            self._waiting.extendleft(reversed(first))
            return
        for client_batch in reversed(first):
            self._again(client_batch, f": {reason}" if reason == LOW_MEMORY else "")

    def _again(self, client_batch: ClientBatch, why: str) -> None:
        """Queue a client batch again; the last time each message alone, so that one that kills is known."""
        losses = 1 + max(self._losses.get(_id(parcel), 0) for parcel in client_batch)
        self._losses.update(dict.fromkeys(map(_id, client_batch), losses))
        if losses < TRIES - 1:
            self._waiting.appendleft(client_batch)
        elif losses < TRIES:
            self._waiting.extendleft([parcel] for parcel in reversed(client_batch))
        else:
            for parcel in client_batch:
                self._fail(parcel, f"its worker process died {TRIES} times{why}")

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


def _reason(error: RayError) -> str:
    told = str(error).strip()
    if "node has died" in told or "node was terminated" in told:
        return LOST_MACHINE
    return LOW_MEMORY if "low on memory" in told else told.splitlines()[-1]


def _parcels(batch: list[ClientBatch]) -> ClientBatch:
    return [parcel for client_batch in batch for parcel in client_batch]


def _id(parcel: _Parcel) -> str:
    return parcel.message.metadata.message_id


def _node(parcel: _Parcel) -> int:
    return parcel.message.metadata.dst_node_id
