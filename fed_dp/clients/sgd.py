"""Plain local SGD: the non-private trainer that everything is compared with. No privacy."""

from __future__ import annotations

import torch
from torch.nn import functional

from fed_dp import seeds
from fed_dp.clients.trainer import Fit, Site, State
from fed_dp.experiment import Sgd
from fed_dp.models import FlatNetwork, Vector


class SgdTrainer:
    """Mini-batch SGD over shuffled records. Guarantee: none; its change reveals the records."""

    spends = False

    def __init__(self, config: Sgd, net: FlatNetwork) -> None:
        self._config, self._net = config, net

    def fit(self, weights: Vector, site: Site, state: State) -> Fit:
        """Run the local epochs."""
        config, net = self._config, self._net
        net.load(weights)
        net.network.train()
        optimizer = torch.optim.SGD(
            [net.parameter], config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay
        )
        shuffle = torch.Generator().manual_seed(seeds.integer(site.seed, "shuffle", site.round, site.client))
        x, y = torch.from_numpy(site.x).to(net.device), torch.from_numpy(site.y).to(net.device)
        steps = int(state.get("steps", [0])[0])
        losses = torch.zeros((), device=net.device)
        for _ in range(config.local_epochs):
            order = torch.randperm(len(y), generator=shuffle).to(net.device)
            for rows in order.split(config.batch_size):
                if config.learning_rate_decay:
                    rate = config.learning_rate / (1 + config.learning_rate_decay * steps)
                    optimizer.param_groups[0]["lr"] = rate
                net.gradient.zero_()
                loss = functional.nll_loss(net.network(x[rows]), y[rows])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses += loss.detach() * len(rows)
                steps += 1
        mean = float(losses) / (len(y) * config.local_epochs)
        return Fit(net.weights() - weights, metrics={"loss": mean}, state={"steps": [float(steps)]})
