"""Runs on real Ray actors: the same results, dead actors, deadlines, resources."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fed_dp.errors import ResourceError, RunError
from fed_dp.experiment import Experiment, to_run_config
from fed_dp.experiment.federation import load, make_federation
from fed_dp.models import initial_weights
from fed_dp.runs.folder import Line, RunFolder
from fed_dp.server.observers import Silent
from fed_dp.sharing import message as names
from fed_dp.simulations.ray_grid import AHEAD, Pool, RayGrid, _room, ray_session
from fed_dp.simulations.runner import simulate
from fed_dp.strategies.site_strategy import record
from tests.clock import HANG
from tests.conftest import private_selection, small, some
from tests.simulations.test_private import ledger_heads
from tests.simulations.test_simulate import run, weights

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    ray.init(num_cpus=2, num_gpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def on_ray(experiment: Experiment, root: Path, observer: Silent | None = None) -> tuple[Path, dict[str, Any]]:
    return simulate(experiment, observer=observer or Silent(), engine="ray", root=root)


def pool(experiment: Experiment) -> Pool:
    clients = experiment.clients
    return Pool(
        clients=experiment.nodes,
        cpus=clients.cpus,
        gpus=clients.gpus,
        section=experiment.data,
        dataset=load(experiment.data),
    )


STRATEGIES: dict[str, dict[str, Any]] = {
    "averaging": {"name": "averaging"},
    "round robin": {"name": "dssgd", "download_fraction": 0.5},
}


def questions(nodes: int) -> list[Message]:
    return [Message(RecordDict(), node, MessageType.QUERY, group_id="0") for node in range(1, nodes + 1)]


@pytest.mark.parametrize("selection", some(["sparse_vector", "random_mask"], ["sparse_vector"]))
def test_private_selections_give_the_same_result_and_the_same_ledgers(selection: str, tmp_path: Path) -> None:
    experiment = private_selection(selection, clients={"count": 5})
    here, summary = run(experiment, tmp_path / "here")
    there, other = on_ray(experiment, tmp_path / "there")
    assert weights(here) == weights(there)
    assert ledger_heads(here) == ledger_heads(there)
    assert summary["privacy"] == other["privacy"]


@pytest.mark.parametrize("strategy", some(list(STRATEGIES), ["averaging"]))
@pytest.mark.parametrize("kind", some(["sgd", "psgd"], ["psgd"]))
def test_ray_gives_the_same_result_as_one_process(kind: str, strategy: str, tmp_path: Path) -> None:
    experiment = small(kind, clients={"count": 9}, strategy=STRATEGIES[strategy])
    here, summary = run(experiment, tmp_path / "here")
    there, other = on_ray(experiment, tmp_path / "there")
    assert weights(here) == weights(there)
    for key in ("accuracy", "bytes", "privacy", "digest"):
        assert summary[key] == other[key]


class WithPools(Silent):
    """Note the pools of workers that runs start."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pools: list[Pool] = []
        original = Pool.__init__

        def noted(pool: Pool, **options: Any) -> None:
            original(pool, **options)
            self.pools.append(pool)

        patch.setattr(Pool, "__init__", noted)


