"""pfl's simulation of federated averaging: the same model, records and local work. Prints seconds as JSON.

Usage: torchrun --nproc-per-node CORES pfl_fedavg.py TRAIN.npz CLIENTS ROUNDS
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn
from work import BATCH, LEARNING_RATE, network, records

PATH, CLIENTS, ROUNDS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


class Network(nn.Module):
    """The model, as pfl wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def loss(self, x: torch.Tensor, y: torch.Tensor, is_eval: bool = False) -> torch.Tensor:
        """Return the mean negative log-likelihood."""
        return nn.functional.nll_loss(self.layers(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor, is_eval: bool = True) -> dict[str, Any]:
        """Return what an evaluation would tell; there is none."""
        return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


class Clock(TrainingProcessCallback):  # type: ignore[misc]
    """Notes when each round is over."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
        """Look at the clock."""
        self.ends.append(time.time())
        return False, Metrics()


def main() -> None:
    torch.set_num_threads(1)

    def of_user(user: int) -> Dataset:
        return Dataset(records(PATH, int(user)))  # pfl takes batches in order

    users = list(range(CLIENTS))
    data = FederatedDataset(of_user, get_user_sampler("minimize_reuse", users))
    net, clock = Network(), Clock()
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0))
    params = NNAlgorithmParams(
        central_num_iterations=ROUNDS,
        evaluation_frequency=10 * ROUNDS,
        train_cohort_size=CLIENTS,
        val_cohort_size=None,
    )
    FederatedAveraging().run(
        backend=SimulatedBackend(data, data),
        model=model,
        algorithm_params=params,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=1000),
        callbacks=[clock],
    )
    if os.environ.get("RANK", "0") == "0":
        spent = clock.ends[-1] - clock.ends[0]
        print(json.dumps({"seconds": spent / (CLIENTS * (ROUNDS - 1))}), flush=True)


if __name__ == "__main__":
    main()
