"""Rounds over a bad network: sites that die, come back, stay away, answer twice or cannot be read."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

from fed_dp.accounting import to_json
from fed_dp.clients.app import app
from fed_dp.errors import EmptyRound, RunError
from fed_dp.experiment import Experiment, to_run_config
from fed_dp.experiment.federation import make_federation
from fed_dp.experiment.plan import release_plan
from fed_dp.experiment.start import starting_weights
from fed_dp.runs.folder import RunFolder
from fed_dp.runs.scores import EARLIER
from fed_dp.server import discovery, networked, replies, site_scores
from fed_dp.server.discovery import discover
from fed_dp.server.ledger_heads import LedgerHeads
from fed_dp.server.networked import NetworkedDriver
from fed_dp.sharing import message as names
from fed_dp.simulations.grid import InProcessGrid
from fed_dp.strategies.averaging.strategy import AveragingStrategy
from fed_dp.strategies.dssgd.strategy import DssgdStrategy
from fed_dp.strategies.failures import ABSENT, NO_REPLY, OFFLINE
from fed_dp.strategies.sites import Site
from tests.clock import HANG, Clock, Hangs, Immediate
from tests.conftest import small

CLIENTS = 4
clock = Clock()


@dataclass
class Node:
    node_id: int
    public_key: bytes
    status: str = "online"
    last_activated_at: str = "2026-01-01T00:00:00+00:00"


class Network(InProcessGrid):
    """Real clients behind a network with sites that are there or not. What client k suffers is `plan[k]`."""

    def __init__(self, experiment: Experiment, plan: dict[int, list[str]] | None = None) -> None:
        super().__init__(CLIENTS, dict(to_run_config(experiment)), app)
        self.plan = plan or {}
        self.nodes = {node: Node(node, f"key {node}".encode()) for node in self.contexts}
        self.asked: list[tuple[int, str]] = []
        self.one_at_a_time = threading.Lock()

    def get_nodes(self) -> list[Any]:
        return list(self.nodes.values())

    def get_node_ids(self) -> list[int]:
        return [node.node_id for node in self.nodes.values() if node.status == "online"]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        ids = list(super().push_messages(messages))
        self.asked += [(m.metadata.dst_node_id - 1, i) for m, i in zip(messages, ids, strict=True)]
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        with self.one_at_a_time:  # in this process, clients share a network
            return self._pull(message_ids)

    def _pull(self, message_ids: Iterable[str]) -> list[Message]:
        [identity] = message_ids
        if identity not in self._waiting:
            return []
        message = self._waiting[identity]
        client = message.metadata.dst_node_id - 1
        fault = self.plan[client].pop(0) if self.plan.get(client) else ""
        node = self.nodes[client + 1]
        if fault == "silent":
            return []
        if fault in ("dies", "crashes"):  # told by the SuperLink, or by its own SuperNode
            self._waiting.pop(identity)
            code = ErrorCode.NODE_UNAVAILABLE if fault == "dies" else ErrorCode.CLIENT_APP_CRASHED
            return [Message(Error(code, "it died"), reply_to=message)]
        if fault == "restarts":  # so quickly that nobody noticed: what it was asked is lost
            self._waiting.pop(identity)
            node.last_activated_at = clock.iso()
            return []
        if fault == "goes":
            node.status = "offline"
            return []
        if fault == "comes back":
            node.status = "online"
        if fault == "unreadable":
            self._waiting.pop(identity)
            raise ValueError("no such object type")
        if fault == "no network":
            raise type("ConnectError", (Exception,), {"__module__": "httpx"})("refused")
        return [self._answer(identity)]


@dataclass
class Setting:
    experiment: Experiment
    network: Network
    strategy: DssgdStrategy
    turns: NetworkedDriver
    done: list[int] = field(default_factory=list)

    def round(self) -> dict[tuple[int, int], str]:
        self.done.append(len(self.done) + 1)
        self.turns.round(self.done[-1])
        return {place: failure.reason for place, failure in self.strategy.stats.failed.items()}


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (networked, replies, discovery):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(replies, "ThreadPoolExecutor", Immediate)
    monkeypatch.setattr(networked, "POLL_INTERVAL", 0.0)


def setting(plan: dict[int, list[str]], *, timeout: float = 20.0, **changes: Any) -> Setting:
    experiment = small(strategy={"name": "dssgd", "exchange": "parallel"}, rounds=9, **changes)
    members = make_federation(experiment)
    network = Network(experiment, plan)
    there = [Site(k + 1, k, len(members.rows(k))) for k in range(CLIENTS)]
    assert not isinstance(experiment.strategy, str)
    strategy = DssgdStrategy(
        starting_weights(experiment, members),
        there,
        options=experiment.strategy,  # type: ignore[arg-type]
        seed=experiment.seed,
        quorum=experiment.clients.quorum,
    )
    return Setting(experiment, network, strategy, NetworkedDriver(strategy, network, timeout=timeout))


@pytest.mark.parametrize("fault", ["dies", "crashes", "restarts"])
def test_a_site_that_comes_back_is_asked_again_and_counts_once(fault: str) -> None:
    good, bad = setting({}), setting({1: [fault, fault, "silent"]})
    assert good.round() == bad.round() == {}
    assert len([client for client, _ in bad.network.asked if client == 1]) == 3
    assert bad.strategy.server.version == CLIENTS
    assert bad.strategy.server.weights.tobytes() == good.strategy.server.weights.tobytes()
    assert bad.strategy.stats.asked == CLIENTS


def test_a_late_answer_to_the_first_message_is_as_good_as_one_to_the_second() -> None:
    bad = setting({})
    network = bad.network
    first = True

    def pull(message_ids: Iterable[str]) -> list[Message]:
        nonlocal first
        [identity] = message_ids
        message = network._waiting.get(identity)
        if message is None or message.metadata.dst_node_id != 2:
            return Network.pull_messages(network, [identity])
        if first:  # the node seems to have been restarted, but had not lost the message
            first = False
            network.nodes[2].last_activated_at = clock.iso()
            return []
        copies = [i for client, i in network.asked if client == 1]
        with network.one_at_a_time:
            return [network._answer(identity)] if identity == copies[0] and len(copies) > 1 else []

    network.pull_messages = pull  # type: ignore[method-assign]
    assert bad.round() == {}
    assert bad.strategy.server.version == CLIENTS


def test_a_deadline_passes_and_the_site_is_not_waited_for_until_it_is_back() -> None:
    bad = setting({2: ["goes", *["silent"] * 10_000]}, timeout=20.0)
    assert bad.round() == {(2, 1): NO_REPLY.reason}
    asked = len(bad.network.asked)
    assert bad.round() == {(2, 2): OFFLINE.reason}  # and at once: nobody asks what cannot be answered
    assert len(bad.network.asked) == asked + CLIENTS - 1
    bad.network.nodes[3].status, bad.network.plan = "online", {}
    assert bad.round() == {}


def test_a_site_that_dies_for_good_is_told_with_its_reason() -> None:
    bad = setting({0: ["dies"]}, timeout=20.0)
    bad.network.nodes[1].status = "offline"
    assert bad.round() == {(0, 1): "it died"}


def test_a_reply_that_cannot_be_read_is_the_sites_fault_and_the_run_goes_on() -> None:
    bad = setting({3: ["unreadable"]})
    assert bad.round() == {(3, 1): "not an upload: it cannot be read (ValueError)"}
    assert bad.strategy.server.version == CLIENTS - 1


def test_a_site_that_dies_of_every_question_is_not_asked_for_ever() -> None:
    bad = setting({1: ["crashes"] * 100}, timeout=20.0)
    assert bad.round() == {(1, 1): "it died"}
    assert len([client for client, _ in bad.network.asked if client == 1]) == 1 + networked.MAX_COPIES


def test_when_the_servers_own_connection_fails_the_run_stops_to_be_resumed() -> None:
    with pytest.raises(Exception, match="refused"):
        setting({0: ["no network"]}).round()


def test_fewer_than_the_quorum_is_no_round() -> None:
    clients = {"count": CLIENTS, "quorum": 3}
    assert len(setting({0: ["unreadable"]}, clients=clients).round()) == 1
    bad = setting({0: ["unreadable"], 1: ["unreadable"]}, clients=clients)
    told = r"round 1: only 2 \(clients.quorum = 3\) of 4 clients uploaded; client 0: not an upload"
    with pytest.raises(EmptyRound, match=told):
        bad.round()


@pytest.mark.parametrize("restarted", [True, False])
def test_a_half_sent_reply_holds_nobody_back_and_its_site_is_asked_again(restarted: bool) -> None:
    bad = setting({}, timeout=2 * replies.MAX_REPLY_TIME)
    network, first, began = bad.network, threading.Event(), clock.now

    def pull(message_ids: Iterable[str]) -> list[Message]:
        [identity] = message_ids
        message = network._waiting.get(identity)
        if message is not None and message.metadata.dst_node_id == 2 and not first.is_set():
            first.set()  # as Flower does when the rest of a reply does not come
            if restarted:
                network.nodes[2].last_activated_at = clock.iso()
            raise Hangs
        return Network.pull_messages(network, [identity])

    network.pull_messages = pull  # type: ignore[method-assign]
    assert bad.round() == {}
    assert bad.strategy.server.version == CLIENTS
    assert (clock.now - began > replies.MAX_REPLY_TIME) is not restarted


def test_a_reply_that_hangs_does_so_in_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # real time, real threads
    monkeypatch.setattr(networked, "POLL_INTERVAL", 0.0)
    monkeypatch.setattr(networked, "POLL", 0.001)
    bad = setting({}, timeout=HANG)
    network, hung, release = bad.network, threading.Event(), threading.Event()

    def pull(message_ids: Iterable[str]) -> list[Message]:
        [identity] = message_ids
        message = network._waiting.get(identity)
        if message is not None and message.metadata.dst_node_id == 2 and not hung.is_set():
            hung.set()
            assert release.wait(HANG)
        elif message is not None:
            assert hung.wait(HANG)
            if message.metadata.dst_node_id == CLIENTS:
                release.set()  # so the last of the others was looked for while one hung
        return Network.pull_messages(network, [identity])

    network.pull_messages = pull  # type: ignore[method-assign]
    assert bad.round() == {}


def test_what_a_round_released_counts_though_the_round_came_to_nothing(tmp_path: Path) -> None:
    experiment = small("psgd", rounds=2, clients={"count": CLIENTS, "quorum": 3})
    folder = RunFolder.create(tmp_path / "run", experiment)
    uploads: list[int] = []
    for gone in ({1, 2}, {0}):  # two are missing, then another
        network = Network(experiment, {client: ["unreadable"] for client in gone})
        strategy = _strategy_of(experiment, folder)
        turns = NetworkedDriver(strategy, network, timeout=5)
        try:
            turns.round(1)
        except EmptyRound:
            uploads.append(strategy.stats.uploads)
    assert uploads == [2]
    on_release = [(event.client, event.round) for _, event in folder.noted()]
    assert sorted(on_release) == [(0, 1), (1, 1), (2, 1), (3, 1)]  # 3 answered twice with the same bytes


def test_a_second_release_of_the_same_turn_counts_and_the_same_one_again_does_not() -> None:
    """The mark of the site's ledger tells them apart: asked from other weights, it was charged again."""
    from tests.strategies.test_site_strategy import AGREED, SITES, asked, averaging, ones, released, upload

    strategy = averaging(plans=[AGREED] * len(SITES))
    on_release: list[tuple[str, int]] = []
    strategy.on_release = lambda mark, events: on_release.extend((mark, event.client) for event in events)
    for mark in ("1:x", "1:x", "2:y"):
        replies = []
        for question, site in zip(asked(strategy), SITES, strict=True):
            event = released(client=site.client)
            reply = upload(question, ones(), events=to_json([event]))
            reply.content.config_records[names.CONFIG][names.LEDGER_HEAD] = f"{mark}{site.client}"
            replies.append(reply)
        strategy.aggregate_train(1, replies)
    assert on_release == [(f"{mark}{client}", client) for mark in ("1:x", "2:y") for client in range(3)]


