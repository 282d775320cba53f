"""Plain local SGD, also selective: the non-private trainer that everything is compared with. No privacy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from fed_dp.clients.sgd import Sgd
from fed_dp.clients.sgd.batch import batch_rows, train_batch
from fed_dp.clients.trainer import ClientData, Fit, FitRequest, State
from fed_dp.models import FlatNetwork, Vector
from fed_dp.models.client_batches import best_batch
from fed_dp.models.optimizers import optimizer_of
from fed_dp.models.perceptrons import Chain
from fed_dp.sharing.selection import largest_values, share


class SgdTrainer:
    """Mini-batch SGD over shuffled records. Guarantee: none; its change reveals the records.

    The step is written out because it is the hot path of every simulation: it is 15 % of a
    client-round faster than torch.optim.SGD on small networks, and a test holds it equal to it.
    With update_fraction θ < 1 it is selective SGD (Shokri and Shmatikov 2015, §4): each step changes
    only the θ·|w| parameters whose move is largest.
    """

    is_private = False

    def __init__(self, config: Sgd, net: FlatNetwork, *, clients_at_once: int | None = None) -> None:
        self._config, self._net = config, net
        alone = config.update_fraction < 1 or config.optimizer != "sgd"
        self.clients_at_once = 1 if alone else best_batch(net, clients_at_once)
        # A perceptron's numbers do not depend on how many are trained at once, be it one.
        self._always = self.clients_at_once > 1 and Chain.of(net) is not None

    def fit(self, weights: Vector, data: ClientData, state: State) -> Fit:
        """Run the local epochs."""
        config, net = self._config, self._net
        if self._always:
            return self.fit_batch([FitRequest(weights, data, state)])[0]
        net.load(weights)
        network = net.trained
        network.train()
        x, y = net.inputs(data.x), net.targets(data.y)
        taken = int(state.get("steps", [0])[0])
        losses: list[Tensor] = []
        velocity: list[Tensor] = []
        optimizer = None if config.optimizer == "sgd" else self._optimizer()
        for rows in batch_rows(config, data):
            batch = rows.to(net.device)
            labels = y.index_select(0, batch)
            loss = net.loss(network(x.index_select(0, batch)), labels)
            gradients = torch.autograd.grad(loss, net.parameters)
            if optimizer is None:
                self._step(gradients, taken, velocity)
            else:
                self._step_with(optimizer, gradients, taken)
            losses.append(loss.detach() * len(labels))
            taken += 1
        mean = float(torch.stack(losses).sum()) / (len(y) * config.local_epochs)
        return Fit(net.weights() - weights, metrics={"loss": mean}, state={"steps": [float(taken)]})

    def fit_batch(self, requests: Sequence[FitRequest]) -> list[Fit]:
        """Run the local epochs of several clients."""
        return train_batch(self._config, self._net, requests)

    def _optimizer(self) -> Optimizer:
        config = self._config
        return optimizer_of(
            config.optimizer,
            self._net.parameters,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
        )

    def _step_with(self, optimizer: Optimizer, gradients: Sequence[Tensor], taken: int) -> None:
        """Let an optimiser of torch take a step, at the rate of so many steps taken."""
        config = self._config
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate / (1 + config.learning_rate_decay * taken)
        for parameter, gradient in zip(self._net.parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _step(self, gradients: tuple[Tensor, ...], taken: int, velocity: list[Tensor]) -> None:
        """Move by −η v with v = μ v + g + λ w; η falls as 1 / (1 + decay · steps taken)."""
        config, parameters = self._config, self._net.parameters
        rate = config.learning_rate / (1 + config.learning_rate_decay * taken)
        moves = list(gradients)
        if config.weight_decay:
            torch._foreach_add_(moves, parameters, alpha=config.weight_decay)
        if config.momentum:
            if velocity:
                torch._foreach_mul_(velocity, config.momentum)
                torch._foreach_add_(velocity, moves)
            else:
                velocity += [move.clone() for move in moves]
            moves = velocity
        if config.update_fraction < 1:
            self._selective(moves, rate)
        else:
            torch._foreach_add_(parameters, moves, alpha=-rate)

    def _selective(self, moves: list[Tensor], rate: float) -> None:
        """Apply the largest moves of all layers together (torch.topk takes four times as long)."""
        flat = self._net.flat
        move = torch.cat([m.reshape(-1) for m in moves])
        chosen = largest_values(move.cpu().numpy(), share(self._config.update_fraction, flat.numel()))
        index = torch.from_numpy(chosen).to(flat.device)
        flat.index_add_(0, index, move.index_select(0, index), alpha=-rate)
