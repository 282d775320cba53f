"""Several clients trained at once: the same as one after the other, in the trainers and in the ClientApp."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fed_dp.accounting import SampledGaussian
from fed_dp.clients.app import app
from fed_dp.clients.ledger_session import VirtualLedgerSession
from fed_dp.clients.psgd import Psgd
from fed_dp.clients.psgd.trainer import PsgdTrainer
from fed_dp.clients.sgd import Sgd
from fed_dp.clients.sgd.trainer import SgdTrainer
from fed_dp.clients.trainer import ClientBatchTrainer, ClientData, Fit, FitRequest
from fed_dp.errors import BudgetExceeded, ConfigError
from fed_dp.experiment import Experiment, to_run_config
from fed_dp.experiment.federation import make_federation
from fed_dp.models import FlatNetwork, initial_weights, use_one_thread
from fed_dp.models.client_batches import best_batch
from fed_dp.models.perceptrons import Chain
from fed_dp.runs.folder import RunFolder
from fed_dp.server.observers import Silent
from fed_dp.sharing import message as names
from fed_dp.simulations.grid import InProcessGrid, client_batches
from fed_dp.simulations.runner import simulate
from fed_dp.strategies.failures import failure_of
from fed_dp.strategies.site_strategy import record
from tests.conftest import private_selection, small, some
from tests.networks import network

SHAPE = (1, 8, 8)
ALL_OPTIONS = {"momentum": 0.5, "weight_decay": 0.1, "local_epochs": 2}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    use_one_thread()  # as every client does; two would divide sums between them in other ways


def tasks(
    net: FlatNetwork,
    seed: int,
    records: Sequence[int] = (40, 33, 7, 33, 1),
    shape: tuple[int, ...] = SHAPE,
    classes: int = 10,
) -> list[FitRequest]:
    """Return clients with different weights, numbers of records and past steps."""
    rng = np.random.default_rng(seed)
    found = []
    for client, count in enumerate(records):
        x = rng.normal(size=(count, *shape)).astype(np.float32)
        start = initial_weights(net.spec, seed=seed)
        weights = start + rng.normal(scale=0.01, size=net.size).astype(np.float32)
        site = ClientData(x, rng.integers(0, classes, count), client, 2, seed)
        found.append(FitRequest(weights, site, {"steps": [float(3 * client)]}))
    return found


def alone(trainer: SgdTrainer | PsgdTrainer, given: Sequence[FitRequest]) -> list[Fit]:
    return [trainer.fit(task.weights, task.data, task.state) for task in given]


def same(ours: Sequence[Fit], theirs: Sequence[Fit], within: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert np.allclose(one.change, other.change, rtol=0, atol=within)
        assert np.abs(other.change).max() > 1e3 * within
        assert one.metrics == pytest.approx(other.metrics, rel=1e-4)
        assert one.state == other.state


# ------------------------------------------------------------------------------------ trainers


@pytest.mark.parametrize("seed", some([1, 2, 3], [1]))
@pytest.mark.parametrize("model", ["linear", "small-mlp", "dssgd-mlp", "small-cnn", "patch-cnn"])
@pytest.mark.parametrize(
    "options",
    some([{}, {"momentum": 0.5}, {"weight_decay": 0.1}, ALL_OPTIONS], [{}, ALL_OPTIONS]),
)
def test_sgd_together_equals_the_loop(options: dict[str, Any], model: str, seed: int) -> None:
    config = Sgd(learning_rate=0.1, batch_size=9, learning_rate_decay=0.1, **options)
    net = FlatNetwork(network(model, SHAPE, 10))
    given = tasks(net, seed)
    loop, together = SgdTrainer(config, net, clients_at_once=1), SgdTrainer(config, net, clients_at_once=8)
    same(together.fit_batch(given), alone(loop, given), within=2e-6)


@pytest.mark.parametrize("seed", some([1, 2, 3], [1]))
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("model", ["linear", "small-mlp", "dssgd-mlp"])
def test_psgd_batch_equals_opacus(model: str, momentum: float, seed: int) -> None:
    settings = {"learning_rate": 0.1, "sample_rate": 0.2, "momentum": momentum, "local_epochs": 2}
    net = FlatNetwork(network(model, SHAPE, 10))
    given = tasks(net, seed)
    fits = []
    for gradients in ("hooks", "auto"):
        config = Psgd(name="psgd", gradients=gradients, **settings)  # type: ignore[arg-type]
        release = SampledGaussian(1.1, config.sample_rate, config.steps_per_round)
        trainer = PsgdTrainer(config, net, release=release)
        fits.append(alone(trainer, given) if gradients == "hooks" else trainer.fit_batch(given))
    same(fits[1], fits[0], within=2e-5)


@pytest.mark.parametrize("seed", some([1, 2, 3], [1]))
@pytest.mark.parametrize("model", ["small-cnn", "patch-cnn", "small-mlp"])
def test_gradients_by_vmap_equal_those_of_hooks(model: str, seed: int) -> None:
    net = FlatNetwork(network(model, SHAPE, 10))
    given = tasks(net, seed)
    fits = []
    for gradients in ("hooks", "vmap"):
        config = Psgd(name="psgd", gradients=gradients, sample_rate=0.2)  # type: ignore[arg-type]
        release = SampledGaussian(1.1, config.sample_rate, config.steps_per_round)
        fits.append(
            alone(PsgdTrainer(config, FlatNetwork(network(model, SHAPE, 10)), release=release), given)
        )
    same(fits[1], fits[0], within=2e-5)


def test_gradients_by_vmap_also_of_a_network_that_orders_its_memory() -> None:
    x = np.random.default_rng(0).normal(size=(10, 1, 32, 32)).astype(np.float32)
    site = ClientData(x, np.arange(10), 0, 1, 0)
    fits = []
    for gradients in ("hooks", "vmap"):
        net = FlatNetwork(network("dssgd-cnn-mnist", (1, 32, 32), 10))
        config = Psgd(name="psgd", gradients=gradients, sample_rate=0.5)  # type: ignore[arg-type]
        trainer = PsgdTrainer(config, net, release=SampledGaussian(1.1, 0.5, 2))
        start = initial_weights(net.spec, seed=1)
        fits.append(trainer.fit(start, site, {}))
    same(fits[1:], fits[:1], within=1e-4)


@pytest.mark.parametrize("kind", ["sgd", "psgd"])
@pytest.mark.parametrize("model", ["linear", "small-mlp", "dssgd-mlp"])
@pytest.mark.parametrize("inputs", some([4, 8, 13, 25, 64, 257, 784], [4, 25, 784]))
@pytest.mark.parametrize("classes", some([2, 3, 5, 10], [2, 10]))
def test_a_perceptrons_numbers_do_not_depend_on_who_is_trained_beside_it(
    classes: int, inputs: int, model: str, kind: str
) -> None:
    net = FlatNetwork(network(model, (inputs,), classes))
    trainer: SgdTrainer | PsgdTrainer = SgdTrainer(Sgd(momentum=0.5), net)
    if kind == "psgd":
        config = Psgd(name="psgd", sample_rate=0.2)
        trainer = PsgdTrainer(config, net, release=SampledGaussian(1.1, 0.2, config.steps_per_round))
    if trainer.clients_at_once == 1:  # its products are so small that it is trained alone
        assert classes < 4 or inputs * classes < 64
        return
    given = tasks(net, 1, records=(300, 200, 7, 64, 1, 33), shape=(inputs,), classes=classes)
    whole = trainer.fit_batch(given)
    parts = trainer.fit_batch(given[:2]) + trainer.fit_batch(given[2:])
    for one, two, three in zip(whole, parts, alone(trainer, given), strict=True):
        assert one.change.tobytes() == two.change.tobytes() == three.change.tobytes()


def test_one_that_diverges_leaves_the_others_as_they_are() -> None:
    net = FlatNetwork(network("small-mlp", SHAPE, 10))
    trainer = SgdTrainer(Sgd(), net)
    given = tasks(net, 1)
    good = trainer.fit_batch(given)
    given[1] = FitRequest(np.full(net.size, np.nan, np.float32), given[1].data, given[1].state)
    bad = trainer.fit_batch(given)
    assert np.isnan(bad[1].change).all()
    assert all(bad[k].change.tobytes() == good[k].change.tobytes() for k in (0, 2, 3, 4))


def test_how_many_at_once_follows_from_the_network() -> None:
    def of(model: str, shape: tuple[int, ...]) -> int:
        return best_batch(FlatNetwork(network(model, shape, 10)), None)

    assert of("small-mlp", SHAPE) == 64
    assert of("dssgd-mlp", (1, 32, 32)) == 16
    assert of("small-cnn", SHAPE) == of("dssgd-cnn-mnist", (1, 32, 32)) == 1
    assert (
        SgdTrainer(Sgd(update_fraction=0.1), FlatNetwork(network("small-mlp", SHAPE, 10))).clients_at_once
        == 1
    )
    assert Chain.of(FlatNetwork(network("scattering-linear", SHAPE, 10))) is not None


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"clients": {"together": 0}}, "clients.together"),
        ({"trainer": {"name": "sgd", "update_fraction": 0.1}}, r"update_fraction = 0.1.*trained alone"),
        ({"trainer": {"name": "svm"}, "model": {"name": "rbf"}}, r"'svm', each client is trained alone"),
    ],
)
def test_a_block_where_each_is_trained_alone_is_refused(tables: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        small(**{"clients": {"together": 4}, **tables})


# ---------------------------------------------------------------------------------- whole runs


def last_weights(path: Path) -> np.ndarray:
    latest = RunFolder(path).latest()
    assert latest is not None
    return latest[1]["weights"]


@pytest.mark.parametrize("seed", some([1, 2, 3], [1]))
@pytest.mark.parametrize("kind", ["sgd", "psgd", "dssgd", "sparse_vector", "cnn"])
def test_a_run_together_ends_where_the_loop_does(kind: str, seed: int, tmp_path: Path) -> None:
    found = []
    for together in (1, 4):
        changes: dict[str, Any] = {"seed": seed, "clients": {"count": 10, "together": together}}
        if kind == "dssgd":
            changes["strategy"] = {"name": "dssgd", "exchange": "parallel", "bound": 0.01}
        elif kind == "cnn":
            changes["model"] = {"name": "small-cnn"}
        if kind == "sparse_vector":
            experiment = private_selection(kind, **changes)
        else:
            experiment = small("psgd" if kind == "psgd" else "sgd", **changes)
        path, summary = simulate(experiment, observer=Silent(), engine="in-process", root=tmp_path)
        found.append((last_weights(path), summary))
    (one, alone_summary), (other, summary) = found
    # Of changes that are equal but for rounding (at the bound, say), another may be selected.
    apart = np.mean(~np.isclose(one, other, rtol=0, atol=1e-4))
    assert apart < 0.02 if "strategy" in changes or kind == "sparse_vector" else apart == 0
    assert summary["failures"] == 0
    assert summary["privacy"] == alone_summary["privacy"]
    assert summary["accuracy"]["final"] == pytest.approx(alone_summary["accuracy"]["final"], abs=0.02)


def train_messages(experiment: Experiment) -> list[Message]:
    data = make_federation(experiment).dataset
    start = initial_weights(experiment.network(data.shape, data.classes), seed=1)
    shared = record(start)
    return [
        Message(
            RecordDict({names.ARRAYS: shared, names.CONFIG: ConfigRecord({names.ROUND: 1})}),
            node,
            MessageType.TRAIN,
            group_id="1",
        )
        for node in range(1, experiment.nodes + 1)
    ]


def grid_of(experiment: Experiment, client_batch: int = 8) -> InProcessGrid:
    return InProcessGrid(experiment.nodes, dict(to_run_config(experiment)), app, client_batch)


def upload(reply: Message) -> bytes:
    return reply.content.array_records[names.ARRAYS][names.CHANGE].data


def test_one_that_may_not_pay_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = small("psgd")
    good = [upload(reply) for reply in grid_of(experiment).send_and_receive(train_messages(experiment))]
    original = VirtualLedgerSession.charge

    def refuse(books: VirtualLedgerSession, *rest: Any, **options: Any) -> Any:
        if books.account.site == "client-0002":
            raise BudgetExceeded("over the budget")
        return original(books, *rest, **options)

    monkeypatch.setattr(VirtualLedgerSession, "charge", refuse)
    replies = list(grid_of(experiment).send_and_receive(train_messages(experiment)))
    assert [reply.has_error() for reply in replies] == [False, False, True, False]
    assert [upload(reply) for reply in replies if not reply.has_error()] == good[:2] + good[3:]


def test_where_the_common_training_fails_all_have_paid_and_nothing_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(trainer: PsgdTrainer, given: Sequence[FitRequest]) -> list[Fit]:
        raise MemoryError("record 17 is 3.5")

    monkeypatch.setattr(PsgdTrainer, "fit_batch", fail)
    experiment = small("psgd")
    grid = grid_of(experiment)
    replies = list(grid.send_and_receive(train_messages(experiment)))
    reasons = {failure_of(reply.error).reason for reply in replies}
    assert reasons == {"MemoryError: record 17 is 3.5"}
    assert all(names.LEDGER in context.state for context in grid.contexts.values())


def test_a_node_is_in_a_block_once_and_blocks_are_even() -> None:
    def ask(*nodes: int) -> list[Message]:
        return [Message(RecordDict(), node, MessageType.TRAIN, group_id="1") for node in nodes]

    def sizes(nodes: Sequence[int], most: int, workers: int) -> list[int]:
        return [len(client_batch) for client_batch in client_batches(ask(*nodes), most, workers)]

    assert sizes(range(1, 301), 16, 2) == [15] * 20
    assert sizes(range(1, 11), 64, 2) == [5, 5]
    assert sizes(range(1, 4), 64, 2) == [1, 2]
    assert sizes([1, 2], 64, 8) == [1, 1]
    assert sizes([1, 2, 1, 1], 64, 1) == [2, 1, 1]
    assert sizes([], 64, 2) == []
    assert sizes(range(1, 8), 1, 2) == [1] * 7


def test_the_trainers_that_can_say_so() -> None:
    assert isinstance(SgdTrainer(Sgd(), FlatNetwork(network("linear", SHAPE, 10))), ClientBatchTrainer)
