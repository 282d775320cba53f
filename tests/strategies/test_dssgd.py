"""Whole federated runs of DSSGD against figures 3 and 4 written out, exactly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fed_dp import seeds
from fed_dp.clients.building import make_trainer
from fed_dp.clients.trainer import ClientData as Records
from fed_dp.clients.trainer import State
from fed_dp.errors import ResumeError, RunError
from fed_dp.experiment import Experiment
from fed_dp.experiment.federation import make_federation
from fed_dp.models import initial_weights
from fed_dp.runs.folder import RunFolder
from fed_dp.server.observers import Silent
from fed_dp.sharing.exchange import order
from fed_dp.sharing.update import SparseUpdate
from fed_dp.simulations.grid import identify
from fed_dp.simulations.runner import simulate
from fed_dp.strategies.dssgd import Dssgd as Options
from fed_dp.strategies.dssgd.strategy import DssgdStrategy
from tests.conftest import small
from tests.sharing import reference
from tests.strategies.test_site_strategy import SITES, SIZE, asked, downloaded, ones, stamped, upload


@pytest.fixture(autouse=True)
def _identity() -> None:
    identify()


# ------------------------------------------------------------------- the reference, a whole run


def literal(experiment: Experiment, faults: dict[tuple[int, int], str] | None = None) -> reference.Server:
    """Run the experiment as the paper writes it, with the random choices of the fast path.

    `faults[i, round]` says what goes wrong: a participant "dies" before it has trained, or what it
    uploads "is lost" afterwards.
    """
    faults = faults or {}
    options, seed = experiment.strategy, experiment.seed
    assert isinstance(options, Options)
    members = make_federation(experiment)
    data = members.dataset
    trainer, net = make_trainer(experiment, data)
    start = list(initial_weights(net.spec, seed=seed))
    everybody = range(experiment.clients.count)
    server = reference.Server(start)
    participants = [reference.Participant(start) for _ in everybody]
    states: list[State] = [{} for _ in everybody]

    def turn(number: int, i: int, source: reference.Server) -> reference.Selected:
        if faults.get((i, number)) == "dies":
            return []
        keys = seeds.generator(seed, "download", number, i).random(len(start))
        participants[i].replace(source.download(options.download_share(i), list(keys)))
        old = np.array(participants[i].w, np.float32)
        fit = trainer.fit(old, Records(*members.client(i), i, number, seed), states[i])
        states[i] = fit.state
        participants[i].move(list(fit.change))
        if faults.get((i, number)) == "is lost":
            return []
        theta = options.upload_share(i)
        if options.selection == "largest_values":
            return reference.largest_values(list(fit.change), theta, options.bound)
        keys = seeds.generator(seed, "selection", number, i).random(len(start))
        return reference.random_with_threshold(
            list(fit.change), theta, options.threshold, list(keys), options.bound
        )

    for number in range(1, experiment.rounds + 1):
        rng = seeds.generator(seed, "exchange", number)
        previous = reference.Server(server.w)
        previous.stat = list(server.stat)
        if options.exchange == "parallel":
            for selected in [turn(number, i, server) for i in everybody]:
                server.upload(selected)
        else:
            who = list(everybody)
            outdated = [False] * len(who)
            if options.exchange != "round_robin":
                who = [int(i) for i in rng.permutation(len(who))]
            if options.exchange == "asynchronous":
                outdated = list(rng.random(len(who)) < options.outdated)
            for i, late in zip(who, outdated, strict=True):
                server.upload(turn(number, i, previous if late else server))
        server.decay(options.decay)
    return server


THETA = st.sampled_from([0.01, 0.1, 0.5, 1.0])
PER_CLIENT = st.one_of(THETA, st.tuples(THETA, THETA, THETA))


@settings(max_examples=25, deadline=None)
@given(
    exchange=st.sampled_from(["parallel", "round_robin", "random_order", "asynchronous"]),
    up=PER_CLIENT,
    down=PER_CLIENT,
    selection=st.sampled_from(["largest_values", "random_with_threshold"]),
    bound=st.sampled_from([None, 0.01]),
    decay=st.sampled_from([0.8, 1.0]),
    trainer=st.sampled_from(["sgd", "psgd"]),
    seed=st.integers(0, 2**20),
)
def test_a_run_equals_figures_3_and_4_written_out(
    tmp_path_factory: pytest.TempPathFactory,
    exchange: str,
    up: Any,
    down: Any,
    selection: str,
    bound: float | None,
    decay: float,
    trainer: str,
    seed: int,
) -> None:
    strategy = {
        "name": "dssgd",
        "exchange": exchange,
        "upload_fraction": up,
        "download_fraction": down,
        "selection": selection,
        "decay": decay,
        **({"bound": bound} if bound else {}),
    }
    experiment = small(trainer, seed=seed, rounds=2, clients={"count": 3}, strategy=strategy)
    path, _ = simulate(
        experiment, observer=Silent(), engine="in-process", root=tmp_path_factory.mktemp("runs")
    )
    latest = RunFolder(path).latest()
    assert latest is not None
    slow = literal(experiment)
    assert latest[1]["weights"].tobytes() == np.array(slow.w, np.float32).tobytes()
    assert latest[1]["stat"].tobytes() == np.array(slow.stat, np.float32).tobytes()


# --------------------------------------------------------------------------------- the server


def dssgd(size: int = SIZE, **options: Any) -> DssgdStrategy:
    settings_ = Options(name="dssgd", **{"upload_fraction": 0.5, "exchange": "parallel", **options})
    return DssgdStrategy(np.zeros(size, np.float32), SITES, options=settings_)


def part(*indices: int, value: float = 1.0) -> SparseUpdate:
    return SparseUpdate(np.array(indices), np.full(len(indices), value, np.float32), SIZE)


def test_the_server_adds_and_never_averages() -> None:
    strategy = dssgd(decay=1.0)
    questions = asked(strategy)
    strategy.aggregate_train(
        1, [upload(q, part(*where)) for q, where in zip(questions, ((0, 1), (1,), (1, 3)), strict=True)]
    )
    assert strategy.weights.tolist() == [1, 3, 0, 1]
    assert strategy.server.stat.tolist() == [1, 3, 0, 1]
    assert strategy.server.version == 3
    assert strategy.stats.staleness == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "options", "says"),
    [
        (part(0, 1, 2), {}, "too many: 3 coordinates, at most 2"),
        (ones(), {}, "too many: 4 coordinates, at most 2"),
        (part(0, value=0.2), {"bound": 0.1}, r"values: 0.2.* within ±0.1"),
        (SparseUpdate(np.array([4]), np.ones(1, np.float32), 5), {}, "size: expected 4 parameters, found 5"),
        (b"", {}, "truncated"),
        (bytes(12), {}, "not an update"),
    ],
)
def test_garbage_is_refused_by_name_and_leaves_the_state_untouched(
    change: Any, options: dict[str, Any], says: str
) -> None:
    good, with_bad = dssgd(**options), dssgd(**options)
    for strategy, bad in ((good, False), (with_bad, True)):
        questions = asked(strategy)
        replies = [upload(q, part(1, value=0.05)) for q in questions[:2]]
        strategy.aggregate_train(1, replies + ([upload(questions[2], change)] if bad else []))
    for key, value in good.state().items():
        assert value.tobytes() == with_bad.state()[key].tobytes()
    assert re.search(says, with_bad.stats.failed[2, 1].reason)


def test_a_download_holds_the_most_updated_parameters() -> None:
    strategy = dssgd(download_fraction=[0.25, 0.5, 1.0], decay=1.0)
    questions = asked(strategy)
    where = ((1, 2), (1, 2), (2, 3))
    strategy.aggregate_train(1, [upload(q, part(*w)) for q, w in zip(questions, where, strict=True)])
    first, second, third = (downloaded(question) for question in asked(strategy, 2))
    assert first.indices is not None
    assert second.indices is not None
    assert (first.indices.tolist(), first.values.tolist()) == ([2], [3.0])
    assert (second.indices.tolist(), second.values.tolist()) == ([1, 2], [2.0, 3.0])
    assert third.indices is None
    assert third.values.tolist() == strategy.weights.tolist()


def test_in_turn_each_site_sees_what_the_one_before_uploaded() -> None:
    for exchange in ("round_robin", "random_order"):
        strategy = dssgd(exchange=exchange)
        strategy.begin(1)
        seen = []
        for wave in strategy.waves(1):
            [question] = stamped(strategy.ask(1, wave))
            seen.append(downloaded(question).values[0])
            strategy.receive([upload(question, part(0))])
            strategy.abandon()
        assert seen == [0, 1, 2]
        assert strategy.stats.staleness == [0, 0, 0]


def test_an_outdated_site_downloads_last_rounds_state() -> None:
    strategy = dssgd(exchange="asynchronous", outdated=1.0)
    for turn in (1, 2):
        strategy.begin(turn)
        for wave in strategy.waves(turn):
            [question] = stamped(strategy.ask(turn, wave))
            assert downloaded(question).values[0] == 3 * (turn - 1)
            strategy.receive([upload(question, part(0))])
            strategy.abandon()
        strategy.finish(turn)
        assert strategy.stats.staleness == [0, 1, 2]


def test_a_model_that_leaves_the_bounds_stops_the_run_with_advice() -> None:
    strategy = dssgd()
    questions = asked(strategy)
    strategy.aggregate_train(1, [upload(q, part(0, value=900)) for q in questions])
    with pytest.raises(RunError, match=r"diverges.*2700.*learning_rate.*round_robin"):
        asked(strategy, 2)


def test_its_state_survives_a_checkpoint() -> None:
    strategy = dssgd(download_fraction=0.5)
    strategy.aggregate_train(1, [upload(q, part(0, 2)) for q in asked(strategy)])
    again = dssgd(download_fraction=0.5)
    again.restore({key: value.copy() for key, value in strategy.state().items()})
    sent = [[m.content.array_records for m in asked(s, 2)] for s in (strategy, again)]
    assert sent[0] == sent[1]
    with pytest.raises(ResumeError, match="no stat, turns, version"):
        again.restore({"weights": strategy.weights})


def test_orders_are_what_they_are_called() -> None:
    rng = np.random.default_rng(0)
    clients = list(range(20))
    assert order("parallel", clients, rng=rng).waves == (tuple(clients),)
    assert order("round_robin", clients, rng=rng).waves == tuple((c,) for c in clients)
    shuffled = [order("random_order", clients, rng=rng) for _ in range(2)]
    assert shuffled[0] != shuffled[1]
    for found in shuffled:
        assert sorted(c for (c,) in found.waves) == clients
        assert not found.outdated
    late = sum(len(order("asynchronous", clients, rng=rng, outdated=0.5).outdated) for _ in range(100))
    assert abs(late - 1000) < 5 * np.sqrt(2000 * 0.25)
    with pytest.raises(ValueError, match="no order"):
        order("free_running", clients, rng=rng)


def test_the_summary_tells_bytes_against_dense_and_against_the_bound(tmp_path: Path) -> None:
    experiment = small(strategy={"name": "dssgd", "upload_fraction": 0.1, "download_fraction": 0.1})
    path, summary = simulate(experiment, observer=Silent(), engine="in-process", root=tmp_path)
    sent = summary["bytes"]
    for way in ("uploaded", "downloaded"):
        assert sent[f"bound_{way}"] <= sent[way] <= 1.05 * sent[f"bound_{way}"]
        assert sent[way] < 0.13 * sent["dense"]
    assert summary["staleness"] == {"mean": 0, "max": 0}
    line = RunFolder(path).lines()[0]
    assert line["bytes"]["uploaded"] * 2 == pytest.approx(sent["uploaded"], rel=0.02)
