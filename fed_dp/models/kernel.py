"""Support vector machines: on Fourier features of an RBF kernel, and on the kernel itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from fed_dp.models.encoders import Encoded
from fed_dp.models.fitted import FourierFeatures


class KernelMachine(Encoded):
    """A linear machine on Fourier features; two classes have one output, whose sign decides."""

    def __init__(self, inputs: int, features: int, classes: int, width: float) -> None:
        super().__init__([FourierFeatures(inputs, features, width)], features, problems_of(classes))

    def outputs(self, features: Tensor) -> Tensor:
        """Return log-probabilities, such that a margin of 1 is about 7 to 1."""
        return by_margin(self.head(features))


class ExactKernelMachine(nn.Module):
    """Σ_i y_i α_i exp(−‖x − s_i‖²/σ²) + b: its parameters are records s_i, so they must be public ones."""

    def __init__(self, inputs: int, records: int, classes: int, width: float) -> None:
        super().__init__()
        self.width, problems = width, problems_of(classes)
        self.support = nn.Parameter(torch.zeros(records, inputs), requires_grad=False)
        self.coefficients = nn.Parameter(torch.zeros(problems, records), requires_grad=False)
        self.intercepts = nn.Parameter(torch.zeros(problems), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities, as `KernelMachine` does."""
        kernel = torch.exp(-((torch.cdist(x.flatten(1), self.support) / self.width) ** 2))
        return by_margin(kernel @ self.coefficients.T + self.intercepts)


def problems_of(classes: int) -> int:
    """Return how many machines tell classes apart: of two one, else each from the rest."""
    return 1 if classes == 2 else classes


def by_margin(scores: Tensor) -> Tensor:
    """Return log-probabilities of the scores of all problems, such that a margin of 1 is about 7 to 1."""
    if scores.shape[1] == 1:
        return functional.logsigmoid(2 * torch.cat([-scores, scores], dim=1))
    return functional.log_softmax(2 * scores, dim=1)
