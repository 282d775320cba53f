"""The message that leaves a site, and what a curious server can make it say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from fed_dp.clients import app as client_app
from fed_dp.experiment import Experiment, to_run_config
from fed_dp.experiment.federation import federation
from fed_dp.models import initial_weights
from fed_dp.sharing import message as names
from fed_dp.simulations.grid import InProcessGrid
from tests.conftest import small

CLIENTS = 4


def grid(experiment: Experiment) -> InProcessGrid:
    return InProcessGrid(CLIENTS, dict(to_run_config(experiment)), client_app.app)


def start(experiment: Experiment) -> np.ndarray:
    data = federation(experiment).dataset
    return initial_weights(experiment.model.name, data.shape, data.classes, seed=1)


def train(nodes: InProcessGrid, weights: np.ndarray, node: int = 1) -> Message:
    content = RecordDict(
        {
            names.ARRAYS: ArrayRecord({names.WEIGHTS: Array(weights)}),
            names.CONFIG: ConfigRecord({names.ROUND: 1}),
        }
    )
    (reply,) = nodes.send_and_receive([Message(content, node, MessageType.TRAIN, group_id="1")])
    return reply


def test_a_private_message_depends_on_the_records_through_the_change_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = small("psgd")
    replies = []
    for shift in (0, 1):
        nodes = grid(experiment)
        original = client_app.Site
        monkeypatch.setattr(
            client_app, "Site", lambda x, y, *rest, s=shift, site=original: site(x, np.roll(y, s), *rest)
        )
        replies.append(train(nodes, start(experiment)).content)
        monkeypatch.setattr(client_app, "Site", original)
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
    for weights in (overflowing(experiment, names.LARGEST), np.full_like(start(experiment), names.LARGEST)):
        for node in nodes.contexts:
            nodes.contexts[node].state.clear()
            change = train(nodes, weights, node).content.array_records[names.ARRAYS][names.CHANGE].numpy()
            assert np.isfinite(change).all()


def test_an_unexpected_error_of_a_private_trainer_is_told_by_its_kind_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind, told in (("psgd", "training failed (ValueError); nothing was sent"), ("sgd", "secret 42")):
        nodes = grid(small(kind))
        experiment = small(kind)

        def fail(*_: Any) -> Any:
            raise ValueError("secret 42")

        place = client_app._workplace(tuple(sorted(to_run_config(experiment).items())))
        monkeypatch.setattr(type(place.trainer), "fit", fail)
        reason = train(nodes, start(experiment)).error.reason or ""
        assert told in reason
        assert ("secret" in reason) == (kind == "sgd")


def test_a_message_that_is_none_is_refused(tmp_path: Path) -> None:
    nodes = grid(small())
    (reply,) = nodes.send_and_receive([Message(RecordDict(), 1, MessageType.TRAIN, group_id="1")])
    assert "needs the records" in (reply.error.reason or "")
    assert "expected shape" in (train(nodes, np.zeros(3, np.float32)).error.reason or "")
    stray = InProcessGrid(99, dict(to_run_config(small())), client_app.app)
    reason = train(stray, start(small()), 80).error.reason or ""
    assert "partition-id = 79: the experiment has clients 0..3" in reason
