"""Plain local SGD of several clients at once, equal to one after the other but for rounding. No privacy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fed_dp.clients.sgd import Sgd
from fed_dp.clients.trainer import ClientData, Fit, FitRequest
from fed_dp.models import FlatNetwork
from fed_dp.models.client_batches import Batches, client_batch_of, descend
from fed_dp.models.flat import flat_rows
from fed_dp.models.streams import torch_generator


@torch.no_grad()
def train_batch(config: Sgd, net: FlatNetwork, requests: Sequence[FitRequest]) -> list[Fit]:
    """Run the local epochs of all tasks; those with the most steps first, so that others can leave early."""
    steps = [config.local_epochs * -(-len(request.data.y) // config.batch_size) for request in requests]
    places = sorted(range(len(requests)), key=lambda k: -steps[k])
    batch = _Batch(config, net, [requests[k] for k in places], [steps[k] for k in places])
    batch.train()
    fits = dict(zip(places, batch.fits(), strict=True))
    return [fits[k] for k in range(len(requests))]


def batch_rows(config: Sgd, data: ClientData) -> list[Tensor]:
    """Return the rows of every batch of a client's round, in order."""
    shuffle = torch_generator(data.seed, "shuffle", data.server_round, data.client)
    rows: list[Tensor] = []
    for _ in range(config.local_epochs):
        rows += torch.split(torch.randperm(len(data.y), generator=shuffle), config.batch_size)
    return rows


class _Batch:
    def __init__(
        self, config: Sgd, net: FlatNetwork, requests: Sequence[FitRequest], steps: Sequence[int]
    ) -> None:
        self._config, self._tasks, self._steps = config, requests, steps
        self._nets = client_batch_of(net, [request.weights for request in requests])
        x = [net.inputs(request.data.x) for request in requests]
        y = [net.targets(request.data.y) for request in requests]
        self._batches = Batches(x, y, config.batch_size)
        self._taken = [int(request.state.get("steps", [0])[0]) for request in requests]
        self._losses = torch.zeros(len(requests), device=net.device)
        self._velocity: list[Tensor] = []
        self._device = net.device

    def train(self) -> None:
        """Take all steps."""
        plans = [batch_rows(self._config, request.data) for request in self._tasks]
        for step in range(self._steps[0]):
            going = sum(step < each for each in self._steps)
            self._step(step, [plan[step].to(self._device) for plan in plans[:going]])

    def _step(self, step: int, rows: Sequence[Tensor]) -> None:
        """Move by −η v with v = μ v + g + λ w; η falls as 1 / (1 + decay · steps taken)."""
        config, count = self._config, len(rows)
        x, y, there = self._batches.gather(rows)
        parameters = [each[:count] for each in self._nets.parameters]
        decay = config.learning_rate_decay
        rates = there.new_tensor(
            [config.learning_rate / (1 + decay * (step + t)) for t in self._taken[:count]]
        )
        each = there / there.sum(1, keepdim=True)
        if not config.momentum and not config.weight_decay:
            losses = self._nets.add_gradients(parameters, x, y, each * -rates[:, None])
        else:
            if not self._velocity:
                self._velocity = [torch.zeros_like(parameter) for parameter in parameters]
            losses = self._nets.add_gradients(self._velocity, x, y, each, keep=config.momentum)
            for parameter, velocity in zip(parameters, self._velocity, strict=True):
                moved = velocity[:count]
                if config.weight_decay:
                    moved.add_(parameter, alpha=config.weight_decay)
                descend(parameter, moved, rates)
        self._losses[:count] += (losses * there).sum(1)

    def fits(self) -> list[Fit]:
        """Return what each client's trainer returns."""
        changed = flat_rows(self._nets.parameters).cpu().numpy()
        result = []
        for request, weights, loss, steps, taken in zip(
            self._tasks, changed, self._losses.tolist(), self._steps, self._taken, strict=True
        ):
            mean = loss / (len(request.data.y) * self._config.local_epochs)
            result.append(Fit(weights - request.weights, {"loss": mean}, {"steps": [float(taken + steps)]}))
        return result
