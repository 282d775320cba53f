"""AdLM and ILM as their paper has them: noise once on inputs and on the coefficients of the loss.

Reference: Phan, Wu, Hu, Dou, "Adaptive Laplace Mechanism", ICDM 2017 (arXiv 1709.05750v2), Algorithm 1.
Guarantee: only claimed by the paper (see `accounting.guarantee`). As its program was released, one noise
image is shared by all records: refuted, since differences of records are then exact.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fed_dp import seeds
from fed_dp.clients.adlm import LaplaceMechanism
from fed_dp.clients.trainer import ClientData, Fit, State
from fed_dp.mechanisms import SimulationNoise
from fed_dp.mechanisms.functional import (
    coefficient_noise,
    first_layer_sensitivity,
    head_sensitivity,
    relevance_sensitivity,
)
from fed_dp.models import FlatNetwork, Vector
from fed_dp.models.paper import AdlmCnn, targets, to_unit_interval
from fed_dp.models.relevance import relevance
from fed_dp.models.streams import torch_generator
from fed_dp.sharing.update import MAX_ABS_VALUE

RELEVANCE = "relevance"  # in the site's state
MIN_RELEVANCE = 1e-6  # of the mean relevance: an input of none would get noise without bound


class AdlmTrainer:
    """Relevance by a network trained without noise, then noisy; noisy inputs and labels; then plain descent.

    Noise depends on the seed and the client, not on the round: it is drawn once. `epsilon` is the whole
    budget, ε1 + ε2 + ε3; None: no noise. `shared`: one noise image for all records.
    """

    def __init__(
        self, config: LaplaceMechanism, net: FlatNetwork, *, epsilon: float | None, shared: bool
    ) -> None:
        assert isinstance(net.network, AdlmCnn)  # by schema
        self._config, self._net, self._network, self._shared = config, net, net.network, shared
        self.is_private = epsilon is not None
        one, three = config.relevance_share, config.label_share
        self._budgets = (
            None if epsilon is None else (one * epsilon, (1 - one - three) * epsilon, three * epsilon)
        )

    def fit(self, weights: Vector, data: ClientData, state: State) -> Fit:
        """Train for the local epochs on inputs and labels that noise was added to, once."""
        net, network, config = self._net, self._network, self._config
        inputs = to_unit_interval(torch.from_numpy(data.x))
        kept = dict(state)
        if self._budgets is not None and config.relevance_share and RELEVANCE not in kept:
            kept[RELEVANCE] = self._relevances(weights, data, inputs).tolist()
        bias, inputs, linear, square = self._noisy(data, inputs, kept)
        net.load(weights)
        order = torch_generator(data.seed, "shuffle", data.server_round, data.client)
        optimizer = torch.optim.Adam(net.parameters, lr=config.learning_rate)
        for _ in range(config.local_epochs):
            for rows in torch.split(torch.randperm(len(data.y), generator=order), config.batch_size):
                optimizer.zero_grad()
                z = network.logits(inputs[rows].to(net.device), bias)
                loss = self._loss(z, linear[rows].to(net.device), square[rows].to(net.device))
                torch.autograd.backward(loss)
                for parameter in net.parameters:
                    if parameter.grad is not None:
                        parameter.grad.nan_to_num_()
                optimizer.step()
                net.clamp(MAX_ABS_VALUE)
        optimizer.zero_grad(set_to_none=True)
        return Fit(np.clip(net.weights() - weights, -MAX_ABS_VALUE, MAX_ABS_VALUE), state=kept)

    def seen(self, weights: Vector, data: ClientData) -> np.ndarray:
        """Return the inputs that training looks at: with the noise that the paper says makes them private."""
        inputs = to_unit_interval(torch.from_numpy(data.x))
        kept: State = {}
        if self._budgets is not None and self._config.relevance_share:
            kept = {RELEVANCE: self._relevances(weights, data, inputs).tolist()}
        return np.asarray(self._noisy(data, inputs, kept)[1].flatten(1).numpy())

    def _loss(self, z: Tensor, linear: Tensor, square: Tensor) -> Tensor:
        """Σ_l log 2 + φ₁ z + φ₂ z² (Eq. 25), or, not truncated, the cross-entropy; mean over records."""
        if self._config.truncate:
            return (linear * z + square * z * z).sum(1).mean()
        return functional.binary_cross_entropy_with_logits(z, 0.5 - linear, reduction="none").sum(1).mean()

    def _noisy(self, data: ClientData, inputs: Tensor, kept: State) -> tuple[float, Tensor, Tensor, Tensor]:
        """Return the static bias 1, inputs, φ₁ = ½ − y and φ₂ = ⅛, with Lap(Δ/ε)/|L| (lines 12–19)."""
        network, batch = self._network, self._config.batch_size
        outputs = network.head.out_features
        linear = 0.5 - targets(torch.from_numpy(data.y), outputs)
        square = torch.full_like(linear, 1 / 8)
        if self._budgets is None:
            return 1.0, inputs, linear, square
        _, of_inputs, of_labels = self._budgets
        noise = SimulationNoise(seeds.generator(data.seed, "coefficient noise", data.client))
        size = inputs[0].numel()
        beta = np.asarray(kept.get(RELEVANCE, np.ones(size)))
        count = 1 if self._shared else len(inputs)
        of_layer = first_layer_sensitivity(network.first, size)
        drawn = coefficient_noise((count, size), sensitivity=of_layer, epsilon=of_inputs, noise=noise)
        bias = coefficient_noise((1,), sensitivity=of_layer, epsilon=of_inputs, noise=noise) / batch
        image = torch.from_numpy((drawn / (beta * batch)).astype(np.float32))
        delta = head_sensitivity(network.head.in_features, outputs)
        added = [
            coefficient_noise(tuple(linear.shape), sensitivity=delta, epsilon=of_labels, noise=noise) / batch
            for _ in range(2)
        ]
        first, second = (torch.from_numpy(part.astype(np.float32)) for part in added)
        noisy = inputs + image.reshape(count, *inputs.shape[1:])
        return 1.0 + float(bias[0]), noisy, linear + first, square + second

    def _relevances(self, weights: Vector, data: ClientData, inputs: Tensor) -> np.ndarray:
        """Return β_j = d |R_j| / Σ |R| of relevances under a network trained without noise (lines 1–7, 11).

        Each record's relevances are mapped to [0, 1], so that Δ_R = 2d/|D|.
        """
        assert self._budgets is not None
        net, network, config = self._net, self._network, self._config
        net.load(weights)
        y = torch.from_numpy(data.y)
        order = torch_generator(data.seed, "relevance", data.client)
        optimizer = torch.optim.Adam(net.parameters, lr=1e-3)
        outputs = network.head.out_features
        for _ in range(config.relevance_epochs):
            for rows in torch.split(torch.randperm(len(y), generator=order), 64):
                optimizer.zero_grad()
                z = network.logits(inputs[rows].to(net.device))
                labels = y[rows].to(net.device)
                loss = (
                    functional.binary_cross_entropy_with_logits(z[:, 0], labels.float())
                    if outputs == 1
                    else functional.cross_entropy(z, labels)
                )
                torch.autograd.backward(loss)
                optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        own = y if outputs > 1 else torch.zeros_like(y)
        total = torch.zeros(inputs[0].numel(), dtype=torch.float64)
        for rows in torch.split(torch.arange(len(y)), 500):
            part = inputs[rows].to(net.device)
            result = relevance(network.layers, part, own[rows].to(net.device)).inputs.flatten(1)
            low, high = result.amin(1, keepdim=True), result.amax(1, keepdim=True)
            total += ((result - low) / (high - low).clamp_min(1e-12)).double().sum(0).cpu()
        mean = (total / len(y)).numpy()
        delta = relevance_sensitivity(len(mean), len(y))
        noise = SimulationNoise(seeds.generator(data.seed, "relevance noise", data.client))
        noisy = np.abs(noise.laplace(mean, scale=delta / self._budgets[0]))
        noisy = np.maximum(noisy, MIN_RELEVANCE * noisy.mean())
        return np.asarray(noisy / noisy.mean())
