from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from fed_dp.accounting import Event, Gaussian, SampledGaussian, to_json
from fed_dp.errors import EmptyRound, RunError
from fed_dp.experiment.plan import ReleasePlan
from fed_dp.models import Evaluator
from fed_dp.server.discovery import discover
from fed_dp.sharing import message as names
from fed_dp.sharing.codec import decode, encode
from fed_dp.sharing.update import SparseUpdate
from fed_dp.simulations.grid import SimulationGrid, identify
from fed_dp.strategies.averaging.strategy import AveragingStrategy
from fed_dp.strategies.baselines.strategy import CentralisedStrategy, StandaloneStrategy
from fed_dp.strategies.failures import NO_REPLY, Failure
from fed_dp.strategies.site_strategy import SiteStrategy
from fed_dp.strategies.sites import Site
from tests.networks import network

SIZE = 4
SITES = [Site(node=10 + k, client=k, records=10 * (k + 1)) for k in range(3)]


AGREED = ReleasePlan(SampledGaussian(1.0, 0.1, 10), "psgd", "simulation")


def released(*, client: int, turn: int = 1, release: SampledGaussian | None = None) -> Event:
    return Event(release or AGREED.release, "psgd", turn, client, "simulation")


@pytest.fixture(autouse=True)
def _identity() -> None:
    identify()


def stamped(messages: Iterable[Message]) -> list[Message]:
    """Give the messages ids, as a grid does."""
    messages = list(messages)
    for message in messages:
        message.metadata.__dict__["_message_id"] = str(uuid4())
    return messages


def asked(strategy: SiteStrategy, turn: int = 1) -> list[Message]:
    grid: Any = None  # our strategies know their sites; they do not ask the grid
    return stamped(strategy.configure_train(turn, ArrayRecord(), ConfigRecord(), grid))


def on_wire(change: np.ndarray | bytes | SparseUpdate) -> bytes:
    if isinstance(change, SparseUpdate):
        return encode(change)
    if isinstance(change, bytes):
        return change
    zeros = encode(SparseUpdate.dense(np.zeros(change.size, np.float32)))
    return zeros[: -4 * change.size] + change.astype("<f4").tobytes()  # whatever the values


def upload(
    question: Message,
    change: np.ndarray | bytes | SparseUpdate,
    *,
    records: Any = None,
    events: str = "[]",
    turn: Any = None,
) -> Message:
    site = next(s for s in SITES if s.node == question.metadata.dst_node_id)
    data = on_wire(change)
    asked_for = question.content.config_records[names.CONFIG][names.ROUND]
    content = RecordDict(
        {
            names.ARRAYS: ArrayRecord({names.CHANGE: Array("uint8", (len(data),), names.WIRE, data)}),
            names.METRICS: MetricRecord({names.RECORDS: site.records if records is None else records}),
            names.CONFIG: ConfigRecord({names.EVENTS: events, names.ROUND: turn or asked_for}),
        }
    )
    return Message(content, reply_to=question)


def downloaded(question: Message, size: int = SIZE) -> SparseUpdate:
    return decode(question.content.array_records[names.ARRAYS][names.WEIGHTS].data, size=size, most=size)


def ones(factor: float = 1.0) -> np.ndarray:
    return np.full(SIZE, factor, np.float32)


def some(count: int) -> SparseUpdate:
    return SparseUpdate(np.arange(count), np.ones(count, np.float32), SIZE)


def averaging(**options: Any) -> AveragingStrategy:
    return AveragingStrategy(np.zeros(SIZE, np.float32), SITES, **options)


def test_averaging_weighs_changes_by_records() -> None:
    strategy = averaging()
    questions = asked(strategy)
    strategy.aggregate_train(1, [upload(q, ones(k)) for k, q in enumerate(questions)])
    assert strategy.weights.tolist() == pytest.approx([(0 * 10 + 1 * 20 + 2 * 30) / 60] * SIZE)
    assert strategy.weights.dtype == np.float32


