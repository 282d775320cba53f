"""Conditional restricted Boltzmann machines for human behaviour: CRBM and SctRBM, without privacy.

References: Taylor, Hinton, Roweis, "Modeling Human Motion Using Binary Latent Variables", NIPS 2006; Li, Du,
Li, Li, Gao, Zhang, "A Deep Learning Approach to Link Prediction in Dynamic Networks", SDM 2014; Phan, Dou,
Piniewski, Kil, "Social Restricted Boltzmann Machine", ASONAM 2015.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from fed_dp.models.paper import attributes_of, log_probabilities, outputs

SPREAD = 0.01  # of the first weights, as in Hinton's guide to training RBMs


class ConditionalRbm(nn.Module):
    """Gaussian visible units v of now and binary hidden units h, both biased by what is given beside them.

    Given u, the N past time points (and, where it is `social`, the influence of friends):
    P(h = 1 | v, u) = σ(b + Wᵀv + Bᵀu), and v | h, u ~ N(c + Wh + Aᵀu, 1).
    A head predicts the status from P(h = 1 | v, u).
    """

    def __init__(self, shape: tuple[int, ...], classes: int, hidden: int, *, social: bool) -> None:
        super().__init__()
        rows, attributes = attributes_of(shape)
        given = (rows - 1) * attributes + social
        self.social = social
        self.weights = nn.Parameter(torch.randn(attributes, hidden) * SPREAD)  # W
        self.to_hidden = nn.Parameter(torch.randn(given, hidden) * SPREAD)  # B
        self.to_visible = nn.Parameter(torch.zeros(given, attributes))  # A
        self.bias = nn.Parameter(torch.zeros(hidden))  # b
        self.visible = nn.Parameter(torch.zeros(attributes))  # c
        self.head = nn.Parameter(torch.zeros(hidden, outputs(classes)))
        self.intercept = nn.Parameter(torch.zeros(outputs(classes)))

    def units(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the visible units, and what both kinds of units are given."""
        past, now, friends = x[:, 0, :-2].flatten(1), x[:, 0, -2], x[:, 0, -1, :1]
        return now, torch.cat([past, 2 * friends - 1], dim=1) if self.social else past

    def total(self, v: Tensor, given: Tensor) -> Tensor:
        """Return the input of the hidden units."""
        return v @ self.weights + given @ self.to_hidden + self.bias

    def reconstruction(self, h: Tensor, given: Tensor) -> Tensor:
        """Return the mean of the visible units."""
        return h @ self.weights.T + given @ self.to_visible + self.visible

    def free_energy(self, v: Tensor, given: Tensor) -> Tensor:
        """Return −ln Σ_h exp(−E(v, h | given)) of each record: ½‖v − c − Aᵀu‖² − Σ ln(1 + e^total)."""
        apart = v - given @ self.to_visible - self.visible
        return apart.square().sum(1) / 2 - functional.softplus(self.total(v, given)).sum(1)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logistic outputs before their sigmoid."""
        return torch.sigmoid(self.total(*self.units(x))) @ self.head + self.intercept

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities."""
        return log_probabilities(self.logits(x))
