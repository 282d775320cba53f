"""Conditional restricted Boltzmann machines by contrastive divergence and back-propagation. No privacy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fed_dp.clients.crbm import Crbm
from fed_dp.clients.trainer import ClientData, Fit, State
from fed_dp.models import FlatNetwork, Vector
from fed_dp.models.rbm import ConditionalRbm
from fed_dp.models.streams import torch_generator
from fed_dp.sharing.update import MAX_ABS_VALUE


class ContrastiveTrainer:
    """Contrastive divergence in the first round; back-propagation through machine and head in every round.

    Guarantee: none; its change reveals the records. Optimiser: Adam, on batches.
    """

    is_private = False

    def __init__(self, config: Crbm, net: FlatNetwork) -> None:
        assert isinstance(net.network, ConditionalRbm)  # by schema
        self._config, self._net, self._network = config, net, net.network

    def fit(self, weights: Vector, data: ClientData, state: State) -> Fit:
        """Train for the local epochs."""
        net, network = self._net, self._network
        net.load(weights)
        order = torch_generator(data.seed, "shuffle", data.server_round, data.client)
        if data.server_round == 1:
            self._pretrain(data, order)
        self._descend(net.parameters, lambda x, y: net.loss(network(x), y), data, order)
        return Fit(np.clip(net.weights() - weights, -MAX_ABS_VALUE, MAX_ABS_VALUE))

    def _pretrain(self, data: ClientData, order: torch.Generator) -> None:
        """Learn the machine, without its head, by contrastive divergence."""
        gibbs = torch_generator(data.seed, "gibbs", data.server_round, data.client, device=self._net.device)
        own = [p for name, p in self._network.named_parameters() if name not in ("head", "intercept")]
        self._descend(own, lambda x, _: self._divergence(x, gibbs), data, order)

    def _divergence(self, x: Tensor, gibbs: torch.Generator) -> Tensor:
        """Return the free energy of records less that of what some steps of Gibbs sampling make of them.

        Its gradient is that of contrastive divergence (Hinton 2002). Visible units are reconstructed by
        their mean, as Taylor et al. do.
        """
        network = self._network
        v, given = network.units(x)
        with torch.no_grad():
            again = v
            for _ in range(self._config.gibbs_steps):
                h = torch.bernoulli(torch.sigmoid(network.total(again, given)), generator=gibbs)
                again = network.reconstruction(h, given)
        return (network.free_energy(v, given) - network.free_energy(again, given)).mean()

    def _descend(
        self,
        chosen: Sequence[Tensor],
        objective: Callable[[Tensor, Tensor], Tensor],
        data: ClientData,
        order: torch.Generator,
    ) -> None:
        optimizer = torch.optim.Adam(list(chosen), lr=self._config.learning_rate)
        x, y = self._net.inputs(data.x), self._net.targets(data.y)
        for _ in range(self._config.local_epochs):
            for rows in torch.split(torch.randperm(len(y), generator=order), self._config.batch_size):
                batch = rows.to(self._net.device)
                gradients = torch.autograd.grad(
                    objective(x[batch], y[batch]), list(chosen), allow_unused=True
                )
                for parameter, gradient in zip(chosen, gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                self._net.clamp(MAX_ABS_VALUE)
