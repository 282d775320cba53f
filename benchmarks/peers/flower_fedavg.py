"""Flower's own simulation of its own FedAvg: the same model, records and local work. Prints seconds as JSON.

Usage: python flower_fedavg.py TRAIN.npz CLIENTS ROUNDS
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from work import BATCH, LEARNING_RATE, RECORDS, network, records

PATH, CLIENTS, ROUNDS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    x, y = records(PATH, int(context.node_config["partition-id"]))
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for inputs, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
        optimizer.zero_grad()
        nn.functional.nll_loss(model(inputs), labels).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": RECORDS})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


class Timed(FedAvg):
    """FedAvg that notes when each round's training is over."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.ends: list[float] = []

    def aggregate_train(self, *arguments: Any, **options: Any) -> Any:
        """Aggregate, then look at the clock."""
        found = super().aggregate_train(*arguments, **options)
        self.ends.append(time.time())
        return found


server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
    start = ArrayRecord(network().state_dict())
    strategy.start(grid=grid, initial_arrays=start, num_rounds=ROUNDS)
    spent = strategy.ends[-1] - strategy.ends[0]
    print(json.dumps({"seconds": spent / (CLIENTS * (ROUNDS - 1))}), flush=True)


if __name__ == "__main__":
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=CLIENTS, backend_config=resources)  # type: ignore[arg-type]
