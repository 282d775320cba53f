"""Layers that are fitted to public records: an RBF kernel's frequencies, and how relevant inputs are."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn import functional

from fed_dp.mechanisms.noise import Reals
from fed_dp.mechanisms.statistics import ClassSums
from fed_dp.models.encoders import Encoded, Fitted
from fed_dp.models.relevance import relevance

MIN_RELEVANCE = 1e-3  # of the mean
COUNT_SHARE = 0.02  # of the budget, for the classes' counts
PRIOR = 0.02  # variance between the means of classes of an input of mean relevance, on [−1, 1]
PUBLIC_UNITS, PUBLIC_EPOCHS, PUBLIC_BATCH = 64, 15, 64  # of the network that relevance is taken of


class FourierFeatures(Fitted):
    """ẑ(x) = D^−½ [cos ρᵀx, sin ρᵀx]: of norm 1, with ẑ(x)ᵀẑ(y) ≈ exp(−‖x − y‖²/σ²).

    ρ is drawn from the kernel's Fourier transform, N(0, 2/σ²) (private SVM: Rubinstein et al. 2012), or, from
    there on, fitted to public records (hybrid SVM: Li et al. 2014, Eq. 6, which prints 2/D twice).
    """

    def __init__(self, inputs: int, features: int, width: float) -> None:
        super().__init__()
        self._width = width
        drawn = torch.randn(inputs, features // 2) * (math.sqrt(2) / width)
        self.frequencies = nn.Parameter(drawn, requires_grad=False)  # ρ

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        angles = x.flatten(1) @ self.frequencies
        return torch.cat([angles.cos(), angles.sin()], dim=1) / math.sqrt(angles.shape[1])

    def fit(self, x: Tensor, y: Tensor) -> None:
        """Fit ρ by L-BFGS."""
        records = x.flatten(1).cpu().double().numpy()
        found = fitted_frequencies(records, self.frequencies.cpu().double().numpy(), self._width)
        self.frequencies.copy_(torch.from_numpy(found))


def fitted_frequencies(records: Reals, start: Reals, width: float, *, iterations: int = 200) -> Reals:
    """Return ρ that minimises Σ_ij ((1/D) Σ_k cos ρ_kᵀ(xᵢ − xⱼ) − exp(−‖xᵢ − xⱼ‖²/σ²))², from `start`.

    Squares in place of Eq. 6's absolute values, for L-BFGS wants a slope everywhere. Written with
    Z = [cos, sin], Z Zᵀ = D · the kernel: records² · D products, and records · D cosines.
    """
    squares = (records**2).sum(1)
    kernel = np.exp(-np.maximum(squares[:, None] + squares - 2 * records @ records.T, 0) / width**2)
    count = start.shape[1]

    def objective(flat: Reals) -> tuple[float, Reals]:
        angles = records @ flat.reshape(start.shape)
        cosine, sine = np.cos(angles), np.sin(angles)
        error = (cosine @ cosine.T + sine @ sine.T) / count - kernel
        slope = 4 / count * (error @ sine * cosine - error @ cosine * sine)
        return float((error**2).sum()), (records.T @ slope).ravel()

    found = minimize(objective, start.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": iterations})
    return np.asarray(found.x, np.float64).reshape(start.shape)


class Relevant(Fitted):
    """Inputs scaled by √β_j: β_j is the relevance of input j to public records' labels, 1 in the mean.

    Under one bound on the norm of all, noise then falls on inputs in proportion to how little they matter
    (AdLM's idea, in its Gaussian form). Not `adaptive` (ILM): inputs as they are.
    """

    def __init__(self, inputs: int, *, adaptive: bool) -> None:
        super().__init__()
        self._adaptive = adaptive
        self.relevance = nn.Parameter(torch.ones(inputs), requires_grad=False)  # β

    def forward(self, x: Tensor) -> Tensor:
        """Return the inputs, flat and scaled."""
        flat = x.flatten(1)
        return flat * self.shares.sqrt() if self._adaptive else flat

    @property
    def shares(self) -> Tensor:
        """β, held above 0 whatever a server sends."""
        held = torch.nan_to_num(self.relevance.detach()).clamp(MIN_RELEVANCE, 1e3)
        return held / held.mean()

    def fit(self, x: Tensor, y: Tensor) -> None:
        """Train a small network on the public records; take the mean size of its relevances (Eqs. 10, 16)."""
        x = x.flatten(1)
        scale = x.pow(2).mean().sqrt().clamp_min(1e-6)
        classes = int(y.max()) + 1
        with torch.enable_grad():
            network = _trained(x / scale, y, classes)
        found = relevance(network, x / scale, y).inputs.abs().mean(0)
        self.relevance.copy_(found / found.mean().clamp_min(1e-12))


def _trained(x: Tensor, y: Tensor, classes: int) -> nn.Sequential:
    network = nn.Sequential(
        nn.Linear(x.shape[1], PUBLIC_UNITS), nn.ReLU(), nn.Linear(PUBLIC_UNITS, classes)
    ).to(x.device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(PUBLIC_EPOCHS):
        for rows in torch.split(torch.randperm(len(y)), PUBLIC_BATCH):
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(network(x[rows]), y[rows]))
            optimizer.step()
    return network


class ClassMeans(Encoded):
    """The nearest class mean, from sums of inputs in [−1, 1], with noise by relevance (AdLM) or alike (ILM).

    Both weigh inputs by their relevance when they measure how near a mean is: they differ in noise alone.
    """

    def __init__(self, inputs: int, classes: int, *, adaptive: bool) -> None:
        super().__init__([Relevant(inputs, adaptive=False)], inputs + 1, classes)
        self._adaptive = adaptive

    def features(self, x: Tensor) -> Tensor:
        """Return inputs in [−1, 1], and 1."""
        flat = x.flatten(1).clamp(-1, 1)
        return torch.cat([flat, torch.ones_like(flat[:, :1])], dim=1)

    def head_statistics(self, cross: float) -> ClassSums:
        """Return the class sums, with relevance as the encoder has it now."""
        [layer] = self.layers
        assert isinstance(layer, Relevant)
        beta = layer.shares.cpu().double().numpy()
        shares = beta if self._adaptive else np.ones_like(beta)
        whole = np.append((1 - COUNT_SHARE) * shares / shares.sum(), COUNT_SHARE)
        return ClassSums(whole / whole.sum(), PRIOR * beta, self.head.out_features)