def _strategy_of(experiment: Experiment, folder: RunFolder) -> AveragingStrategy:
    members = make_federation(experiment)
    weights = starting_weights(experiment, members)
    there = [Site(k + 1, k, len(members.rows(k))) for k in range(CLIENTS)]
    plans = [release_plan(experiment, client=k, size=weights.size) for k in range(CLIENTS)]
    strategy = AveragingStrategy(weights, there, plans=plans, quorum=experiment.clients.quorum)
    strategy.on_release = folder.note
    strategy.accounted = {(event.client, event.round, mark) for mark, event in folder.noted()}
    return strategy


# --------------------------------------------------------------------------------- who is there

KEYS = {f"key {k + 1}".encode(): (k, f"site-{k}") for k in range(CLIENTS)}


def test_sites_are_known_by_their_keys_whatever_they_say() -> None:
    experiment = small()
    network = Network(experiment)
    found = discover(network, expected=CLIENTS, timeout=5, keys=KEYS)
    assert [(site.client, site.name) for site in found] == [(k, f"site-{k}") for k in range(CLIENTS)]
    swapped = {**KEYS, b"key 1": KEYS[b"key 2"], b"key 2": KEYS[b"key 1"]}
    with pytest.raises(RunError, match=r"the site with the key of site-1 says it is client 0, not 1"):
        discover(network, expected=CLIENTS, timeout=0.1, keys=swapped)
    some = discover(network, expected=CLIENTS, timeout=0.1, quorum=2, keys=swapped)
    assert [site.node for site in some] == [0, 0, 3, 4]
    with pytest.raises(RunError, match="nobody"):
        discover(network, expected=CLIENTS, timeout=0.1, keys={})