def test_the_result_does_not_depend_on_the_order_of_replies() -> None:
    rng = np.random.default_rng(0)
    changes = [rng.normal(size=SIZE).astype(np.float32) for _ in SITES]
    results = []
    for order in ([0, 1, 2], [2, 0, 1]):
        strategy = averaging()
        questions = asked(strategy)
        strategy.aggregate_train(1, [upload(questions[k], changes[k]) for k in order])
        results.append(strategy.weights.tobytes())
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("change", "options", "says"),
    [
        (np.array([0, np.nan, 0, 0], np.float32), {}, "nan at position 1"),
        (np.array([0, np.inf, 0, 0], np.float32), {}, "inf at position 1"),
        (np.zeros(5, np.float32), {}, "size: expected 4 parameters, found 5"),
        (b"\x93NUMPY...........", {}, "not an update"),
        *((some(k), {}, f"too few: {k} coordinates, all 4 are expected") for k in (0, 1, 2)),
        (ones(), {"turn": 9}, "round = 9: the site was asked for round 1"),
        (ones(), {"records": 10**9}, "announced 30"),
        (ones(), {"records": -30}, "announced 30"),
        (ones(), {"events": "junk"}, "events are malformed"),
        (ones(), {"events": to_json([released(client=2)])}, "another has none"),
        (np.full(SIZE, 3e38, np.float32), {}, "within"),
    ],
)
def test_a_bad_upload_is_refused_by_name_and_changes_nothing(
    change: np.ndarray | bytes, options: dict[str, Any], says: str
) -> None:
    good, with_bad = averaging(), averaging()
    questions = asked(good)
    good.aggregate_train(1, [upload(q, ones()) for q in questions[:2]])
    questions = asked(with_bad)
    replies = [upload(q, ones()) for q in questions[:2]] + [upload(questions[2], change, **options)]
    with_bad.aggregate_train(1, replies)
    assert with_bad.weights.tobytes() == good.weights.tobytes()
    assert says in with_bad.stats.failed[2, 1].reason
    assert with_bad.stats.uploads == 2


def test_missing_records_truncated_arrays_errors_strangers_and_silence_are_counted() -> None:
    strategy = averaging()
    questions = asked(strategy)
    empty = Message(RecordDict(), reply_to=questions[0])
    broken = upload(questions[1], on_wire(ones())[:-3])
    failed = Message(Error(2, "it hurts"), reply_to=questions[2])
    with pytest.raises(EmptyRound, match=r"round 1: none of 3 clients uploaded; client 0: not an upload"):
        strategy.aggregate_train(1, [empty, broken, failed])
    assert "truncated" in strategy.stats.failed[1, 1].reason
    assert strategy.stats.failed[2, 1].reason == "it hurts"
    questions = asked(strategy, 2)
    foreign = upload(questions[0], ones())
    foreign.metadata.__dict__["_src_node_id"] = 99
    strategy.aggregate_train(2, [upload(questions[0], ones()), foreign])
    assert strategy.stats.failed == {(1, 2): NO_REPLY, (2, 2): NO_REPLY}
    assert strategy.stats.repeated == 1


def test_an_error_about_a_dead_node_is_told_of_the_client_that_was_asked() -> None:
    strategy = averaging()
    questions = asked(strategy)
    about = Message(Error(5, "node unavailable"), reply_to=questions[1])
    about.metadata.__dict__["_src_node_id"] = 1  # it comes from the SuperLink
    strategy.aggregate_train(1, [upload(questions[0], ones()), about, upload(questions[2], ones())])
    assert strategy.stats.failed == {(1, 1): Failure("Error", "node unavailable")}


def private(events: list[Event], change: np.ndarray | None = None) -> AveragingStrategy:
    """A private round in which client 1 sends these events; the others send what they should."""
    strategy = averaging(plans=[AGREED] * len(SITES))
    replies = []
    for question, site in zip(asked(strategy), SITES, strict=True):
        one = site.client == 1
        sent = events if one else [released(client=site.client)]
        replies.append(
            upload(question, change if one and change is not None else ones(), events=to_json(sent))
        )
    strategy.aggregate_train(1, replies)
    return strategy


@pytest.mark.parametrize(
    ("client", "turn", "says"),
    [
        (None, 1, "0 events: a private upload has one"),
        (2, 1, "an event of client 2, round 1 in the upload of client 1"),
        (1, 7, "round 7 in the upload of client 1, round 1"),
    ],
)
def test_a_private_site_cannot_hide_or_shift_what_it_spent(client: int | None, turn: int, says: str) -> None:
    strategy = private([] if client is None else [released(client=client, turn=turn)])
    assert says in strategy.stats.failed[1, 1].reason
    assert sorted(event.client for event in strategy.stats.events) == [0, 2]


