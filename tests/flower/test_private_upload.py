"""`private_upload` and `ledger`: what leaves any ClientApp is bounded, charged, noised and kept."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

import fed_dp
from fed_dp.accounting import Budget, Gaussian, Laplace, Ledger, SampledGaussian, total
from fed_dp.errors import BudgetExceeded, ConfigError, EmptyRound, LedgerFault, PrivacyError, RunError
from fed_dp.flower import Dssgd, private, private_upload, simulate, site_ledger
from fed_dp.flower import ledger as ledger_mod
from fed_dp.flower.arrays import PARTLY, TERMS, UPDATE, update_record
from fed_dp.sharing.codec import decode, encode
from fed_dp.sharing.update import SparseUpdate
from fed_dp.simulations.grid import identify
from tests.flower.apps import SIZE, Seen, arrays, client_app, server_app, values_of

GAUSS: dict[str, Any] = {"clip": 0.5, "noise_multiplier": 2.0}
SPARSE: dict[str, Any] = {"selection": "sparse_vector", "epsilon": 1.0, "bound": 0.1, "upload_fraction": 0.1}
BUDGET = Budget(epsilon=30, delta=1e-5)


class Node:
    """One node with a mod, asked by hand."""

    def __init__(self, mod: Any, app: Any = None, **config: Any) -> None:
        identify()
        self.calls = 0
        self.context = Context(1, 5, {"partition-id": 0, "num-partitions": 1, **config}, RecordDict(), {})

        def plain(message: Message, context: Context) -> Message:
            self.calls += 1
            trained = values_of(message.content["arrays"]) + 3.0
            metrics = MetricRecord({"loss": 0.5, "num-examples": 10})
            secret = ConfigRecord({"first record": "Ann, 43", "raw": [b"1", b"2"]})
            return Message(
                RecordDict({"arrays": arrays(trained), "metrics": metrics, "secret": secret}),
                reply_to=message,
            )

        self.mod, self.app = mod, app or plain

    def ask(self, server_round: int = 1, *, weights: float = 0.0, kind: str = "train") -> RecordDict:
        content = RecordDict(
            {
                "arrays": arrays(np.full(SIZE, weights, np.float32)),
                "config": ConfigRecord({"server-round": server_round}),
            }
        )
        message = Message(content, 5, kind)
        message.metadata.__dict__["_message_id"] = f"{server_round}"
        return self.mod(message, self.context, self.app).content


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Ledger.create(tmp_path / "site.sqlite", site="a", budget=BUDGET)
    return tmp_path / "site.sqlite"


def simulated(**options: Any) -> Node:
    return Node(private_upload(**{"budget": BUDGET, "seed": 3, **options}), simulated=True)


def test_a_reply_holds_the_noised_model_a_public_weight_and_the_cost_and_nothing_else(path: Path) -> None:
    reply = Node(private_upload(**GAUSS, ledger=path, records=7)).ask()
    assert set(reply) == {"arrays", "metrics"}
    expected = total({(Gaussian(2.0), None): 1}, delta=1e-5)
    assert dict(reply["metrics"]) == {"num-examples": 7, "epsilon": pytest.approx(expected), "delta": 1e-5}
    assert int(reply["arrays"]["steps"].numpy()) == 0  # the server's


def test_the_change_is_cut_to_the_clip_and_its_noise_is_of_twice_that_sensitivity() -> None:
    found = np.stack([values_of(simulated(**GAUSS, seed=seed).ask()["arrays"]) for seed in range(300)])
    assert np.linalg.norm(found.mean(0)) == pytest.approx(0.5, abs=0.5)
    assert found.std(0).mean() == pytest.approx(2.0 * 2 * 0.5, rel=0.03)


def loss_at_least(source: str, changes: tuple[tuple[str, str], ...] = ()) -> float:
    """An ε that the mod's own noise shows, at δ = 1e-5: of two sites whose records are opposite."""
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    space: dict[str, Any] = {"__name__": "fed_dp.flower.weakened"}
    import sys
    import types

    module = types.ModuleType(space["__name__"])
    sys.modules[module.__name__] = module
    exec(compile(source, "weakened", "exec"), module.__dict__)
    projections: list[list[float]] = []
    for sign in (1.0, -1.0):

        def app(message: Message, context: Context, sign: float = sign) -> Message:
            trained = values_of(message.content["arrays"]) + sign * 100
            return Message(RecordDict({"arrays": arrays(trained)}), reply_to=message)

        found = []
        for seed in range(400):
            node = Node(
                module.private_upload(clip=1.0, noise_multiplier=4.0, budget=BUDGET, seed=seed),
                app,
                simulated=True,
            )
            found.append(float(values_of(node.ask()["arrays"]).sum() / np.sqrt(SIZE)))
        projections.append(found)
    one, two = (np.array(each) for each in projections)
    sigma = np.sqrt((one.var() + two.var()) / 2)
    multiplier = max(float(sigma / (one.mean() - two.mean())), 0.01)
    return total({(Gaussian(multiplier), None): 1}, delta=1e-5)


