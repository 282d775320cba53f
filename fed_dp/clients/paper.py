"""dPA and pCDBN as their papers have them: gradient descent on objectives with noise in their coefficients.

Guarantee: only claimed by the papers (see `accounting.guarantee`). The noise is drawn once per site: it
depends on the seed and the client, not on the round, and is added to the coefficients of every step.
Ablations: without noise, and without truncating the objectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fed_dp import seeds
from fed_dp.clients.trainer import Fit, Site, State
from fed_dp.experiment import Dpa, Pcdbn
from fed_dp.mechanisms import SimulationNoise
from fed_dp.mechanisms.functional import (
    auto_encoder_sensitivity,
    coefficient_noise,
    energy_sensitivity,
    head_sensitivity,
)
from fed_dp.models import FlatNetwork, Vector
from fed_dp.models.paper import AutoEncoder, Cdbn, Crbm, targets
from fed_dp.sharing.update import LARGEST

LOG_2 = float(np.log(2))
Objective = Callable[[Tensor, Tensor], Tensor]


class PaperTrainer:
    """In the first round layers, one after the other, each on its own objective; then head and fine-tuning.

    `epsilon` is the whole budget; each layer and the head get an equal share of it, where the papers
    give each of them the whole and call the whole ε. None: no noise. Optimiser: Adam, on batches.
    With `as_printed`, an auto-encoder normalises by the records' own bounds (Eq. 13), which no noise hides.
    """

    def __init__(
        self, config: Dpa | Pcdbn, net: FlatNetwork, *, epsilon: float | None, as_printed: bool = False
    ) -> None:
        assert isinstance(net.network, AutoEncoder | Cdbn)  # by schema
        self._config, self._net, self._network = config, net, net.network
        self._as_printed = as_printed
        self.spends = epsilon is not None
        depth = len(net.network.tied) if isinstance(net.network, AutoEncoder) else len(net.network.layers)
        self._depth, self._share = depth, None if epsilon is None else epsilon / (depth + 1)

    def fit(self, weights: Vector, site: Site, state: State) -> Fit:
        """Train for the local epochs: in the first round every layer, in every round the whole."""
        net, network = self._net, self._network
        net.load(weights)
        network.train()
        self._records = len(site.y)
        self._place = site
        place = (site.round, site.client)
        with torch.random.fork_rng(devices=[]):  # of dropout
            torch.manual_seed(seeds.integer(site.seed, "dropout", *place))
            order = torch.Generator().manual_seed(seeds.integer(site.seed, "shuffle", *place))
            for layer in range(self._depth if site.round == 1 else 0):
                if isinstance(network, AutoEncoder):
                    chosen, objective = self._auto_encoder(network, layer)
                else:
                    chosen, objective = self._energy(network, layer)
                self._descend(chosen, objective, site, order)
                if self._as_printed and isinstance(network, AutoEncoder):
                    self._look_at_bounds(network, layer, site)
            everything = [p for p in net.parameters if p.requires_grad]
            self._descend(everything, self._head(network), site, order)
        network.eval()
        return Fit(np.clip(net.weights() - weights, -LARGEST, LARGEST))

    # ------------------------------------------------------------------------------- objectives

    def _auto_encoder(self, network: AutoEncoder, layer: int) -> tuple[list[Tensor], Objective]:
        """Reconstruction error (Eq. 7), truncated at degree 2 (Eq. 11), coefficients perturbed."""
        tied = network.tied[layer]
        inputs, hidden = tied.shape
        linear, square = self._pair(
            layer, (inputs, hidden), (hidden, hidden), auto_encoder_sensitivity(inputs, hidden)
        )
        chosen = [tied]
        if layer == 0 and network.behaviour:
            chosen += [network.past, network.influence]

        def objective(x: Tensor, _: Tensor) -> Tensor:
            v, beside = network.below(x, layer)
            h = network.hidden(layer, v.detach(), beside)
            return self._cross_entropy(h @ tied.T, v.detach()) + self._extra(tied, linear, square)

        return chosen, objective

    def _energy(self, network: Cdbn, layer: int) -> tuple[list[Tensor], Objective]:
        """Energy (Eq. 14) of the records less that of their reconstructions (contrastive divergence).

        One noisy copy of the coefficients of W, b and c serves all groups; the polynomial's higher
        monomials get none, which is the least noise that the paper can be read to add.
        """
        crbm = network.layers[layer]
        assert isinstance(crbm, Crbm)
        polynomial = network.polynomial
        patch = crbm.filters[0].numel()
        channels, height, width = network.visible[layer]
        sensitivity = (
            energy_sensitivity(
                polynomial, hidden=height * width, patch=patch, visible=channels * height * width
            )
            if polynomial
            else 1.0
        )
        of_filters, rest = self._pair(layer, tuple(crbm.filters.shape[1:]), (2,), sensitivity)

        def energy(v: Tensor, beside: Tensor | None) -> Tensor:
            total = crbm.total(v, beside)
            bound = (crbm.probability(total, polynomial) * total).sum((1, 2, 3)) + crbm.visible * v.sum(
                (1, 2, 3)
            )
            return -bound.mean()

        def objective(x: Tensor, _: Tensor) -> Tensor:
            v, beside = network.below(x, layer)
            v = v.detach()
            with torch.no_grad():
                again = crbm.reconstruction(crbm.probability(crbm.total(v, beside), polynomial), beside)
            found = energy(v, beside) - energy(again, beside)
            if of_filters is not None and rest is not None:
                added = (of_filters * crbm.filters).sum() + rest[0] * crbm.bias.sum()
                found = found + (added + rest[1] * crbm.visible.sum()) / self._records
            return found / (height * width)

        return list(crbm.parameters()), objective

    def _head(self, network: AutoEncoder | Cdbn) -> Objective:
        """Cross-entropy (Eq. 8), truncated (Eq. 14), coefficients perturbed; for each logistic output."""
        hidden, count = network.head.shape
        sensitivity = head_sensitivity(hidden, count)
        linear, square = self._pair(self._depth, (count, hidden), (hidden, hidden), sensitivity)

        def objective(x: Tensor, y: Tensor) -> Tensor:
            found = self._cross_entropy(network.logits(x), targets(y, count))
            found = found + self._extra(network.head.T, linear, square)
            return found + 1e-5 * network.head.abs().sum()  # the papers' L1

        return objective

    def _cross_entropy(self, z: Tensor, target: Tensor) -> Tensor:
        """Σ [t log(1 + e⁻ᶻ) + (1 − t) log(1 + eᶻ)], or log 2 + (½ − t) z + z²/8; mean over records."""
        if self._config.truncate:
            return (LOG_2 + (0.5 - target) * z + z * z / 8).sum(1).mean()
        return functional.binary_cross_entropy_with_logits(z, target, reduction="none").sum(1).mean()

    # ------------------------------------------------------------------------------------ noise

    def _pair(
        self, layer: int, first: tuple[int, ...], second: tuple[int, ...], sensitivity: float
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the noise of a layer's two kinds of coefficients, the same in every round."""
        if self._share is None:
            return None, None
        site = self._place
        noise = SimulationNoise(seeds.generator(site.seed, "coefficient noise", site.client, layer))
        each = (
            coefficient_noise(shape, sensitivity=sensitivity, epsilon=self._share, noise=noise)
            for shape in (first, second)
        )
        one, two = (torch.from_numpy(drawn.astype(np.float32)).to(self._net.device) for drawn in each)
        return one, two

    def _extra(self, rows: Tensor, linear: Tensor | None, square: Tensor | None) -> Tensor | float:
        """Return what noise adds to an objective of the rows: Σ_j η₁ⱼ·W_j + W_j η₂ W_jᵀ, per record."""
        if linear is None or square is None:
            return 0.0
        return ((linear * rows).sum() + ((rows @ square) * rows).sum()) / self._records

    # --------------------------------------------------------------------------------- descent

    def _descend(
        self, chosen: list[Tensor], objective: Objective, site: Site, order: torch.Generator
    ) -> None:
        optimizer = torch.optim.Adam(chosen, lr=self._config.learning_rate)
        for _ in range(self._config.local_epochs):
            for x, y in self._batches(site, order):
                optimizer.zero_grad()
                gradients = torch.autograd.grad(objective(x, y), chosen, allow_unused=True)
                for parameter, gradient in zip(chosen, gradients, strict=True):
                    parameter.grad = None if gradient is None else torch.nan_to_num(gradient)
                optimizer.step()
                self._net.clamp(LARGEST)

    def _batches(self, site: Site, order: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        device = self._net.device
        for rows in torch.split(torch.randperm(len(site.y), generator=order), self._config.batch_size):
            index = rows.numpy()
            yield torch.from_numpy(site.x[index]).to(device), torch.from_numpy(site.y[index]).to(device)

    @torch.no_grad()
    def _look_at_bounds(self, network: AutoEncoder, layer: int, site: Site) -> None:
        """Put the records' smallest and largest activations into the model: Eq. 13 as printed."""
        v, beside = network.below(torch.from_numpy(site.x).to(self._net.device), layer)
        h = network.hidden(layer, v, beside)
        network.bounds[2 * layer].copy_(h.amin(0))
        network.bounds[2 * layer + 1].copy_(h.amax(0))
