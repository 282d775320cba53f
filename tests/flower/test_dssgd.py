"""`fed_dp.flower.Dssgd` in somebody else's app: `strategy.start` honours arrays, exchange and shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAvg

import fed_dp
from fed_dp.errors import ConfigError, EmptyRound, FedDpError, RunError
from fed_dp.flower import Dssgd, selective_upload, simulate
from fed_dp.simulations.grid import InProcessGrid
from tests.flower.apps import SIZE, Seen, arrays, client_app, server_app, towards, values_of

COMMON: dict[str, Any] = {"fraction_evaluate": 0.0}


def run(strategy: Any, *, mods: Any = None, nodes: int = 3, **options: Any) -> tuple[Seen, list[int]]:
    seen, calls = Seen(), list[int]()
    train = {"train": options.pop("train")} if "train" in options else {}
    app = client_app([selective_upload(seed=1)] if mods is None else mods, calls=calls, **train)
    simulate(server_app(strategy, seen, **options), app, nodes=nodes)
    return seen, calls


def paper(
    exchange: str, *, rounds: int, nodes: int, start: np.ndarray, share: float, bound: float
) -> np.ndarray:
    """Figs. 3 and 4 written out, for exchanges without chance: largest values, whole downloads."""
    server = start.copy()
    for _ in range(rounds):
        before = server.copy()
        for node in range(nodes):
            begin = before if exchange == "parallel" else server.copy()
            change = (towards(begin, node) - begin).astype(np.float32)
            largest = np.argsort(-np.abs(change), kind="stable")[: round(share * SIZE)]
            server[largest] += np.clip(change[largest], -bound, bound)
    return server


@pytest.mark.parametrize("exchange", ["parallel", "round_robin"])
def test_start_begins_with_the_given_arrays_and_does_what_the_paper_does(exchange: Any) -> None:
    start = np.linspace(0, 1, SIZE, dtype=np.float32)
    seen, _ = run(Dssgd(upload_fraction=0.25, exchange=exchange, bound=0.08, **COMMON), start=start)
    expected = paper(exchange, rounds=2, nodes=3, start=start, share=0.25, bound=0.08)
    assert values_of(seen.result.arrays) == pytest.approx(expected, abs=1e-6)
    assert seen.result.arrays["b"].dtype == "float64"
    assert int(seen.result.arrays["steps"].numpy()) == 7  # what is no number to train stays


def begins(exchange: Any, **options: Any) -> list[list[float]]:
    """What each node began with in each round, in the order in which they trained."""
    found: list[list[float]] = []

    def train(weights: np.ndarray, node: int) -> np.ndarray:
        found.append([node, float(weights[0])])
        changed = weights.copy()
        changed[0] += 1
        return changed

    run(Dssgd(exchange=exchange, upload_fraction=1.0, **options, **COMMON), train=train, rounds=3)
    return found


def test_each_exchange_has_its_order() -> None:
    assert begins("parallel") == [[node, 3 * r] for r in range(3) for node in range(3)]
    assert begins("round_robin") == [[node, 3 * r + node] for r in range(3) for node in range(3)]
    orders = begins("random_order", seed=5)
    assert [value for _, value in orders] == list(range(9))
    assert [node for node, _ in orders] != [0, 1, 2] * 3
    assert begins("random_order", seed=5) == orders
    late = begins("asynchronous", outdated=1.0)
    assert {value for _, value in late[:3]} == {0}  # all with the state of the last round


def test_a_node_that_downloads_a_part_keeps_the_rest_of_its_own() -> None:
    ends: dict[int, np.ndarray] = {}
    begins: dict[int, list[np.ndarray]] = {0: [], 1: []}

    def train(weights: np.ndarray, node: int) -> np.ndarray:
        begins[node].append(weights.copy())
        ends[node] = weights + np.linspace(0.1, 1, SIZE, dtype=np.float32) * (node + 1)
        return ends[node]

    strategy = Dssgd(upload_fraction=0.1, download_fraction=0.25, exchange="parallel", **COMMON)
    run(strategy, train=train, nodes=2, rounds=1)
    kept = {node: end.copy() for node, end in ends.items()}
    begins = {0: [], 1: []}
    run(
        Dssgd(upload_fraction=0.1, download_fraction=0.25, exchange="parallel", **COMMON),
        train=train,
        nodes=2,
        rounds=2,
    )
    for node in (0, 1):
        same = begins[node][1] == kept[node]
        assert SIZE - 10 <= same.sum() <= SIZE - 4  # a quarter was downloaded, of which some had not moved


def test_traffic_is_sparse_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = InProcessGrid.send_and_receive

    def watch(self: Any, messages: Any, **options: Any) -> Any:
        replies = list(original(self, messages, **options))
        sizes.extend(
            sum(len(a.data) for r in reply.content.array_records.values() for a in r.values())
            for reply in replies
        )
        return replies

    monkeypatch.setattr(InProcessGrid, "send_and_receive", watch)
    run(Dssgd(upload_fraction=0.1, exchange="parallel", **COMMON))
    assert max(sizes) < 60  # four values with their places; all would be 200 bytes


def test_flowers_own_fedavg_gets_the_same_from_the_same_app_without_mods() -> None:
    seen, _ = run(FedAvg(fraction_evaluate=0.0, weighted_by_key="num-examples"), mods=[])
    assert values_of(seen.result.arrays) == pytest.approx(
        2 * 0.1 * np.linspace(-1, 1, SIZE) * (10 + 22 + 36) / 33
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"exchange": "free_running"}, "exchange = 'free_running': expected parallel"),
        ({"exchange": "ring"}, "exchange = 'ring'"),
        ({"upload_fraction": 0.0}, "upload_fraction"),
        ({"selection": "sparse_vector", "bound": 0.1}, "sites add noise, not the strategy"),
        ({"threshold": 0.5}, "threshold is set, but only"),
        ({"outdated": 0.3}, "outdated is set, but only"),
        ({"upload_fraction": (0.1, 0.2)}, "one number for all sites"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Dssgd(**options)


def test_an_app_without_the_mod_is_told_which_it_needs() -> None:
    with pytest.raises(
        EmptyRound, match=r"sent whole arrays: its ClientApp needs mods=\[fed_dp.flower.selective_upl"
    ):
        run(Dssgd(**COMMON), mods=[])


def test_the_mod_under_another_strategy_says_so() -> None:
    seen, _ = run(FedAvg(fraction_evaluate=0.0), rounds=1)
    assert seen.result.train_metrics_clientapp == {}  # nobody was used


def test_a_node_uploads_no_more_than_its_operator_allows() -> None:
    with pytest.raises(
        EmptyRound, match=r"upload_fraction = 0.5: this site uploads at most upload_fraction = 0.1"
    ):
        run(Dssgd(upload_fraction=0.5, **COMMON), mods=[selective_upload(upload_fraction=0.1)])
    with pytest.raises(EmptyRound, match=r"bound = 1000.0: this site uploads at most bound = 0.01"):
        run(Dssgd(**COMMON), mods=[selective_upload(bound=0.01)])
    for wrong in ({"upload_fraction": 2.0}, {"bound": 0.0}):
        with pytest.raises(ConfigError):
            selective_upload(**wrong)  # type: ignore[arg-type]


def test_an_exchange_in_turn_is_refused_by_a_loop_that_is_not_starts_own() -> None:
    grid = InProcessGrid(2, {}, client_app([]))
    from flwr.app import ConfigRecord

    with pytest.raises(RunError, match=r"call strategy.start\(…\), or take exchange = 'parallel'"):
        Dssgd(**COMMON).configure_train(1, arrays(np.zeros(SIZE, np.float32)), ConfigRecord(), grid)


def test_a_model_without_numbers_is_refused() -> None:
    from flwr.app import Array, ArrayRecord

    grid = InProcessGrid(2, {}, client_app([]))
    with pytest.raises(FedDpError, match="no floating-point arrays"):
        Dssgd(**COMMON).start(grid, ArrayRecord({"steps": Array(np.array(3))}), num_rounds=1)


def test_a_node_whose_arrays_differ_is_left_out() -> None:
    def train(weights: np.ndarray, node: int) -> np.ndarray:
        if node == 1:
            raise ValueError("out of memory")
        return weights + 1

    seen, calls = run(Dssgd(exchange="parallel", upload_fraction=1.0, **COMMON), train=train, rounds=1)
    assert values_of(seen.result.arrays).tolist() == [2.0] * SIZE
    assert len(calls) == 3


def test_nodes_must_be_a_number() -> None:
    with pytest.raises(ConfigError, match="nodes = 0"):
        simulate(server_app(Dssgd(), Seen()), client_app([]), nodes=0)
    assert fed_dp.flower.Dssgd is Dssgd


def test_the_mod_selects_for_every_action_of_training() -> None:
    from tests.flower.test_private_upload import Node

    node = Node(selective_upload(upload_fraction=0.1))
    with pytest.raises(RunError, match="the strategy takes"):
        node.ask(kind="train.default")
