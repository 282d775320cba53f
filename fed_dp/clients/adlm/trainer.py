"""AdLM and ILM as their paper has them, and as their program was released.

Reference: Phan, Wu, Hu, Dou, "Adaptive Laplace Mechanism", ICDM 2017 (arXiv 1709.05750v2), Algorithm 1.
Guarantee: only claimed by the paper (see `accounting.guarantee`). As its program was released
(github.com/haiphanNJIT/PrivateDeepLearning, AdLM/MNIST), one noise image is shared by all records of a
step: refuted, since differences of records are then exact.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fed_dp import seeds
from fed_dp.clients.adlm import LaplaceMechanism
from fed_dp.clients.adlm.perturbed import Records, Shares, as_printed, as_released, plain
from fed_dp.clients.trainer import ClientData, Fit, State
from fed_dp.mechanisms import KeptNoise, LaplaceNoise, Noise, SimulationNoise
from fed_dp.mechanisms.functional import relevance_sensitivity
from fed_dp.models import FlatNetwork, Vector
from fed_dp.models.adlm import AdlmCnn
from fed_dp.models.paper import to_unit_interval
from fed_dp.models.relevance import relevance
from fed_dp.models.streams import torch_generator
from fed_dp.sharing.update import MAX_ABS_VALUE

RELEVANCE = "relevance"  # in the site's state
MIN_RELEVANCE = 1e-6  # of the mean relevance: an input of none would get noise without bound
RELEASED_MIN_RELEVANCE = 1e-5  # the program's, of R_j and of β_j
RELEASED_RECORDS = 2000  # that the program takes the mean relevance of


class AdlmTrainer:
    """Relevance by a network trained without noise, then noisy; noisy inputs and labels; then plain descent.

    As printed, noise depends on the seed and the client, not on the round: it is drawn once. `epsilon` is the
    whole budget, ε1 + ε2 + ε3; None: no noise. `released`: as the program does it, with one noise image for
    all records of a step.
    """

    def __init__(
        self, config: LaplaceMechanism, net: FlatNetwork, *, epsilon: float | None, released: bool
    ) -> None:
        assert isinstance(net.network, AdlmCnn)  # by schema
        self._config, self._net, self._network, self._released = config, net, net.network, released
        self.is_private = epsilon is not None
        one, three = config.relevance_share, config.label_share
        self._budgets = (
            None if epsilon is None else (one * epsilon, (1 - one - three) * epsilon, three * epsilon)
        )

    def draw(self, weights: Vector, data: ClientData, noise: Noise) -> Vector:
        """Return β, where noise follows relevance, and Lap(1) for inputs, the bias and labels, as printed."""
        inputs, outputs = to_unit_interval(torch.from_numpy(data.x)), self._network.head.out_features
        beta = self._with_relevance(weights, data, inputs, {}, noise).get(RELEVANCE, [])
        count = len(data.y) * (inputs[0].numel() + 2 * outputs) + 1
        return np.concatenate([beta, noise.laplace(np.zeros(count), scale=1.0)]).astype(np.float32)

    def fit_with(self, drawn: Vector, weights: Vector, data: ClientData, state: State) -> Fit:
        """Fit with what was drawn before."""
        beta, rest = np.split(drawn, [int(data.x[0].size) if self._config.relevance_share else 0])
        kept = {RELEVANCE: beta.tolist()} if beta.size else {}
        once = KeptNoise(rest)
        return self._fit(weights, data, kept, of_relevance=once, once=once)

    def fit(self, weights: Vector, data: ClientData, state: State) -> Fit:
        """Train for the local epochs on inputs and labels that noise is added to."""
        return self._fit(weights, data, state, **self._seeded(data))

    def _fit(
        self,
        weights: Vector,
        data: ClientData,
        state: State,
        *,
        of_relevance: LaplaceNoise,
        once: LaplaceNoise,
    ) -> Fit:
        net, network, config = self._net, self._network, self._config
        inputs = to_unit_interval(torch.from_numpy(data.x))
        kept = self._with_relevance(weights, data, inputs, state, of_relevance)
        records = self._records(data, inputs, kept, once)
        net.load(weights)
        network.train()
        order = torch_generator(data.seed, "shuffle", data.server_round, data.client)
        optimizer = torch.optim.Adam(net.parameters, lr=config.learning_rate)
        for _ in range(config.local_epochs):
            for rows in torch.split(torch.randperm(len(data.y), generator=order), config.batch_size):
                optimizer.zero_grad()
                z = network.logits(records.batch(rows).to(net.device), records.bias)
                torch.autograd.backward(records.loss(z, rows, network.head.weight))
                for parameter in net.parameters:
                    if parameter.grad is not None:
                        parameter.grad.nan_to_num_()
                optimizer.step()
                net.clamp(MAX_ABS_VALUE)
        optimizer.zero_grad(set_to_none=True)
        # As released, the test runs without noise: the moments are those of the records as they are.
        network.keep(records.inputs.to(net.device), records.bias)
        net.clamp(MAX_ABS_VALUE)
        network.eval()
        return Fit(np.clip(net.weights() - weights, -MAX_ABS_VALUE, MAX_ABS_VALUE), state=kept)

    def seen(self, weights: Vector, data: ClientData) -> np.ndarray:
        """Return the inputs that training looks at first: with the noise that should make them private."""
        inputs = to_unit_interval(torch.from_numpy(data.x))
        noise = self._seeded(data)
        kept = self._with_relevance(weights, data, inputs, {}, noise["of_relevance"])
        records = self._records(data, inputs, kept, noise["once"])
        return np.asarray(records.batch(torch.arange(len(data.y))).flatten(1).numpy())

    def _seeded(self, data: ClientData) -> dict[str, LaplaceNoise]:
        """Return a simulation's noise: of the seed and the client, the same in every round."""
        names = {"of_relevance": "relevance noise", "once": "coefficient noise"}
        return {
            key: SimulationNoise(seeds.generator(data.seed, name, data.client)) for key, name in names.items()
        }

    def _records(self, data: ClientData, inputs: Tensor, kept: State, once: LaplaceNoise) -> Records:
        """Return what training sees."""
        records = plain(inputs, data.y, self._network, truncate=self._config.truncate)
        if self._budgets is None:
            return records
        _, of_inputs, of_labels = self._budgets
        beta = np.asarray(kept.get(RELEVANCE, np.ones(inputs[0].numel())))
        shares = Shares(of_inputs, of_labels, beta)
        batch = min(self._config.batch_size, len(data.y))  # |L|, which no batch is larger than
        if not self._released:
            return as_printed(records, self._network, shares, batch=batch, noise=once)
        each = seeds.generator(data.seed, "noise of steps", data.client, data.server_round)
        return as_released(
            records, self._network, shares, batch=batch, labels=once, noise=SimulationNoise(each)
        )

    # -------------------------------------------------------------------------------- relevance

    def _with_relevance(
        self, weights: Vector, data: ClientData, inputs: Tensor, state: State, noise: LaplaceNoise
    ) -> State:
        """Return the state with β_j = d |R_j| / Σ |R|, where noise follows relevance (lines 1–7, 11)."""
        if self._budgets is None or not self._config.relevance_share or RELEVANCE in state:
            return dict(state)
        self._train_without_noise(weights, data, inputs)
        shares = self._released_shares if self._released else self._printed_shares
        return dict(state) | {RELEVANCE: shares(data, inputs, noise, self._budgets[0]).tolist()}

    def _train_without_noise(self, weights: Vector, data: ClientData, inputs: Tensor) -> None:
        net, network = self._net, self._network
        net.load(weights)
        network.train()
        y = torch.from_numpy(data.y)
        order = torch_generator(data.seed, "relevance", data.client)
        optimizer = torch.optim.Adam(net.parameters, lr=1e-3)
        for _ in range(self._config.relevance_epochs):
            for rows in torch.split(torch.randperm(len(y), generator=order), 64):
                optimizer.zero_grad()
                z = network.logits(inputs[rows].to(net.device))
                labels = y[rows].to(net.device)
                loss = (
                    functional.binary_cross_entropy_with_logits(z[:, 0], labels.float())
                    if network.head.out_features == 1
                    else functional.cross_entropy(z, labels)
                )
                torch.autograd.backward(loss)
                optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        network.keep(inputs.to(net.device))
        network.eval()

    def _relevances(self, data: ClientData, inputs: Tensor, rows: Tensor) -> Tensor:
        """Return the relevance of some records' inputs for the output of their own class."""
        y = torch.from_numpy(data.y)[rows]
        own = y if self._network.head.out_features > 1 else torch.zeros_like(y)
        device = self._net.device
        return relevance(self._network.layers, inputs[rows].to(device), own.to(device)).inputs.flatten(1)

    def _printed_shares(
        self, data: ClientData, inputs: Tensor, noise: LaplaceNoise, epsilon: float
    ) -> np.ndarray:
        """Each record's relevances are mapped to [0, 1], so that Δ_R = 2d/|D| of their mean."""
        total = torch.zeros(inputs[0].numel(), dtype=torch.float64)
        for rows in torch.split(torch.arange(len(data.y)), 500):
            result = self._relevances(data, inputs, rows)
            low, high = result.amin(1, keepdim=True), result.amax(1, keepdim=True)
            total += ((result - low) / (high - low).clamp_min(1e-12)).double().sum(0).cpu()
        mean = (total / len(data.y)).numpy()
        delta = relevance_sensitivity(len(mean), len(data.y))
        noisy = np.abs(noise.laplace(mean, scale=delta / epsilon))
        noisy = np.maximum(noisy, MIN_RELEVANCE * noisy.mean())
        return np.asarray(noisy / noisy.mean())

    def _released_shares(
        self, data: ClientData, inputs: Tensor, noise: LaplaceNoise, epsilon: float
    ) -> np.ndarray:
        """As dpLRP_MNIST.py: the mean of 2,000 records, mapped to [0, 1], its 4th power; noise by |D|."""
        order = torch_generator(data.seed, "relevance records", data.client)
        chosen = torch.randperm(len(data.y), generator=order)[:RELEASED_RECORDS]
        parts = [self._relevances(data, inputs, rows).double().cpu() for rows in torch.split(chosen, 500)]
        mean = torch.cat(parts).mean(0).numpy()
        mapped = ((mean - mean.min()) / max(np.ptp(mean), 1e-12)) ** 4
        noisy = noise.laplace(mapped, scale=relevance_sensitivity(len(mean), len(data.y)) / epsilon)
        noisy = np.maximum(noisy, RELEASED_MIN_RELEVANCE)
        return np.asarray(np.maximum(noisy / noisy.mean(), RELEASED_MIN_RELEVANCE))
