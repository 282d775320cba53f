"""The message that leaves a site, and what a curious server can make it say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from fed_dp.clients import app as client_app
from fed_dp.clients import memory, workplace
from fed_dp.clients.trainer import Fit
from fed_dp.experiment import Experiment, to_run_config
from fed_dp.experiment.federation import make_federation
from fed_dp.experiment.start import starting_weights
from fed_dp.models import initial_weights
from fed_dp.sharing import message as names
from fed_dp.sharing.codec import decode, encode
from fed_dp.sharing.update import MAX_ABS_VALUE, SparseUpdate
from fed_dp.simulations.grid import InProcessGrid
from fed_dp.strategies.failures import failure_of
from tests.conftest import small
from tests.networks import network

CLIENTS = 4


def grid(experiment: Experiment) -> InProcessGrid:
    return InProcessGrid(CLIENTS, dict(to_run_config(experiment)), client_app.app)


def start(experiment: Experiment) -> np.ndarray:
    data = make_federation(experiment).dataset
    return initial_weights(experiment.network(data.shape, data.classes), seed=1)


def train(nodes: InProcessGrid, weights: np.ndarray | bytes, node: int = 1, turn: int = 1) -> Message:
    data = weights if isinstance(weights, bytes) else unchecked(weights)
    content = RecordDict(
        {
            names.ARRAYS: ArrayRecord({names.WEIGHTS: Array("uint8", (len(data),), names.WIRE, data)}),
            names.CONFIG: ConfigRecord({names.ROUND: turn}),
        }
    )
    (reply,) = nodes.send_and_receive([Message(content, node, MessageType.TRAIN, group_id="1")])
    return reply


def unchecked(weights: np.ndarray) -> bytes:
    """The wire format of any weights, also of those that no SparseUpdate would hold."""
    zeros = encode(SparseUpdate.dense(np.zeros(weights.size, np.float32)))
    return zeros[: -4 * weights.size] + weights.astype("<f4").tobytes()


def change(reply: Message, size: int) -> SparseUpdate:
    return decode(reply.content.array_records[names.ARRAYS][names.CHANGE].data, size=size, most=size)


def test_a_private_message_depends_on_the_records_through_the_change_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = small("psgd")
    replies = []
    for shift in (0, 1):
        nodes = grid(experiment)
        original = client_app.ClientData
        monkeypatch.setattr(
            client_app,
            "ClientData",
            lambda x, y, *rest, s=shift, site=original: site(x, np.roll(y, s), *rest),
        )
        replies.append(train(nodes, start(experiment)).content)
        monkeypatch.setattr(client_app, "ClientData", original)
    one, other = replies
    assert one.array_records != other.array_records
    assert one.metric_records == other.metric_records
    assert one.config_records == other.config_records


def overflowing(experiment: Experiment, size: float) -> np.ndarray:
    """Weights with which a ReLU overflows for records whose pixel 9 is bright, and for no others."""
    weights = np.zeros_like(start(experiment))
    weights[9] = size  # first unit of the first layer: size · (pixel − 0.9)
    weights[64 * 32] = -0.9 * size
    weights[64 * 32 + 32 :: 32] = size
    return weights


@pytest.mark.parametrize("gradients", ["hooks", "ghost"])
@pytest.mark.parametrize("size", [3e38, 1e20, np.nan, 1e4])
def test_weights_that_overflow_for_some_records_only_are_refused_by_all_sites_alike(
    gradients: str, size: float
) -> None:
    experiment = small("psgd", trainer={"name": "psgd", "gradients": gradients, "sample_rate": 0.25})
    nodes = grid(experiment)
    reasons = {train(nodes, overflowing(experiment, size), node).error.reason for node in nodes.contexts}
    assert len(reasons) == 1
    assert "weights from the server" in (reasons.pop() or "")


@pytest.mark.parametrize("gradients", ["hooks", "ghost"])
def test_the_largest_weights_that_are_accepted_overflow_for_no_record(gradients: str) -> None:
    experiment = small("psgd", trainer={"name": "psgd", "gradients": gradients, "sample_rate": 0.25})
    nodes = grid(experiment)
    for weights in (overflowing(experiment, MAX_ABS_VALUE), np.full_like(start(experiment), MAX_ABS_VALUE)):
        for node in nodes.contexts:
            nodes.contexts[node].state.clear()
            assert np.isfinite(change(train(nodes, weights, node), weights.size).values).all()


def test_a_simulated_client_tells_its_exception_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("psgd", "sgd"):
        nodes = grid(small(kind))
        experiment = small(kind)

        def fail(*_: Any) -> Any:
            raise ValueError("secret 42")

        place = workplace.read_workplace(tuple(sorted(to_run_config(experiment).items())))
        monkeypatch.setattr(type(place.trainer), "fit", fail)
        failure = failure_of(train(nodes, start(experiment)).error)
        assert (failure.code, failure.reason) == ("ValueError", "ValueError: secret 42")
        assert 'raise ValueError("secret 42")' in failure.traceback


def test_a_message_that_is_none_is_refused(tmp_path: Path) -> None:
    nodes = grid(small())
    (reply,) = nodes.send_and_receive([Message(RecordDict(), 1, MessageType.TRAIN, group_id="1")])
    assert "needs the records" in (reply.error.reason or "")
    size = start(small()).size
    reason = train(nodes, np.zeros(3, np.float32)).error.reason or ""
    assert f"weights from the server: size: expected {size} parameters, found 3" in reason
    assert "weights from the server: truncated" in (train(nodes, b"FD").error.reason or "")
    stray = InProcessGrid(99, dict(to_run_config(small())), client_app.app)
    reason = train(stray, start(small()), 80).error.reason or ""
    assert "partition-id = 79: the experiment has clients 0..3" in reason


def dssgd(kind: str = "sgd", **options: Any) -> Experiment:
    return small(kind, strategy={"name": "dssgd", **options})


@pytest.mark.parametrize("kind", ["sgd", "psgd"])
def test_a_site_uploads_the_selected_part_of_what_it_would_upload_whole(kind: str) -> None:
    weights = start(small(kind))
    whole = change(train(grid(small(kind)), weights), weights.size).values
    for fraction, bound in ((0.01, None), (0.1, 1e-3)):
        experiment = dssgd(kind, upload_fraction=fraction, **({"bound": bound} if bound else {}))
        part = change(train(grid(experiment), weights), weights.size)
        assert len(part) == int(fraction * weights.size)
        least = np.sort(np.abs(whole))[-len(part)]
        assert part.indices is not None
        assert set(part.indices) == set(np.flatnonzero(np.abs(whole) >= least))
        expected = whole[part.indices] if bound is None else np.clip(whole[part.indices], -bound, bound)
        assert part.values.tobytes() == expected.tobytes()


def test_clients_may_share_different_fractions() -> None:
    experiment = dssgd(upload_fraction=[0.01, 0.1, 1.0, 0.5])
    weights, nodes = start(experiment), grid(experiment)
    shared = [len(change(train(nodes, weights, node), weights.size)) for node in nodes.contexts]
    assert shared == [int(share * weights.size) for share in (0.01, 0.1, 1.0, 0.5)]


def test_a_site_that_downloads_a_part_goes_on_from_its_own_parameters() -> None:
    experiment = dssgd(download_fraction=0.5, upload_fraction=1.0)
    nodes, size = grid(experiment), start(experiment).size
    begin = initial_weights(network("small-mlp", (1, 8, 8), 10), seed=experiment.seed)
    nothing = encode(SparseUpdate(np.empty(0, np.int64), np.empty(0, np.float32), size))
    first = change(train(nodes, nothing), size).values
    twice = change(train(nodes, nothing, turn=2), size).values
    other = grid(dssgd(upload_fraction=1.0))
    assert change(train(other, begin), size).values.tobytes() == first.tobytes()
    assert change(train(other, begin + first, turn=2), size).values.tobytes() == twice.tobytes()
    some = SparseUpdate.of(np.full(size, 0.25, np.float32), np.arange(3, size, 7))
    mixed = begin + first + twice
    some.overwrite(mixed)
    third = change(train(nodes, encode(some), turn=3), size).values
    assert change(train(other, mixed, turn=3), size).values.tobytes() == third.tobytes()
    assert memory.LOCAL not in other.contexts[1].state  # who downloads all keeps nothing


def test_float16_halves_the_values_on_the_wire() -> None:
    weights = start(small())
    sizes = {}
    for precision in ("float32", "float16"):
        experiment = dssgd(precision=precision, bound=1e-3)
        reply = train(grid(experiment), weights)
        sizes[precision] = len(reply.content.array_records[names.ARRAYS][names.CHANGE].data)
    assert sizes["float32"] - sizes["float16"] == 2 * int(0.1 * weights.size)


def test_a_change_that_is_not_finite_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    for experiment in (small(), dssgd(), dssgd(selection="random_with_threshold")):
        place = workplace.read_workplace(tuple(sorted(to_run_config(experiment).items())))
        start = starting_weights(place.experiment, place.federation)
        broken = np.zeros(place.size, np.float32)
        broken[5] = np.nan
        with monkeypatch.context() as patch:
            patch.setattr(type(place.trainer), "fit", lambda *_, change=broken: Fit(change))
            assert "nan at position 5" in (train(grid(experiment), start).error.reason or "")
