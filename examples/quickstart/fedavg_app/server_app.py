"""A Flower ServerApp (message API), as `flwr new` makes one."""

from __future__ import annotations

from fedavg_app.task import Net, load_data, test
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    arrays = ArrayRecord(Net().state_dict())
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0)
    rounds = context.run_config["num-server-rounds"]
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds, evaluate_fn=accuracy)
    print(f"final accuracy {result.evaluate_metrics_serverapp[rounds]['accuracy']:.4f}")


def accuracy(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": test(model, load_data(0, 1)[1])})