@pytest.mark.parametrize(
    "release",
    [SampledGaussian(1e6, 0.1, 10), SampledGaussian(0.25, 1.0, 10**6), SampledGaussian(1.0, 0.1, 9)],
)
def test_a_site_cannot_claim_another_release_than_was_agreed(release: SampledGaussian) -> None:
    strategy = private([released(client=1, release=release)])
    assert "planned was SampledGaussian(noise_multiplier=1.0" in strategy.stats.failed[1, 1].reason
    strategy = private([released(client=1)] * 1000)
    assert "1000 events: a private upload has one" in strategy.stats.failed[1, 1].reason


def test_what_a_refused_upload_released_is_booked_all_the_same() -> None:
    strategy = private([released(client=1)], change=np.full(SIZE, np.nan, np.float32))
    assert strategy.stats.uploads == 2
    assert sorted(event.client for event in strategy.stats.events) == [0, 1, 2]


def test_a_repeated_upload_is_not_counted_twice() -> None:
    once, twice = averaging(), averaging()
    for strategy, copies in ((once, 1), (twice, 3)):
        questions = asked(strategy)
        replies = [upload(questions[0], ones(5))] * copies + [upload(q, ones()) for q in questions[1:]]
        strategy.aggregate_train(1, replies)
    assert once.weights.tobytes() == twice.weights.tobytes()
    assert twice.stats.uploads == 3
    assert (once.stats.repeated, twice.stats.repeated) == (0, 2)


def test_an_upload_of_an_earlier_round_is_not_counted_again() -> None:
    strategy = averaging()
    first = [upload(question, ones()) for question in asked(strategy)]
    strategy.aggregate_train(1, first)
    before = strategy.weights.copy()
    questions = asked(strategy, 2)
    copied = Message(first[0].content, reply_to=questions[0])  # old content in a new envelope
    strategy.aggregate_train(2, [first[1], copied, upload(questions[2], ones(0))])
    assert strategy.weights.tobytes() == before.tobytes()
    assert strategy.stats.repeated == 1
    assert strategy.stats.failed == {
        (0, 2): Failure("UploadRefused", "round = 1: the site was asked for round 2"),
        (1, 2): NO_REPLY,
    }


def test_a_round_without_uploads_is_an_error() -> None:
    strategy = averaging()
    asked(strategy)
    with pytest.raises(EmptyRound, match="none of 3"):
        strategy.aggregate_train(1, [])
    assert not strategy.weights.any()


def test_a_fraction_of_the_clients_is_drawn_anew_each_round_and_reproducibly() -> None:
    sites = [Site(k, k, 1) for k in range(20)]
    one, same = (AveragingStrategy(np.zeros(1, np.float32), sites, fraction=0.3, seed=5) for _ in range(2))
    rounds = [one.sample_clients(turn) for turn in range(1, 6)]
    assert rounds == [same.sample_clients(turn) for turn in range(1, 6)]
    assert all(len(set(r)) == 6 and list(r) == sorted(r, key=lambda s: s.client) for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1


def test_standalone_sites_keep_to_themselves() -> None:
    strategy = StandaloneStrategy(np.zeros(SIZE, np.float32), SITES)
    for turn in (1, 2):
        questions = asked(strategy, turn)
        strategy.aggregate_train(turn, [upload(q, ones(k)) for k, q in enumerate(questions)])
    assert strategy.own.tolist() == [[2.0 * k] * SIZE for k in range(3)]
    assert downloaded(asked(strategy, 3)[2]).values.tolist() == [4.0] * SIZE
    assert strategy.stats.bytes_downloaded == 0  # nothing is shared
    again = StandaloneStrategy(np.zeros(SIZE, np.float32), SITES)
    again.restore(strategy.state())
    assert again.own.tolist() == strategy.own.tolist()
    x = np.array([[1.0]], np.float32)
    evaluator = Evaluator(network("linear", (1,), 2), x, np.array([1]))
    strategy.own = np.array([[-1, 1, 0, 0], [1, -1, 0, 0], [-1, 1, 0, 0]], np.float32)
    assert strategy.scores(evaluator)["accuracy"] == pytest.approx(2 / 3)


def test_bytes_are_those_on_the_wire() -> None:
    for kind, counts in ((AveragingStrategy, True), (CentralisedStrategy, False)):
        strategy = kind(np.zeros(1000, np.float32), SITES)
        questions = asked(strategy)
        strategy.aggregate_train(1, [upload(q, np.ones(1000, np.float32)) for q in questions])
        for sent in (strategy.stats.bytes_uploaded, strategy.stats.bytes_downloaded):
            assert (3 * 4000 < sent < 3 * 4200) if counts else sent == 0


class Scripted(SimulationGrid):
    """A grid whose nodes answer as told."""

    def __init__(self, answers: list[Any]) -> None:
        super().__init__(len(answers), {})
        self._answers = answers

    def push_messages(self, messages: Any) -> Any:
        raise NotImplementedError

    def pull_messages(self, message_ids: Any) -> Any:
        raise NotImplementedError

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        replies = []
        for question, answer in zip(messages, self._answers, strict=True):
            if isinstance(answer, str):
                replies.append(Message(Error(2, answer), reply_to=question))
            elif answer is not None:
                metrics = MetricRecord({names.PARTITION: answer[0], names.RECORDS: answer[1]})
                replies.append(Message(RecordDict({names.METRICS: metrics}), reply_to=question))
        return replies


def test_sites_are_sorted_by_client_whatever_their_node_ids() -> None:
    sites = discover(Scripted([(2, 5), (0, 6), (1, 7)]), expected=3, timeout=1)
    assert sites == (Site(2, 0, 6), Site(3, 1, 7), Site(1, 2, 5))


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([(0, 1), (0, 1)], "client 0, expected 0..1, each once"),
        ([(0, 1), (7, 1)], "client 7"),
        ([(0, 1), (1, 0)], "holds 0 records"),
        ([(0, 1), "no data here"], "1 of 2 clients are ready: no data here"),
        ([(0, 1), None], "no answer in time"),
        ([(0, 1)], r"1 of 2 nodes are there after 0\.3 s"),
    ],
)
def test_a_federation_that_is_not_whole_does_not_start(answers: list[Any], says: str) -> None:
    with pytest.raises(RunError, match=says):
        discover(Scripted(answers), expected=2, timeout=0.3)


