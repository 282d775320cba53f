"""Clients that die, lag, send garbage or send twice: the run goes on and its state is right."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, Error, Message

from fed_dp.accounting import from_json
from fed_dp.clients.app import app
from fed_dp.errors import EmptyRound, ResumeError
from fed_dp.experiment import Experiment, build, to_run_config
from fed_dp.runs.folder import Line, RunFolder
from fed_dp.runs.report import traffic_lines
from fed_dp.server import drivers
from fed_dp.server.observers import Silent
from fed_dp.server.rounds import run_rounds
from fed_dp.sharing import message as names
from fed_dp.simulations.grid import InProcessGrid
from tests.clock import Clock
from tests.conftest import small
from tests.deploy.federation import Federation, tables
from tests.deploy.hostile import BAD, plan
from tests.strategies.test_dssgd import literal

CLIENTS = 4


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "time", Clock())


class Faulty(InProcessGrid):
    """Real clients behind a bad network: what client k does in round r is `faults[k, r]`."""

    def __init__(self, experiment: Experiment, faults: dict[tuple[int, int], str]) -> None:
        super().__init__(experiment.nodes, dict(to_run_config(experiment)), app)
        self._faults = faults

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return [reply for message in messages for reply in self._suffer(message)]

    def _suffer(self, message: Message) -> list[Message]:
        config = message.content.config_records.get(names.CONFIG)
        turn = 0 if config is None else config[names.ROUND]
        fault = self._faults.get((message.metadata.dst_node_id - 1, turn))  # type: ignore[arg-type]
        if fault == "dies":
            return []
        if fault == "raises":
            self.stamp(message)
            return [Message(Error(2, "out of memory"), reply_to=message)]
        [reply] = super().send_and_receive([message])
        if fault == "is late":
            return []
        if fault == "sends garbage":
            record = reply.content.array_records[names.ARRAYS]
            data = record[names.CHANGE].data
            record[names.CHANGE] = Array("uint8", (len(data) - 5,), names.WIRE, data[:-5])
        return [reply, reply] if fault == "sends twice" else [reply]


def run(
    path: Path, experiment: Experiment, faults: dict[tuple[int, int], str]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    folder = RunFolder.create(path, experiment)
    summary = run_rounds(experiment, Faulty(experiment, faults), folder, Silent())
    latest = folder.latest()
    assert latest is not None
    return summary, latest[1]


@pytest.mark.parametrize("exchange", ["round_robin", "random_order", "asynchronous", "parallel"])
@pytest.mark.parametrize("kind", ["sgd", "psgd"])
def test_the_run_goes_on_and_its_state_is_that_of_the_valid_uploads(
    tmp_path: Path, exchange: str, kind: str
) -> None:
    strategy = {"name": "dssgd", "exchange": exchange, "download_fraction": 0.5}
    experiment = small(kind, rounds=3, strategy=strategy)
    faults = {
        (0, 1): "dies",
        (1, 2): "is late",
        (2, 1): "sends garbage",
        (3, 2): "sends twice",
        (0, 3): "raises",
    }
    summary, state = run(tmp_path / "bad", experiment, faults)
    happened = {"dies": "dies", "raises": "dies", "is late": "is lost", "sends garbage": "is lost"}
    slow = literal(experiment, {place: happened[f] for place, f in faults.items() if f != "sends twice"})
    assert state["weights"].tobytes() == np.array(slow.w, np.float32).tobytes()
    assert state["stat"].tobytes() == np.array(slow.stat, np.float32).tobytes()
    assert state["version"] == 8
    assert summary["failures"] == 4
    assert summary["failure_kinds"] == {"no reply in time": 2, "truncated": 1, "out of memory": 1}
    assert summary["repeated"] == 1
    told = "\n".join(traffic_lines(summary))
    assert "4 client-rounds failed (2 × no reply in time" in told
    assert "1 repeated or unasked replies were not counted" in told
    lines = RunFolder(tmp_path / "bad").lines()
    assert [line["clients"]["uploaded"] for line in lines] == [2, 3, 3]
    if kind == "psgd":  # what was sent is spent, also when it was garbage; what never came is warned of
        accounted = [{event.client for event in from_json(line["events"])} for line in lines]
        assert accounted == [{1, 2, 3}, {0, 2, 3}, {1, 2, 3}]
        assert any("2 replies never came" in warning for warning in summary["privacy"]["warnings"])


def test_a_round_in_which_all_fail_is_an_error_in_every_exchange(tmp_path: Path) -> None:
    for exchange in ("round_robin", "parallel", "free_running"):
        experiment = small(strategy={"name": "dssgd", "exchange": exchange}, round_timeout=0.05)
        grid = Lagging(experiment, {k: 10**9 for k in range(CLIENTS)})
        folder = RunFolder.create(tmp_path / exchange, experiment)
        told = (
            "no client has replied for"
            if exchange == "free_running"
            else "none of 4 clients uploaded; client 0"
        )
        with pytest.raises(EmptyRound, match=told):
            run_rounds(experiment, grid, folder, Silent())


class Hostile(Faulty):
    """Sites 0 and 1 spoil what they send."""

    def _suffer(self, message: Message) -> list[Message]:
        [reply] = super()._suffer(message)
        client = message.metadata.dst_node_id - 1
        if message.metadata.message_type != "train" or client > 1 or reply.has_error():
            return [reply]
        turn = int(str(message.content.config_records[names.CONFIG][names.ROUND]))
        try:
            return [Message(plan(client, turn, BAD)[1](reply.content), reply_to=message)]
        except RuntimeError as error:
            return [Message(Error(2, f"RuntimeError: {error}"), reply_to=message)]


def test_whatever_a_site_sends_is_refused_by_name_and_the_state_is_that_of_the_honest_one(
    tmp_path: Path,
) -> None:
    rounds = len(BAD) // 2
    parallel = {**tables()["strategy"], "exchange": "parallel"}
    pooled = Federation(tmp_path / "federation").pooled
    experiment = build(tables(path=str(pooled), rounds=rounds, strategy=parallel))
    folder = RunFolder.create(tmp_path / "hostile", experiment)
    summary = run_rounds(experiment, Hostile(experiment, {}), folder, Silent())
    for line in folder.lines():
        assert line["clients"]["uploaded"] == 1
        for client in (0, 1):
            said = plan(client, line["round"], BAD)[0]
            assert said in line["failures"][str(client)], (line["round"], client, said)
    assert summary["failures"] == len(BAD)
    latest = folder.latest()
    assert latest is not None
    silent = {(client, turn): "dies" for client in (0, 1) for turn in range(1, rounds + 1)}
    assert (
        latest[1]["weights"].tobytes() == run(tmp_path / "alone", experiment, silent)[1]["weights"].tobytes()
    )


# -------------------------------------------------------------------------- nobody waits


class Lagging(InProcessGrid):
    """Client k replies to a message of a round after it was looked for `pulls[k]` times."""

    def __init__(self, experiment: Experiment, pulls: dict[int, int]) -> None:
        super().__init__(CLIENTS, dict(to_run_config(experiment)), app)
        self._pulls = pulls
        self._looked: dict[str, int] = defaultdict(int)
        self.order: list[int] = []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ready = []
        for identity in list(message_ids):
            self._looked[identity] += 1
            client = self._waiting[identity].metadata.dst_node_id - 1
            if self._looked[identity] > self._pulls.get(client, 0):
                ready.append(self._answer(identity))
                self.order.append(client)
        return ready

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        messages = list(messages)
        if messages[0].metadata.message_type == "query":
            return super().send_and_receive(messages)
        return self.pull_messages(self.push_messages(messages))


class Wake(Silent):
    """After every round, client 0 answers at once."""

    def __init__(self, grid: Lagging) -> None:
        self._grid = grid

    def round_done(self, line: Line) -> None:
        self._grid._pulls[0] = 0


def free(**changes: Any) -> Experiment:
    strategy = {"name": "dssgd", "exchange": "free_running", "upload_fraction": 0.1}
    return small(strategy=strategy, **{"rounds": 4, **changes})


def test_nobody_waits_and_staleness_is_recorded(tmp_path: Path) -> None:
    experiment = free()
    grid = Lagging(experiment, {0: 6, 1: 0, 2: 0, 3: 0})
    folder = RunFolder.create(tmp_path / "run", experiment)
    summary = run_rounds(experiment, grid, folder, Silent())
    assert sorted(grid.order) == sorted([0, 1, 2, 3] * 4)  # everybody took all turns
    assert grid.order.index(0) >= 9  # the others had gone on without it
    assert [line["clients"]["uploaded"] for line in folder.lines()] == [13, 1, 1, 1]
    assert summary["staleness"]["max"] == 12  # the slow one's first upload, added all the same
    latest = folder.latest()
    assert latest is not None
    assert latest[1]["version"] == 16
    assert latest[1]["turns"].tolist() == [4] * 4


def test_a_silent_site_holds_nobody_back_and_is_still_added_when_it_comes(tmp_path: Path) -> None:
    experiment = free(round_timeout=0.5)
    grid = Lagging(experiment, {0: 10**9, 1: 7, 2: 7, 3: 7})
    folder = RunFolder.create(tmp_path / "run", experiment)
    summary = run_rounds(experiment, grid, folder, Wake(grid))
    lines = folder.lines()
    assert lines[0]["failures"] == {"0": "no reply in time"}
    latest = folder.latest()
    assert latest is not None
    turns = latest[1]["turns"].tolist()
    assert turns[1:] == [4, 4, 4]
    assert turns[0] >= 1
    assert summary["late"] == 1
    assert summary["failures"] == 4 - turns[0]


def test_a_site_that_wakes_when_all_others_are_done_is_still_added(tmp_path: Path) -> None:
    experiment = free(round_timeout=0.2)
    grid = Lagging(experiment, {0: 10**9})
    folder = RunFolder.create(tmp_path / "run", experiment)
    summary = run_rounds(experiment, grid, folder, Wake(grid))
    latest = folder.latest()
    assert latest is not None
    assert latest[1]["turns"].tolist() == [4, 4, 4, 4]
    assert (summary["late"], summary["failures"]) == (1, 0)


def test_a_site_that_dies_for_good_misses_all_its_turns(tmp_path: Path) -> None:
    experiment = free(round_timeout=0.1)
    folder = RunFolder.create(tmp_path / "run", experiment)
    summary = run_rounds(experiment, Lagging(experiment, {2: 10**9}), folder, Silent())
    assert summary["failures"] == 4
    assert summary["failure_kinds"] == {"not asked any more": 3, "no reply in time": 1}


def test_when_the_last_living_site_dies_the_run_stops(tmp_path: Path) -> None:
    experiment = free(round_timeout=0.1)

    class Once(Lagging):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = list(super().pull_messages(message_ids))
            if replies:
                self._pulls[3] = 10**9
            return replies

    grid = Once(experiment, {0: 10**9, 1: 10**9, 2: 10**9})
    folder = RunFolder.create(tmp_path / "run", experiment)
    with pytest.raises(EmptyRound, match=r"round 2: no client has replied for 0.1 s"):
        run_rounds(experiment, grid, folder, Silent())


def test_a_reply_from_another_node_does_not_take_a_sites_turn(tmp_path: Path) -> None:
    experiment = free()

    class Forged(Lagging):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = list(super().pull_messages(message_ids))
            forged = [copy.deepcopy(reply) for reply in replies]
            for reply in forged:
                reply.metadata.__dict__["_src_node_id"] = 99
            return forged + replies

    folder = RunFolder.create(tmp_path / "run", experiment)
    summary = run_rounds(experiment, Forged(experiment, {}), folder, Silent())
    assert summary["repeated"] == 16
    assert summary["failures"] == 0
    latest = folder.latest()
    assert latest is not None
    assert (latest[1]["version"], latest[1]["turns"].tolist()) == (16, [4] * 4)


def test_a_client_that_always_raises_is_counted_every_time(tmp_path: Path) -> None:
    experiment = free()

    class Raising(Lagging):
        def _answer(self, identity: str) -> Message:
            message = self._waiting[identity]
            reply = super()._answer(identity)
            broken = message.metadata.dst_node_id == 2 and message.metadata.message_type == "train"
            return Message(Error(2, "out of memory"), reply_to=message) if broken else reply

    folder = RunFolder.create(tmp_path / "run", experiment)
    summary = run_rounds(experiment, Raising(experiment, {}), folder, Silent())
    assert summary["failure_kinds"] == {"out of memory": 4}
    assert summary["failures"] == 4


class Crash(Silent):
    """Stop after a number of pulls, wherever that is in a round."""

    def __init__(self, grid: Lagging, after: int) -> None:
        self._grid = grid
        original, left = grid.pull_messages, [after]

        def pull(message_ids: Iterable[str]) -> Iterable[Message]:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return original(message_ids)

        grid.pull_messages = pull  # type: ignore[method-assign]

    def checkpoint(self, folder: Path, done: int) -> None:
        self._grid.save(folder, done)

    def restore(self, folder: Path, done: int) -> None:
        self._grid.load(folder, done)


LAGS = {0: 5, 1: 0, 2: 2, 3: 1}


@pytest.mark.parametrize("after", [3, 8, 14, 20])
def test_a_free_running_run_resumes_and_every_site_takes_all_its_turns(tmp_path: Path, after: int) -> None:
    experiment = free()
    grid = Lagging(experiment, LAGS)
    with pytest.raises(KeyboardInterrupt):
        run_rounds(experiment, grid, RunFolder.create(tmp_path / "run", experiment), Crash(grid, after))
    grid = Lagging(experiment, LAGS)
    folder = RunFolder.open(tmp_path / "run", experiment)
    summary = run_rounds(experiment, grid, folder, Crash(grid, -1))
    latest = folder.latest()
    assert latest is not None
    assert (latest[1]["version"], latest[1]["turns"].tolist()) == (16, [4] * 4)
    assert summary["failures"] == 0


@pytest.mark.parametrize("after", [3, 14])
def test_a_private_free_running_run_is_not_resumed(tmp_path: Path, after: int) -> None:
    """After a crash its turns would be taken again from another model, with the same noise."""
    strategy = {"name": "dssgd", "exchange": "free_running", "upload_fraction": 0.1}
    experiment = small("psgd", rounds=4, strategy=strategy)
    grid = Lagging(experiment, LAGS)
    with pytest.raises(KeyboardInterrupt):
        run_rounds(experiment, grid, RunFolder.create(tmp_path / "run", experiment), Crash(grid, after))
    folder = RunFolder.open(tmp_path / "run", experiment)
    with pytest.raises(ResumeError, match="released twice and paid once; start a new run"):
        run_rounds(experiment, Lagging(experiment, LAGS), folder, Silent())
