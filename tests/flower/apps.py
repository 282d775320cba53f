"""A Flower app of somebody else's: it imports nothing of fed_dp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

SIZE = 40
Train = Callable[[np.ndarray, int], np.ndarray]


def arrays(values: np.ndarray, counter: int = 0) -> ArrayRecord:
    """A model of two layers, and a counter that is no number to train."""
    layers = {"a": values[:30].reshape(5, 6), "b": values[30:].astype(np.float64)}
    record = ArrayRecord({name: Array(layer) for name, layer in layers.items()})
    record["steps"] = Array(np.array(counter))
    return record


def values_of(record: ArrayRecord) -> np.ndarray:
    return np.concatenate([record["a"].numpy().ravel(), record["b"].numpy().ravel()]).astype(np.float32)


def towards(weights: np.ndarray, node: int) -> np.ndarray:
    """Move towards a place that every node has for itself."""
    return weights + (node + 1) * np.linspace(-0.1, 0.1, SIZE, dtype=np.float32)


def client_app(mods: Sequence[Any], train: Train = towards, calls: list[int] | None = None) -> ClientApp:
    app = ClientApp(mods=list(mods))

    @app.train()
    def train_message(message: Message, context: Context) -> Message:
        node = int(context.node_config["partition-id"])
        if calls is not None:
            calls.append(node)
        trained = train(values_of(message.content["arrays"]), node)
        metrics = MetricRecord({"loss": 0.5 + node, "num-examples": 10 + node})
        secret = ConfigRecord({"first record": "Ann, 43"})
        content = RecordDict({"arrays": arrays(trained), "metrics": metrics, "secret": secret})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        content = RecordDict({"metrics": MetricRecord({"accuracy": 0.75, "num-examples": 10})})
        return Message(content, reply_to=message)

    return app


class Seen:
    """What a run came to."""

    result: Any = None
    error: Exception | None = None


def server_app(strategy: Any, seen: Seen, *, rounds: int = 2, start: np.ndarray | None = None) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        initial = arrays(np.zeros(SIZE, np.float32) if start is None else start, counter=7)
        seen.result = strategy.start(grid, initial, num_rounds=rounds)

    return app