class KillActors(WithPools):
    """Kill the first worker processes after the first round, as the operating system might."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int) -> None:
        super().__init__(patch)
        self.killed: list[int] = []
        self._count = count

    def round_done(self, line: Line) -> None:
        if line["round"] == 1:
            for actor in self.pools[-1].actors[: self._count]:
                self.killed.append(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))
                os.kill(self.killed[-1], signal.SIGKILL)


@pytest.mark.parametrize(
    ("kind", "strategy", "count"),
    some(
        [("sgd", "averaging", 1), ("psgd", "averaging", 1), ("psgd", "round robin", 2)],
        [("psgd", "round robin", 2)],
    ),
)
def test_a_dead_actor_is_replaced_and_nothing_is_charged_twice(
    kind: str, strategy: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = small(kind, rounds=3, clients={"count": 9}, strategy=STRATEGIES[strategy])
    here, expected = run(experiment, tmp_path / "here")
    observer = KillActors(monkeypatch, count)
    there, summary = on_ray(experiment, tmp_path / "there", observer)
    assert len(observer.killed) == count
    assert summary["failures"] == 0
    assert weights(here) == weights(there)
    assert summary["privacy"] == expected["privacy"]
    if kind == "psgd":
        assert ledger_heads(here) == ledger_heads(there)


@pytest.mark.exhaustive  # the same without a block
def test_a_message_that_kills_every_actor_fails_alone(tmp_path: Path) -> None:
    experiment = small(clients={"count": 3})
    workers = pool(experiment)
    grid = RayGrid(3, dict(to_run_config(experiment)), workers)
    ray.get(workers.actors[0].answer.remote([]))  # it has started
    deadly = Message(RecordDict(), 2, MessageType.QUERY, group_id="0")

    class Bomb(dict[str, bool | float | int | str]):
        def __reduce__(self) -> Any:
            return os._exit, (1,)

    grid.contexts[2].run_config = Bomb()
    replies = list(grid.send_and_receive([deadly], timeout=HANG))
    assert len(replies) == 1
    assert "died 3 times" in (replies[0].error.reason or "")
    others = [m for m in questions(3) if m.metadata.dst_node_id != 2]
    assert [r.metadata.src_node_id for r in grid.send_and_receive(others, timeout=HANG)] == [1, 3]
    workers.close()


def test_workers_that_cannot_start_are_an_error_not_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self, *_: Any) -> None:
            raise ImportError("no such library")

        def answer(self, jobs: Any) -> Any:
            return jobs

    monkeypatch.setattr("fed_dp.simulations.ray_grid.Worker", Broken)
    experiment = small(clients={"count": 1})
    workers = pool(experiment)
    grid = RayGrid(1, dict(to_run_config(experiment)), workers)
    with pytest.raises(RunError, match=r"die as they start: .*no such library"):
        list(grid.send_and_receive(questions(1), timeout=HANG))
    workers.close()


def test_a_late_reply_is_dropped_and_the_node_takes_one_message_at_a_time() -> None:
    experiment = small(clients={"count": 4})
    workers = pool(experiment)
    grid = RayGrid(4, dict(to_run_config(experiment)), workers)
    list(grid.send_and_receive(questions(4), timeout=HANG))  # the actors are up
    assert list(grid.send_and_receive(questions(4), timeout=0)) == []
    ids = list(grid.push_messages(questions(4) + questions(4)))
    got: list[Message] = []
    deadline = time.monotonic() + HANG
    while len(got) < 8 and time.monotonic() < deadline:
        got += grid.pull_messages(ids)
        time.sleep(0.02)
    assert sorted(m.metadata.reply_to_message_id for m in got) == sorted(ids)
    assert list(grid.pull_messages(ids)) == []
    clients = sorted(int(str(m.content.metric_records[names.METRICS][names.PARTITION])) for m in got)
    assert clients == [0, 0, 1, 1, 2, 2, 3, 3]
    workers.close()


def test_one_that_is_late_holds_nobody_back_who_would_be_trained_beside_it() -> None:
    experiment = small(clients={"count": 4})
    workers = pool(experiment)
    grid = RayGrid(4, dict(to_run_config(experiment)), workers, client_batch=8)
    waiting = [Message(RecordDict(), node, MessageType.TRAIN, group_id="1") for node in range(1, 5)]
    grid.push_messages(waiting)  # no worker is up yet
    [first, second] = (
        [p.message.metadata.dst_node_id for p in client_batch] for client_batch in grid._waiting
    )
    assert (first, second) == ([1, 2], [3, 4])
    batch = grid._next_batch({2})
    assert [[p.message.metadata.dst_node_id for p in client_batch] for client_batch in batch] == [[1], [3, 4]]
    assert [[p.message.metadata.dst_node_id for p in client_batch] for client_batch in grid._waiting] == [[2]]
    workers.close()


def test_a_message_that_has_lost_its_worker_has_the_next_one_to_itself() -> None:
    """Else, whatever is given to that worker beside it would be blamed for its death."""
    experiment = small(clients={"count": 4})
    workers = pool(experiment)
    grid = RayGrid(4, dict(to_run_config(experiment)), workers)
    messages = [Message(RecordDict(), node, MessageType.TRAIN, group_id="1") for node in range(1, 5)]
    first, *_ = grid.push_messages(messages)  # no worker is up yet
    grid._losses[first] = 1
    actor, greetings = workers.actors[0], dict(grid._running)
    grid._free = [actor]  # it has something at hand
    grid._dispatch()
    assert grid._running == greetings
    assert [p.message.metadata.message_id for p in grid._waiting[0]] == [first]
    grid._free = [actor] * AHEAD
    grid._dispatch()
    [handed] = grid._running.keys() - greetings.keys()
    assert [
        p.message.metadata.message_id for client_batch in grid._running[handed][1] for p in client_batch
    ] == [first]
    assert actor not in grid._free  # until it has answered
    grid._finished(handed)
    assert grid._free == [actor] * AHEAD
    workers.close()


def test_a_message_that_kills_takes_none_of_its_block_with_it() -> None:
    experiment = small(clients={"count": 3})
    workers = pool(experiment)
    grid = RayGrid(3, dict(to_run_config(experiment)), workers, client_batch=8)

    class Bomb(dict[str, bool | float | int | str]):
        def __reduce__(self) -> Any:
            return os._exit, (1,)

    grid.contexts[2].run_config = Bomb()
    data = make_federation(experiment).dataset
    shared = record(initial_weights(experiment.network(data.shape, data.classes), seed=1))
    order = ConfigRecord({names.ROUND: 1})
    messages = [
        Message(
            RecordDict({names.ARRAYS: shared, names.CONFIG: order}), node, MessageType.TRAIN, group_id="1"
        )
        for node in (1, 2, 3)
    ]
    replies = list(grid.send_and_receive(messages, timeout=HANG))
    assert [reply.has_error() for reply in replies] == [False, True, False]
    assert "died 3 times" in (replies[1].error.reason or "")
    others = [m for m in questions(3) if m.metadata.dst_node_id != 2]
    assert [r.metadata.src_node_id for r in grid.send_and_receive(others, timeout=HANG)] == [1, 3]
    workers.close()


def test_shares_of_gpus_decide_how_many_actors_there_are(tmp_path: Path) -> None:
    assert _room(cpus=0.1, gpus=0.6) == 4  # two shares of .6 do not fit on one GPU
    assert _room(cpus=0.25, gpus=0.5) == 8
    assert _room(cpus=2.0, gpus=0.0) == 1
    workers = pool(small(clients={"count": 9, "cpus": 0.5, "gpus": 2.0}))
    assert workers.size == 2  # of four logical GPUs; the processors would do for four
    workers.close()
    _, summary = on_ray(small(clients={"count": 3, "cpus": 1.0, "gpus": 0.5}), tmp_path)
    assert summary["failures"] == 0


@pytest.mark.parametrize(
    ("clients", "says"),
    [
        ({"count": 4, "gpus": 8.0}, r"clients.gpus = 8: this Ray has 4 GPU"),
        ({"count": 4, "cpus": 64.0}, r"clients.cpus = 64: this Ray has 2 CPU"),
    ],
)
def test_more_than_there_is_is_refused(clients: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=says):
        on_ray(small(clients=clients), tmp_path)


def test_hundreds_of_clients_take_turns_on_few_processes(tmp_path: Path) -> None:
    _, summary = on_ray(small(clients={"count": 300}, rounds=1), tmp_path)
    assert summary["failures"] == 0
    assert summary["clients"] == 300


def test_a_session_inside_a_session_is_the_same_one() -> None:
    with ray_session(None):
        assert ray.is_initialized()
    assert ray.is_initialized()


def test_a_cluster_that_is_not_there_is_told() -> None:
    ray.shutdown()
    try:
        with pytest.raises(RunError, match=r"ray.address = '127.0.0.1:1' cannot be reached"):
            with ray_session("127.0.0.1:1"):
                pass
    finally:
        ray.init(num_cpus=2, num_gpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")


def test_nobody_waits_on_ray_and_every_site_takes_its_turns(tmp_path: Path) -> None:
    strategy = {"name": "dssgd", "exchange": "free_running"}
    experiment = small("psgd", rounds=3, clients={"count": 5}, strategy=strategy)
    path, summary = on_ray(experiment, tmp_path)
    latest = RunFolder(path).latest()
    assert latest is not None
    assert latest[1]["turns"].tolist() == [3] * 5
    assert summary["failures"] == 0
    assert summary["staleness"]["max"] >= 1
    assert 3.9 < summary["privacy"]["epsilon_total"] <= 4  # every turn was paid once


def test_a_checkpoint_holds_a_clients_state_only_with_the_reply_that_the_server_has_seen() -> None:
    experiment = small("psgd", clients={"count": 1})
    workers = pool(experiment)
    grid = RayGrid(1, dict(to_run_config(experiment)), workers)
    data = make_federation(experiment).dataset
    start = initial_weights(experiment.network(data.shape, data.classes), seed=1)
    content = RecordDict({names.ARRAYS: record(start), names.CONFIG: ConfigRecord({names.ROUND: 1})})
    [identity] = grid.push_messages([Message(content, 1, MessageType.TRAIN, group_id="1")])
    deadline = time.monotonic() + HANG
    while identity not in grid._replies and time.monotonic() < deadline:
        grid._collect(0.1)
    assert not grid.contexts[1].state
    [reply] = grid.pull_messages([identity])
    assert not reply.has_error()
    assert grid.contexts[1].state
    workers.close()