STATED = total({(Gaussian(4.0), None): 1}, delta=1e-5)


def test_the_measured_loss_is_what_is_charged() -> None:
    assert loss_at_least(inspect.getsource(private)) == pytest.approx(STATED, rel=0.12)


@pytest.mark.parametrize(
    "change",
    [
        (
            "RandomMask(count, self.clip, release.noise_multiplier",
            "RandomMask(count, self.clip, release.noise_multiplier / 2",
        ),
        ("RandomMask(count, self.clip, ", "RandomMask(count, 2 * self.clip, 0.5 * "),
        ("noise=charges.noise(context, request, account))", "noise=_None())"),
    ],
)
def test_a_weakened_mod_is_found(change: tuple[str, str]) -> None:
    source = inspect.getsource(private)
    source += "\n\nclass _None:\n    name = 'simulation'\n    shuffled = staticmethod(lambda items: items)\n"
    source += "    gaussian = staticmethod(lambda values, *, scale: values)\n"
    assert loss_at_least(source, (change,)) > 1.5 * STATED


def test_it_is_charged_on_disk_before_the_app_is_called_and_noise_is_drawn(path: Path) -> None:
    def app(message: Message, context: Context) -> Message:
        assert Ledger(path).read()[0].number == 1
        return Message(RecordDict({"arrays": arrays(np.ones(SIZE, np.float32))}), reply_to=message)

    Node(private_upload(**GAUSS, ledger=path), app).ask()
    assert Ledger(path).read()[0].number == 1


def test_the_same_request_gets_the_same_bytes_and_costs_nothing(path: Path) -> None:
    node = Node(private_upload(**GAUSS, ledger=path))
    first = node.ask()["arrays"]["a"].data
    assert node.ask()["arrays"]["a"].data == first
    restarted = Node(private_upload(**GAUSS, ledger=path))
    assert restarted.ask()["arrays"]["a"].data == first
    assert (node.calls, restarted.calls, Ledger(path).read()[0].number) == (1, 0, 1)
    assert node.ask(2)["arrays"]["a"].data != first
    assert node.ask(2, weights=1.0)["arrays"]["a"].data != first
    assert Ledger(path).read()[0].number == 3


def test_over_the_budget_nothing_is_sent_and_the_app_is_not_called(path: Path) -> None:
    node = Node(private_upload(clip=1.0, noise_multiplier=0.3, ledger=path))
    node.ask(1)
    with pytest.raises(BudgetExceeded, match="over the budget of 30"):
        [node.ask(server_round) for server_round in range(2, 9)]
    assert node.calls == Ledger(path).read()[0].number
    assert Ledger(path).read()[0].spent <= 30


@pytest.mark.parametrize("options", [GAUSS, SPARSE], ids=["gauss", "sparse"])
@pytest.mark.parametrize("what", ["raises", "nan", "infinite", "other arrays", "no arrays", "error reply"])
def test_whatever_training_comes_to_the_site_answers_with_noise(
    options: dict[str, Any], what: str, path: Path
) -> None:
    def app(message: Message, context: Context) -> Message:
        if what == "raises":
            raise ValueError("record 17 is Ann")
        values = {"nan": np.nan, "infinite": np.inf}.get(what, 1.0)
        content = {
            "other arrays": RecordDict({"arrays": arrays(np.ones(SIZE + 10, np.float32))}),
            "no arrays": RecordDict(),
        }.get(what, RecordDict({"arrays": arrays(np.full(SIZE, values, np.float32))}))
        if what == "error reply":
            from flwr.app import Error

            return Message(Error(2, "record 17 is Ann"), reply_to=message)
        return Message(content, reply_to=message)

    reply = Node(private_upload(**options, ledger=path), app).ask()
    assert np.isfinite(values_of(reply["arrays"])).all()
    assert "Ann" not in str(reply)


def test_a_rolled_back_ledger_is_found_by_its_witness(path: Path) -> None:
    older = path.read_bytes()
    Node(private_upload(**GAUSS, ledger=path)).ask()
    for leftover in path.parent.glob("site.sqlite-*"):
        leftover.unlink()
    path.write_bytes(older)
    with pytest.raises(LedgerFault, match="rolled back"):
        Node(private_upload(**GAUSS, ledger=path)).ask(2)


def test_the_node_config_may_name_the_ledger_which_comes_before_a_simulations_budget(path: Path) -> None:
    node = Node(private_upload(**GAUSS, budget=BUDGET, seed=1), ledger=str(path))
    node.ask()
    _, [entry] = Ledger(path).read()
    assert (entry.event.noise_source, entry.event.guarantee, entry.event.round) == (
        "secure",
        "random_mask",
        1,
    )


