"""dPA and pCDBN as their papers have them: gradient descent on objectives with noise in their coefficients.

Guarantee: only claimed by the papers (see `accounting.guarantee`). The noise is drawn once per site, and is
added to the coefficients of every step: in a simulation it depends on the seed and the client, not on the
round; a real site draws it from the operating system's entropy before its first fit, and keeps it.
Ablations: without noise, and without truncating the objectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fed_dp import seeds
from fed_dp.clients.functional import Functional
from fed_dp.clients.trainer import ClientData, Fit, State
from fed_dp.data.dataset import Floats, Integers
from fed_dp.mechanisms import KeptNoise, LaplaceNoise, Noise, SimulationNoise
from fed_dp.mechanisms.functional import (
    auto_encoder_sensitivity,
    coefficient_noise,
    energy_sensitivity,
    head_sensitivity,
)
from fed_dp.models import FlatNetwork, Vector
from fed_dp.models.paper import AutoEncoder, Cdbn, Crbm, targets
from fed_dp.models.streams import torch_generator
from fed_dp.sharing.update import MAX_ABS_VALUE

LOG_2 = float(np.log(2))
L1 = 1e-5  # of the head, as in the papers
Objective = Callable[[Tensor, Tensor], Tensor]


class PerturbedTrainer:
    """In the first round layers, one after the other, each on its own objective; then head and fine-tuning.

    `epsilon` is the whole budget; each layer and the head get an equal share of it, where the papers
    give each of them the whole and call the whole ε. None: no noise. Optimiser: Adam, on batches.
    With `as_printed`, an auto-encoder normalises by the records' own bounds (Eq. 13), which no noise hides.
    With `as_released`, coefficients have no noise; one noise vector is added to the hidden units of all
    records alike, Lap(Δ/ε)/n, such that their sum over n records gets Lap(Δ/ε). An intercept absorbs it.
    With `balanced`, each batch has as many records of each class, of small classes the same ones more often.
    """

    def __init__(
        self,
        config: Functional,
        net: FlatNetwork,
        *,
        epsilon: float | None,
        as_printed: bool = False,
        as_released: bool = False,
        balanced: bool = False,
    ) -> None:
        assert isinstance(net.network, AutoEncoder | Cdbn)  # by schema
        self._config, self._net, self._network = config, net, net.network
        self._as_printed, self._as_released, self._balanced = as_printed, as_released, balanced
        self.is_private = epsilon is not None
        depth = len(net.network.tied) if isinstance(net.network, AutoEncoder) else len(net.network.layers)
        self._depth, self._share = depth, None if epsilon is None else epsilon / (depth + 1)

    def draw(self, weights: Vector, data: ClientData, noise: Noise) -> Vector:
        """Return Lap(1) for the coefficients of all layers and of the head."""
        return noise.laplace(np.zeros(sum(self._sizes())), scale=1.0).astype(np.float32)

    def fit_with(self, drawn: Vector, weights: Vector, data: ClientData, state: State) -> Fit:
        """Fit with noise that was drawn before."""
        ends = np.cumsum(self._sizes())
        parts = np.split(drawn, ends[:-1])
        return self._fit(weights, data, lambda layer: KeptNoise(parts[layer]))

    def fit(self, weights: Vector, data: ClientData, state: State) -> Fit:
        """Train for the local epochs: in the first round every layer, in every round the whole."""

        def seeded(layer: int) -> LaplaceNoise:
            return SimulationNoise(seeds.generator(data.seed, "coefficient noise", data.client, layer))

        return self._fit(weights, data, seeded)

    def _fit(self, weights: Vector, data: ClientData, noise_of: Callable[[int], LaplaceNoise]) -> Fit:
        net, network = self._net, self._network
        net.load(weights)
        if isinstance(network, AutoEncoder) and not self._as_printed:
            network.public_bounds()  # whatever the server says: noise is for these
        network.train()
        self._records, self._noise_of = len(data.y), noise_of
        place = (data.server_round, data.client)
        with torch.random.fork_rng(devices=[]):  # of dropout
            torch.set_rng_state(torch_generator(data.seed, "dropout", *place).get_state())
            order = torch_generator(data.seed, "shuffle", *place)
            for layer in range(self._depth if data.server_round == 1 else 0):
                if isinstance(network, AutoEncoder):
                    chosen, objective = self._auto_encoder(network, layer)
                else:
                    chosen, objective = self._energy(network, layer)
                self._descend(chosen, objective, data, order)
                if self._as_printed and isinstance(network, AutoEncoder):
                    self._look_at_bounds(network, layer, data)
            everything = [p for p in net.parameters if p.requires_grad]
            self._descend(everything, self._head(network), data, order)
            if isinstance(network, AutoEncoder) and network.intercept is not None:
                with torch.no_grad():  # what was learnt for noisy hidden units, as it is without them
                    network.intercept.add_(self._shared(self._depth, network.head) @ network.head)
        network.eval()
        return Fit(np.clip(net.weights() - weights, -MAX_ABS_VALUE, MAX_ABS_VALUE))

    # ------------------------------------------------------------------------------- objectives

    def _auto_encoder(self, network: AutoEncoder, layer: int) -> tuple[list[Tensor], Objective]:
        """Reconstruction error (Eq. 7), truncated at degree 2 (Eq. 11), coefficients perturbed."""
        tied = network.tied[layer]
        inputs, hidden = tied.shape
        linear, square = self._pair(
            layer, (inputs, hidden), (hidden, hidden), auto_encoder_sensitivity(inputs, hidden)
        )
        shared = self._shared(layer, tied.T)
        chosen = [tied]
        if layer == 0 and network.behaviour:
            chosen += [network.past, network.influence]

        def objective(x: Tensor, _: Tensor) -> Tensor:
            v, beside = network.below(x, layer)
            h = network.hidden(layer, v.detach(), beside) + shared
            return self._cross_entropy(h @ tied.T, v.detach()) + self._extra(tied, linear, square)

        return chosen, objective

    def _energy(self, network: Cdbn, layer: int) -> tuple[list[Tensor], Objective]:
        """Energy (Eq. 14) of the records less that of their reconstructions (contrastive divergence).

        Which coefficients get noise: the paper perturbs "its polynomial coefficients" (Sect. 3.2), those
        of all monomials of W, b and c up to degree L + 1, of one group, with Δ by Eq. 15. Their number rules
        that out: 1.5e7 for 5×5 filters at L = 7, 4e18 for a second layer of 32 × 5×5 (`energy_monomials`).
        Here those of degree 1 get Lap(Δ/ε): of every W_rs, of b and of c; one noisy copy serves all groups.
        None is added to the coefficients of degrees 2 to L + 1, nor to those of the dynamic biases' weights
        (Eqs. 25, 26), for which the paper states no sensitivity. So less is hidden than the paper says: even
        if its lemma held, it would not make this energy private. Nor does it hold: Z changes with W, so that
        no coefficient of Eq. 14 is a number of the records alone; Eq. 15 treats it as fixed.
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
            hidden = (crbm.probability(total, polynomial) * total).sum((1, 2, 3))
            return -(hidden + crbm.visible_bias(beside) * v.sum((1, 2, 3))).mean()

        def objective(x: Tensor, _: Tensor) -> Tensor:
            v, beside = network.below(x, layer)
            v = v.detach()
            with torch.no_grad():
                again = crbm.reconstruction(crbm.probability(crbm.total(v, beside), polynomial), beside)
            result = energy(v, beside) - energy(again, beside)
            if of_filters is not None and rest is not None:
                added = (of_filters * crbm.filters).sum() + rest[0] * crbm.bias.sum()
                result = result + (added + rest[1] * crbm.visible.sum()) / self._records
            return result / (height * width)

        return list(crbm.parameters()), objective

    def _head(self, network: AutoEncoder | Cdbn) -> Objective:
        """Cross-entropy (Eq. 8), truncated (Eq. 14), coefficients perturbed; for each logistic output."""
        hidden, count = network.head.shape
        sensitivity = head_sensitivity(hidden, count)
        linear, square = self._pair(self._depth, (count, hidden), (hidden, hidden), sensitivity)

        shared = self._shared(self._depth, network.head)

        def objective(x: Tensor, y: Tensor) -> Tensor:
            logits = network.outputs(network.features(x) + shared)
            result = self._cross_entropy(logits, targets(y, count))
            result = result + self._extra(network.head.T, linear, square)
            return result + L1 * network.head.abs().sum()

        return objective

    def _cross_entropy(self, z: Tensor, target: Tensor) -> Tensor:
        """Σ [t log(1 + e⁻ᶻ) + (1 − t) log(1 + eᶻ)], or log 2 + (½ − t) z + z²/8; mean over records."""
        if self._config.truncate:
            return (LOG_2 + (0.5 - target) * z + z * z / 8).sum(1).mean()
        return functional.binary_cross_entropy_with_logits(z, target, reduction="none").sum(1).mean()

    # ------------------------------------------------------------------------------------ noise

    def _sizes(self) -> list[int]:
        """Return how many coefficients of each layer, and last of the head, get noise."""
        network = self._network
        hidden, count = network.head.shape
        if isinstance(network, AutoEncoder):
            sizes = [tied.numel() + tied.shape[1] ** 2 for tied in network.tied]
        else:
            sizes = [crbm.filters[0].numel() + 2 for crbm in network.layers if isinstance(crbm, Crbm)]
        return [*sizes, count * hidden + hidden**2]

    def _pair(
        self, layer: int, first: tuple[int, ...], second: tuple[int, ...], sensitivity: float
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the noise of a layer's two kinds of coefficients, the same in every round."""
        if self._share is None or self._as_released:
            return None, None
        noise = self._noise_of(layer)
        each = (
            coefficient_noise(shape, sensitivity=sensitivity, epsilon=self._share, noise=noise)
            for shape in (first, second)
        )
        one, two = (torch.from_numpy(drawn.astype(np.float32)).to(self._net.device) for drawn in each)
        return one, two

    def _shared(self, layer: int, rows: Tensor) -> Tensor:
        """Return the noise that all records' hidden units get alike, as released; else none."""
        hidden = len(rows)
        if self._share is None or not self._as_released:
            return torch.zeros(1, device=self._net.device).expand(hidden)
        inputs = rows.shape[1]
        delta = head_sensitivity(hidden, inputs)
        if layer < self._depth:
            delta = auto_encoder_sensitivity(inputs, hidden)
        drawn = coefficient_noise(
            (hidden,), sensitivity=delta, epsilon=self._share, noise=self._noise_of(layer)
        )
        return torch.from_numpy((drawn / self._records).astype(np.float32)).to(self._net.device)

    def _extra(self, rows: Tensor, linear: Tensor | None, square: Tensor | None) -> Tensor | float:
        """Return what noise adds to an objective of the rows: Σ_j η₁ⱼ·W_j + W_j η₂ W_jᵀ, per record."""
        if linear is None or square is None:
            return 0.0
        return ((linear * rows).sum() + ((rows @ square) * rows).sum()) / self._records

    # --------------------------------------------------------------------------------- descent

    def _descend(
        self, chosen: list[Tensor], objective: Objective, data: ClientData, order: torch.Generator
    ) -> None:
        optimizer = torch.optim.Adam(chosen, lr=self._config.learning_rate)
        for _ in range(self._config.local_epochs):
            for x, y in self._batches(data, order):
                optimizer.zero_grad()
                gradients = torch.autograd.grad(objective(x, y), chosen, allow_unused=True)
                for parameter, gradient in zip(chosen, gradients, strict=True):
                    parameter.grad = None if gradient is None else torch.nan_to_num(gradient)
                optimizer.step()
                self._net.clamp(MAX_ABS_VALUE)

    def _batches(self, data: ClientData, order: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        device = self._net.device
        size = self._config.batch_size
        if self._balanced:
            epoch = balanced_batches(torch.from_numpy(data.y), size, order)
        else:
            epoch = iter(torch.split(torch.randperm(len(data.y), generator=order), size))
        for rows in epoch:
            index = rows.numpy()
            yield torch.from_numpy(data.x[index]).to(device), torch.from_numpy(data.y[index]).to(device)

    @torch.no_grad()
    def _look_at_bounds(self, network: AutoEncoder, layer: int, data: ClientData) -> None:
        """Put the records' smallest and largest activations into the model: Eq. 13 as printed."""
        v, beside = network.below(torch.from_numpy(data.x).to(self._net.device), layer)
        h = network.hidden(layer, v, beside)
        network.bounds[2 * layer].copy_(h.amin(0))
        network.bounds[2 * layer + 1].copy_(h.amax(0))

    @torch.no_grad()
    def bounds_apart(self, weights: Vector, x: Floats) -> float:
        """Return how far the bounds in weights (Eq. 13) are from those of these records' activations."""
        network = self._network
        assert isinstance(network, AutoEncoder)
        self._net.load(weights)
        inputs = torch.from_numpy(x).to(self._net.device)
        apart = 0.0
        for layer in range(self._depth):
            h = network.hidden(layer, *network.below(inputs, layer))
            low, high = network.bounds[2 * layer], network.bounds[2 * layer + 1]
            apart += float((low - h.amin(0)).abs().sum() + (high - h.amax(0)).abs().sum())
        return apart


def balanced_batches(y: Tensor, size: int, order: torch.Generator) -> Iterator[Tensor]:
    """Yield an epoch's batches of about `size` rows, in each as many of every class that there is.

    Rows of a class are drawn with replacement.
    """
    classes = [torch.nonzero(y == label).flatten() for label in torch.unique(y)]
    each = max(1, size // len(classes))
    for _ in range(-(-len(y) // size)):
        drawn = [rows[torch.randint(len(rows), (each,), generator=order)] for rows in classes]
        yield torch.cat(drawn)


def head_residual(net: FlatNetwork, weights: Vector, x: Floats, y: Integers) -> float:
    """Return how far weights are from a head that was fitted to these records without noise.

    The length of the gradient of the truncated cross-entropy (and the L1 term) by head and intercept: 0 where
    training has come to its end. Noise that all records' hidden units share is in the intercept, alone.
    """
    network = net.network
    assert isinstance(network, AutoEncoder)
    net.load(weights)
    with torch.no_grad():
        h = network.features(torch.from_numpy(x).to(net.device))
        z, target = network.outputs(h), targets(torch.from_numpy(y).to(net.device), network.head.shape[1])
        slope = (0.5 - target + z / 4) / len(y)
        return float(torch.cat([h.T @ slope + L1 * network.head.sign(), slope.sum(0, keepdim=True)]).norm())
