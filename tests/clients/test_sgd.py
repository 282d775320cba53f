from __future__ import annotations

import numpy as np
import pytest
import torch

from fed_dp.clients.sgd import Sgd
from fed_dp.clients.sgd.trainer import SgdTrainer
from fed_dp.clients.trainer import ClientData
from fed_dp.models import FlatNetwork
from fed_dp.models.streams import torch_generator
from tests.networks import network


def records() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(30, 64)).astype(np.float32), rng.integers(0, 10, 30)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"weight_decay": 0.01},
        {"momentum": 0.5, "weight_decay": 0.1, "local_epochs": 3},
        {"learning_rate_decay": 0.1},
    ],
)
def test_the_written_out_step_equals_torch_optim(options: dict[str, float]) -> None:
    config = Sgd(learning_rate=0.1, batch_size=7, **options)  # type: ignore[arg-type]
    x, y = records()
    net = FlatNetwork(network("small-mlp", (64,), 10))
    start = net.weights()
    fit = SgdTrainer(config, net).fit(start, ClientData(x, y, 4, 2, 9), {})

    reference = FlatNetwork(network("small-mlp", (64,), 10))
    reference.load(start)
    optimizer = torch.optim.SGD(
        reference.network.parameters(), 0.1, momentum=config.momentum, weight_decay=config.weight_decay
    )
    shuffle = torch_generator(9, "shuffle", 2, 4)
    steps = 0
    for _ in range(config.local_epochs):
        for rows in torch.split(torch.randperm(30, generator=shuffle), 7):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + config.learning_rate_decay * steps)
            optimizer.zero_grad()
            inputs, labels = torch.from_numpy(x)[rows], torch.from_numpy(y)[rows]
            torch.nn.functional.nll_loss(reference.network(inputs), labels).backward()
            optimizer.step()
            steps += 1
    assert np.allclose(start + fit.change, reference.weights(), atol=1e-6)
    assert fit.state == {"steps": [float(steps)]}


def test_the_decay_of_the_learning_rate_goes_on_over_rounds() -> None:
    config = Sgd(learning_rate_decay=1.0)
    net = FlatNetwork(network("linear", (4,), 2))
    x, y = np.ones((8, 4), np.float32), np.zeros(8, np.int64)
    start = net.weights()
    trainer = SgdTrainer(config, net)
    early = trainer.fit(start, ClientData(x, y, 0, 1, 0), {})
    late = trainer.fit(start, ClientData(x, y, 0, 1, 0), {"steps": [99.0]})
    assert np.allclose(late.change, early.change / 100, atol=1e-7)


@pytest.mark.parametrize("theta", [0.001, 0.1, 0.9])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_selective_sgd_changes_only_the_largest_share_in_each_step(theta: float, momentum: float) -> None:
    config = Sgd(learning_rate=0.1, momentum=momentum, batch_size=7, update_fraction=theta)
    x, y = records()
    net = FlatNetwork(network("small-mlp", (64,), 10))
    start = net.weights()
    fit = SgdTrainer(config, net).fit(start, ClientData(x, y, 4, 2, 9), {})

    net.load(start)
    velocity = [0.0] * net.size
    count = int(theta * net.size)
    shuffle = torch_generator(9, "shuffle", 2, 4)
    for rows in torch.split(torch.randperm(30, generator=shuffle), 7):
        loss = torch.nn.functional.nll_loss(net.network(torch.from_numpy(x)[rows]), torch.from_numpy(y)[rows])
        parts = torch.autograd.grad(loss, net.parameters)
        gradient = [float(g) for part in parts for g in part.reshape(-1)]
        velocity = [momentum * v + g for v, g in zip(velocity, gradient, strict=True)]
        largest = sorted(range(net.size), key=lambda j: -abs(velocity[j]))[:count]
        for j in largest:
            net.flat[j] -= 0.1 * velocity[j]
    assert np.allclose(start + fit.change, net.weights(), atol=1e-6)
    assert 0 < np.count_nonzero(fit.change) <= 5 * count
