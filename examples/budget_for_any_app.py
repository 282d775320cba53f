"""A budget for any ClientApp: a mod clips, charges a durable ledger, adds noise, and refuses over budget."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

import fed_dp
from fed_dp.accounting import Ledger


def client_app(ledger: Path) -> ClientApp:
    """Return an app as Flower's documentation has them; the one line about privacy is `mods`."""
    app = ClientApp(mods=[fed_dp.flower.private_upload(clip=1.0, noise_multiplier=1.1, ledger=ledger)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = nn.Linear(4, 1)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        rng = np.random.default_rng(context.node_config["partition-id"])
        x = torch.from_numpy(rng.normal(size=(200, 4)).astype(np.float32))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        metrics = MetricRecord({"loss": float(loss.detach()), "num-examples": 200})  # which stay at the site
        return Message(
            RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message
        )

    return app


def server_app(rounds: int) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
        result = strategy.start(grid, ArrayRecord(nn.Linear(4, 1).state_dict()), num_rounds=rounds)
        for server_round, metrics in result.train_metrics_clientapp.items():
            print(f"round {server_round}: total ε so far {metrics['epsilon']:.3f}")

    return app


def main(rounds: int = 5) -> float:
    """Spend as much of a ledger of ε = 4 as there is: over that, the site sends nothing."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "site.sqlite"
        Ledger.create(path, site="hospital", budget=fed_dp.Budget(epsilon=4, delta=1e-5))
        fed_dp.flower.simulate(server_app(rounds), client_app(path), nodes=1)
        account, entries = Ledger(path).read()
        print(f"the ledger: {len(entries)} charges, ε = {account.spent:.3f} of 4 for all its records")
        return account.spent


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