def test_a_site_that_cannot_describe_itself_or_its_scores_holds_nobody_back() -> None:
    experiment = small()
    network = Network(experiment, {2: ["unreadable"]})
    found = discover(network, expected=CLIENTS, timeout=0.1, quorum=3, keys=KEYS)
    assert [site.node for site in found] == [1, 2, 0, 4]
    bad = setting({0: ["unreadable"], 1: ["silent"] * 10_000})
    bad.strategy.sites = tuple(Site(k + 1, k, 9, scores=True) for k in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site_scores, "TIMEOUT", 0.1)
        assert site_scores.scores_of_sites(bad.network, bad.strategy, EARLIER) == {}


def test_a_question_that_is_lost_where_a_site_was_restarted_is_asked_again() -> None:
    """A run that went on after its server was killed waited ten minutes for one site to say who it is."""
    network = Network(small(), {1: ["restarts"], 2: ["restarts", "restarts"]})
    began = clock.now
    found = discover(network, expected=CLIENTS, timeout=600, keys=KEYS)
    assert [site.node for site in found] == [1, 2, 3, 4]
    assert clock.now - began < 3 * replies.RESEND_AFTER
    assert [client for client, _ in network.asked].count(2) == 3
    gone = Network(small(), {1: ["restarts"] * 99})
    found = discover(gone, expected=CLIENTS, timeout=600, quorum=3, keys=KEYS)
    assert [site.node for site in found] == [1, 0, 3, 4]
    assert [client for client, _ in gone.asked].count(1) == 1 + replies.MAX_RESENDS