def test_a_node_that_is_neither_a_site_nor_simulated_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_ledger, "simulated", lambda context: "simulated" in context.node_config)
    for mod in (private_upload(**GAUSS), private_upload(**GAUSS, budget=BUDGET), ledger_mod(Laplace(1.0))):
        with pytest.raises(PrivacyError, match="there is no ledger: give the mod ledger="):
            Node(mod).ask()


def test_errors_name_no_path_of_the_site(tmp_path: Path) -> None:
    with pytest.raises(LedgerFault) as raised:
        Node(private_upload(**GAUSS, ledger=tmp_path / "deep" / "site.sqlite")).ask()
    assert str(tmp_path) not in str(raised.value)


def test_scores_leave_only_where_the_operator_allows_it_and_are_entered(path: Path) -> None:
    def app(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"accuracy": 0.75})}), reply_to=message)

    with pytest.raises(PrivacyError, match="evaluate=True"):
        Node(private_upload(**GAUSS, ledger=path), app).ask(kind="evaluate")
    assert Ledger(path).read()[0].scores == 0
    reply = Node(private_upload(**GAUSS, ledger=path, evaluate=True), app).ask(kind="evaluate")
    assert dict(reply["metrics"]) == {"accuracy": 0.75}
    assert Ledger(path).read()[0].scores == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "clip = None: selection = 'random_mask' needs a number above 0"),
        ({"clip": 1.0}, "noise_multiplier = None"),
        ({"clip": float("inf"), "noise_multiplier": 1.0}, "clip = inf"),
        ({**GAUSS, "epsilon": 1.0}, "epsilon = 1.0 is not used by selection = 'random_mask'"),
        ({**SPARSE, "bound": None}, "bound = None: selection = 'sparse_vector' needs"),
        ({**SPARSE, "clip": 1.0}, "clip = 1.0 is not used"),
        ({**GAUSS, "selection": "largest"}, "selection = 'largest': expected"),
        ({**GAUSS, "upload_fraction": 0.0}, "upload_fraction = 0.0"),
        ({**GAUSS, "bound": 1e-12}, "bound = 1e-12"),
        ({**GAUSS, "records": 0}, "records = 0"),
        ({**GAUSS, "ledger": "x", "seed": 1}, "seed = 1 with ledger = 'x'"),
        ({**GAUSS, "ledger": "x", "budget": BUDGET}, "budget = .* with ledger = 'x'"),
    ],
)
def test_options_that_are_missing_or_would_not_be_used_are_refused(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        private_upload(**options)


@pytest.mark.parametrize("options", [GAUSS, SPARSE], ids=["gauss", "sparse"])
@pytest.mark.parametrize("strategy", ["dssgd", "fedavg"])
def test_somebody_elses_app_runs_with_a_budget_for_every_client(
    options: dict[str, Any], strategy: str
) -> None:
    seen = Seen()
    made: Any = Dssgd(upload_fraction=0.2, bound=0.05) if strategy == "dssgd" else FedAvg()
    made.fraction_evaluate = 0.0
    app = client_app([private_upload(**options, budget=BUDGET, seed=4)])
    simulate(server_app(made, seen, rounds=3), app, nodes=3)
    assert seen.result.train_metrics_clientapp[3]["epsilon"] > 0
    assert np.isfinite(values_of(seen.result.arrays)).all()
    assert values_of(seen.result.arrays).any()


def test_what_the_server_asks_beyond_the_operators_choice_is_not_done() -> None:
    seen = Seen()
    app = client_app([private_upload(**{**SPARSE, "bound": 0.01}, budget=BUDGET, seed=4)])
    simulate(server_app(Dssgd(upload_fraction=1.0, fraction_evaluate=0.0), seen, rounds=1), app, nodes=2)
    found = values_of(seen.result.arrays)
    assert 0 < (found != 0).sum() <= 2 * 4  # a tenth of 40, of each node
    assert np.abs(found).max() <= 2 * 0.01 + 1e-6


def test_a_round_that_no_budget_pays_ends_the_run_with_the_reason() -> None:
    app = client_app([private_upload(clip=1.0, noise_multiplier=0.01, budget=BUDGET, seed=4)])
    with pytest.raises(EmptyRound, match="over the budget of 30"):
        simulate(server_app(Dssgd(fraction_evaluate=0.0), Seen()), app, nodes=2)


def test_a_part_of_a_model_without_terms_does_not_bring_out_what_the_node_keeps(path: Path) -> None:
    """The server says that it sends parts; then it sends one coordinate, as if it were another strategy."""
    node = Node(private_upload(clip=1e-3, noise_multiplier=2.0, upload_fraction=0.1, ledger=path))
    whole = RecordDict(
        {
            "arrays": arrays(np.zeros(SIZE, np.float32)),
            "config": ConfigRecord({"server-round": 1}),
            TERMS: ConfigRecord({PARTLY: True}),
        }
    )
    node.mod(Message(whole, 5, "train"), node.context, node.app)
    one = update_record(encode(SparseUpdate(np.array([0]), np.zeros(1, np.float32), SIZE)))
    part = RecordDict({"arrays": one, "config": ConfigRecord({"server-round": 2})})
    with pytest.raises(RunError, match="a part of a model and no terms"):
        node.mod(Message(part, 5, "train"), node.context, node.app)
    assert Ledger(path).read()[0].number == 1
    with_terms = RecordDict({**part, TERMS: ConfigRecord({PARTLY: True})})
    reply = node.mod(Message(with_terms, 5, "train"), node.context, node.app).content
    update = decode(reply["arrays"][UPDATE].data, size=SIZE, most=SIZE)
    assert np.abs(update.values).max() < 0.1  # noise on the clipped change, and no parameter


@pytest.mark.parametrize("kind", ["train.default", "train.x"])
@pytest.mark.parametrize("evaluate", [False, True])
def test_whatever_action_of_training_is_asked_for_is_training(kind: str, evaluate: bool, path: Path) -> None:
    node = Node(private_upload(**GAUSS, ledger=path, evaluate=evaluate))
    assert set(node.ask(kind=kind)) == {"arrays", "metrics"}
    Node(ledger_mod(Laplace(1.0), ledger=path, evaluate=evaluate)).ask(2, kind=kind)
    account, _ = Ledger(path).read()
    assert (account.number, account.scores) == (2, 0)


def test_queries_are_never_let_through(path: Path) -> None:
    for mod in (
        private_upload(**GAUSS, ledger=path, evaluate=True),
        ledger_mod(Laplace(1.0), ledger=path, evaluate=True),
    ):
        with pytest.raises(PrivacyError, match="a message of type 'query'"):
            Node(mod).ask(kind="query")


@pytest.mark.parametrize("fails", [False, True])
def test_arrays_that_are_not_what_they_say_are_refused_before_anything_is_charged(
    fails: bool, path: Path
) -> None:
    node = Node(private_upload(**GAUSS, ledger=path), (lambda *_: 1 / 0) if fails else None)
    lying = Array("float32", (2, 2), "numpy.ndarray", Array(np.zeros(5, np.float32)).data)
    content = RecordDict({"arrays": ArrayRecord({"a": lying}), "config": ConfigRecord({"server-round": 1})})
    with pytest.raises(RunError, match=r"array 'a' holds float32 of \(5,\), not float32 of \(2, 2\)"):
        node.mod(Message(content, 5, "train"), node.context, node.app)
    assert Ledger(path).read()[0].number == 0


def test_every_charge_has_noise_of_its_own() -> None:
    node = simulated(**GAUSS)
    noise = [values_of(node.ask(weights=weights)["arrays"]) - weights for weights in (0.0, 0.5)]
    assert np.abs(noise[0] - noise[1]).max() > 0.1


# -------------------------------------------------------------------------------------- ledger


def test_what_an_app_says_it_releases_is_charged_before_it_trains_and_kept(path: Path) -> None:
    release = SampledGaussian(noise_multiplier=1.5, sample_rate=0.1, steps=10)
    node = Node(ledger_mod(release, ledger=path))
    first = node.ask()
    assert first["metrics"]["epsilon"] == pytest.approx(total({(release, "add/remove one"): 1}, delta=1e-5))
    assert first["secret"]["first record"] == "Ann, 43"  # the app's own business
    again = node.ask()
    assert (again["arrays"]["a"].data, dict(again["secret"]), node.calls) == (
        first["arrays"]["a"].data,
        dict(first["secret"]),
        1,
    )
    account, [entry] = Ledger(path).read()
    assert entry.event.stated.status == "claimed"
    assert account.number == 1


def test_an_app_that_fails_has_paid(path: Path) -> None:
    def app(message: Message, context: Context) -> Message:
        raise OSError("gone")

    with pytest.raises(PrivacyError, match=r"the site failed \(OSError\); nothing was sent"):
        Node(ledger_mod(Gaussian(3.0), ledger=path), app).ask()
    assert Ledger(path).read()[0].number == 1


def test_an_app_over_its_budget_is_not_called(path: Path) -> None:
    node = Node(ledger_mod(Laplace(20.0), ledger=path))
    node.ask()
    with pytest.raises(BudgetExceeded):
        node.ask(2)
    assert node.calls == 1


def test_every_public_name_of_the_package_is_there() -> None:
    assert {name for name in fed_dp.flower.__all__ if callable(getattr(fed_dp.flower, name))} == set(
        fed_dp.flower.__all__
    )