STAGES = (Gaussian(9.0), Gaussian(3.0))
STAGED = ReleasePlan(STAGES[1], "statistics", "simulation", STAGES)


def told(*rounds: int, client: int = 1, release: Gaussian | None = None) -> str:
    """The events of a site that released its stages in these rounds."""
    return to_json(
        Event(release or STAGES[min(turn, 2) - 1], "statistics", turn, client, "simulation")
        for turn in rounds
    )


@pytest.mark.parametrize(
    ("turn", "events", "why"),
    [
        (3, told(), "no event of stage 2"),
        (3, told(1), "no event of stage 2"),
        (2, told(1, 3), "events of rounds [1, 3], asked in round 2"),
        (3, told(2, 2), "events of rounds [2, 2], asked in round 3"),
        (3, told(1, 2, client=0), "an event of client 0"),
        (3, told(1, 2, release=Gaussian(3.0)), "planned was Gaussian(noise_multiplier=9.0)"),
        (1, told(1, release=Gaussian(90.0)), "planned was Gaussian(noise_multiplier=9.0)"),
    ],
)
def test_an_upload_that_rests_on_a_stage_that_was_not_told_is_refused(
    turn: int, events: str, why: str
) -> None:
    strategy = averaging(plans=[STAGED] * 3)
    replies = []
    for question, site in zip(asked(strategy, turn), SITES, strict=True):
        sent = events if site.client == 1 else told(*range(1, turn + 1)[:2], client=site.client)
        replies.append(upload(question, ones(), events=sent))
    strategy.aggregate_train(turn, replies)
    assert why in strategy.stats.failed[1, turn].reason
    assert strategy.stats.uploads == 2


def test_what_is_told_again_is_booked_once_and_what_was_lost_is_booked_late() -> None:
    strategy = averaging(plans=[STAGED] * 3)
    accounted = []
    for turn, rounds in ((1, [1]), (2, [1, 2]), (3, [1, 2])):
        questions = asked(strategy, turn)
        there = [q for q, site in zip(questions, SITES, strict=True) if (site.client, turn) != (1, 2)]
        replies = []
        for question in there:
            client = next(s.client for s in SITES if s.node == question.metadata.dst_node_id)
            replies.append(upload(question, ones(), events=told(*rounds, client=client)))
        strategy.aggregate_train(turn, replies)
        accounted.append(sorted((event.client, event.round) for event in strategy.stats.events))
    assert accounted == [[(0, 1), (1, 1), (2, 1)], [(0, 2), (2, 2)], [(1, 2)]]