def test_the_mark_of_a_site_is_under_its_own_name_whatever_ledger_it_says_it_has(tmp_path: Path) -> None:
    ledger_heads = LedgerHeads(tmp_path)
    honest = Site(1, 0, 9, ledger="one", name="a")
    liar = Site(2, 1, 9, ledger="one", name="b")
    ledger_heads.keep([honest, liar], ["5:x", "99:y"])
    assert LedgerHeads(tmp_path).of([honest, liar], ["", ""]) == ["5:x", "99:y"]


def test_an_absent_site_is_counted_and_holds_nobody_back() -> None:
    bad = setting({})
    bad.strategy.sites = (Site(0, 0, 0), *bad.strategy.sites[1:])
    assert bad.round() == {(0, 1): ABSENT.reason}
    assert bad.strategy.server.version == CLIENTS - 1
    network = Network(small())
    network.nodes[4].status = "offline"
    with pytest.raises(RunError, match=r"3 of 4 nodes are there after 0.1 s: not starting"):
        discover(network, expected=CLIENTS, timeout=0.1, keys=KEYS)
    found = discover(network, expected=CLIENTS, timeout=0.1, quorum=3, keys=KEYS)
    assert [site.node for site in found] == [1, 2, 3, 0]
    assert found[3].name == "site-3"


def test_where_one_keeps_its_number_of_records_all_weigh_the_same() -> None:
    from tests.strategies.test_site_strategy import SITES, SIZE, asked, ones, upload

    hidden = [Site(site.node, site.client, 0 if site.client == 1 else site.records) for site in SITES]
    strategy = AveragingStrategy(np.zeros(SIZE, np.float32), hidden)
    replies = [
        upload(question, ones(k), records=hidden[k].records) for k, question in enumerate(asked(strategy))
    ]
    replies[1].content.metric_records["metrics"]["records"] = 0
    strategy.aggregate_train(1, replies)
    assert strategy.weights.tolist() == pytest.approx([1.0] * SIZE)
