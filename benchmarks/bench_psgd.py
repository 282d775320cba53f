"""psgd/vs-opacus-loop: one round of the trainer against Opacus' usual loop on the same records.

The usual loop: PrivacyEngine.make_private, its Poisson DataLoader, per-record gradients by hooks.
Both on one thread, with the same network, sampling rate and number of steps; alternating, medians.
"""

from __future__ import annotations

import warnings

import entries
import numpy as np
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fed_dp.accounting import SampledGaussian
from fed_dp.clients.psgd import Psgd
from fed_dp.clients.psgd.trainer import PsgdTrainer
from fed_dp.clients.trainer import ClientData
from fed_dp.models import FlatNetwork, use_one_thread
from fed_dp.models.network import NetworkSpec

RECORDS, BATCH, REPEATS, LIMIT = 600, 30, 5, 1.0


def main() -> None:
    use_one_thread()
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(RECORDS, 1, 32, 32)).astype(np.float32)
    y = rng.integers(0, 10, RECORDS)
    config = Psgd(name="psgd", sample_rate=BATCH / RECORDS, learning_rate=0.1)
    net = FlatNetwork(NetworkSpec.named("dssgd-mlp", (1, 32, 32), 10))
    release = SampledGaussian(1.0, config.sample_rate, config.steps_per_round)
    trainer = PsgdTrainer(config, net, release=release)
    weights = net.weights()

    def ours() -> None:
        trainer.fit(weights, ClientData(x, y, 0, 1, 0), {})

    model = FlatNetwork(NetworkSpec.named("dssgd-mlp", (1, 32, 32), 10)).network
    data = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    private, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data_loader=DataLoader(data, batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )

    def usual() -> None:
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.nll_loss(private(inputs), labels).backward()
            optimizer.step()

    baseline, value = entries.medians(usual, ours, repeats=REPEATS + 1, dropped=1)
    entries.add_times("psgd/vs-opacus-loop", value, baseline=baseline, limit=LIMIT)


if __name__ == "__main__":
    main()
