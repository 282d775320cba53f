"""The networks of dPA and pCDBN as their papers have them, for images and for human behaviour.

Records of behaviour have shape (1, N + 1, d): N rows of d attributes, the last of them of now, and one
row whose first number is the influence of friends, (1/|F_u|) Σ_v ψ_t(v, u), and whose second, where persons
are numbered, is the person's number, from 1.
Inputs are mapped to [0, 1] by fixed public bounds.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from fed_dp.errors import ModelError
from fed_dp.mechanisms.functional import Approximation

Size = tuple[int, int]


def to_unit_interval(x: Tensor) -> Tensor:
    """Map inputs, which lie about in [−1, 1], to [0, 1]; what lies outside is cut off."""
    return ((x + 1) / 2).clamp(0, 1)


def outputs(classes: int) -> int:
    """Return how many logistic outputs a head has: one for two classes, else one for each."""
    return 1 if classes == 2 else classes


def targets(y: Tensor, count: int) -> Tensor:
    """Return what each of `count` logistic outputs should be: the label itself, or one-hot."""
    return y[:, None].float() if count == 1 else functional.one_hot(y, count).float()


def offset(classes: int) -> float:
    """Return the logit that truncated cross-entropy asks for where all classes are alike: 4 (1/classes − ½).

    The papers' heads have no intercept. Without this public constant, units of a network of many classes
    are first of all driven to be that intercept, saturate, and stay there.
    """
    return 4 / classes - 2


def log_probabilities(logits: Tensor) -> Tensor:
    """Return log-probabilities of all classes from logistic outputs."""
    if logits.shape[1] == 1:
        return functional.logsigmoid(torch.cat([-logits, logits], dim=1))
    return functional.log_softmax(functional.logsigmoid(logits), dim=1)


class AutoEncoder(nn.Module):
    """dPA: sigmoid layers with tied weights, each under a normalisation layer (Eq. 13), and a head.

    h = σ(Wᵀx), x̃ = σ(hW), 𝔥 = (h − γ)/((φ − γ)√b); γ and φ are 0 and 1, the sigmoid's own bounds,
    unless a trainer puts the records' there, as printed. With `behaviour` (dPAH) the first layer also
    sees past attributes and friends: h = σ(W₁ᵀx_t + Σ_k A_kᵀ x_{t−k} + η s).
    With `intercept` the head has one that is learnt, as in the authors' program, in place of the constant.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        hidden: int,
        layers: int,
        *,
        behaviour: bool,
        persons: int | None = None,
        intercept: bool = False,
    ) -> None:
        super().__init__()
        self.behaviour = attributes_of(shape) if behaviour else None
        self.persons = persons
        sizes = [self.behaviour[1] if self.behaviour else math.prod(shape), *[hidden] * layers]
        self.tied = nn.ParameterList(_spread(a, b) for a, b in pairwise(sizes))
        if self.behaviour:
            rows, attributes = self.behaviour
            self.past = nn.Parameter(_spread((rows - 1) * attributes, hidden))
            if persons is not None and attributes < 2:
                raise ModelError(
                    f"model.users = {persons}: a record with a person's number needs two attributes or more; "
                    f"the data has shape {shape}"
                )
            self.influence = nn.Parameter(torch.zeros(persons or 1))  # η, or η_u of each person
        self.bounds = nn.Parameter(
            torch.tensor([[0.0], [1.0]]).repeat(layers, hidden), requires_grad=False
        )  # γ and φ of each layer, in turn
        self.head, self.offset = nn.Parameter(torch.zeros(hidden, outputs(classes))), offset(classes)
        self.intercept = nn.Parameter(torch.full((outputs(classes),), self.offset)) if intercept else None

    @torch.no_grad()
    def public_bounds(self) -> None:
        """Set γ and φ to the sigmoid's own bounds."""
        self.bounds[0::2], self.bounds[1::2] = 0.0, 1.0

    def given(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return what the first layer reconstructs, and what else is added to its hidden units."""
        inputs = to_unit_interval(x).flatten(1)
        if self.behaviour is None:
            return inputs, 0.0
        rows, attributes = self.behaviour
        now = (rows - 1) * attributes
        friends = x[:, 0, -1, :1]  # a probability already
        return inputs[:, now : now + attributes], inputs[:, :now] @ self.past + self._eta(x) * friends

    def _eta(self, x: Tensor) -> Tensor:
        """Return by how much friends' influence counts: η, or that of each record's person."""
        if self.persons is None:
            return self.influence
        number = x[:, 0, -1, 1:2].round().clamp(0, self.persons + 1).long()
        known = (number > 0) & (number <= self.persons)
        return torch.where(known, self.influence[(number - 1).clamp(0, self.persons - 1)], 0.0)

    def hidden(self, layer: int, inputs: Tensor, beside: Tensor | float) -> Tensor:
        """Return a layer's hidden units."""
        return torch.sigmoid(inputs @ self.tied[layer] + (beside if layer == 0 else 0.0))

    def normalised(self, layer: int, h: Tensor) -> Tensor:
        """Return 𝔥, of norm at most 1."""
        low, high = self.bounds[2 * layer], self.bounds[2 * layer + 1]
        return (h - low) / ((high - low).clamp_min(1e-6) * math.sqrt(h.shape[1]))

    def below(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor | float]:
        """Return the inputs of a layer."""
        inputs, beside = self.given(x)
        for lower in range(layer):
            inputs = self.normalised(lower, self.hidden(lower, inputs, beside))
        return inputs, beside

    def features(self, x: Tensor) -> Tensor:
        """Return the head's inputs."""
        return self.below(x, len(self.tied))[0]

    def logits(self, x: Tensor) -> Tensor:
        """Return the logistic outputs before their sigmoid."""
        return self.outputs(self.features(x))

    def outputs(self, features: Tensor) -> Tensor:
        """Return what the head makes of its inputs."""
        found: Tensor = features @ self.head + (self.offset if self.intercept is None else self.intercept)
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities."""
        return log_probabilities(self.logits(x))


class Crbm(nn.Module):
    """One layer of a convolutional deep belief network: K groups of hidden units that share a filter.

    P(h = 1 | v) = σ(W * v + b), or its polynomial in X = (W * v + b)/Z, with local response
    normalisation Z (q = 2, l = 5, α = 1e-4, β = .75); `beside` adds dynamic biases (Eqs. 25, 26).
    """

    def __init__(self, channels: int, filters: int, size: Size, beside: int) -> None:
        super().__init__()
        bound = 3 / math.sqrt(channels * size[0] * size[1])
        drawn = torch.empty(filters, channels, *size).uniform_(-bound, bound)
        self.filters = nn.Parameter(drawn - drawn.mean((1, 2, 3), keepdim=True))  # blind to what is constant
        self.bias = nn.Parameter(torch.zeros(filters))  # b_k
        self.visible = nn.Parameter(torch.zeros(1))  # c
        self.dynamic = nn.Parameter(torch.zeros(beside, filters + 1)) if beside else None  # B, η_k and A, η
        self._padding = ((size[1] - 1) // 2, size[1] // 2, (size[0] - 1) // 2, size[0] // 2)

    def total(self, v: Tensor, beside: Tensor | None) -> Tensor:
        """Return W * v + b, dynamic biases included."""
        found = functional.conv2d(functional.pad(v, self._padding), self.filters, self.bias)
        if self.dynamic is not None and beside is not None:
            found = found + (beside @ self.dynamic[:, :-1])[:, :, None, None]
        return found

    def visible_bias(self, beside: Tensor | None) -> Tensor:
        """Return the visible units' bias, c, or that of each record: ĉ = c + A x + η s (Eq. 26)."""
        if self.dynamic is None or beside is None:
            return self.visible
        return self.visible + beside @ self.dynamic[:, -1]

    def probability(self, total: Tensor, polynomial: Approximation | None) -> Tensor:
        """Return P(h = 1 | v): exact, or by a polynomial."""
        if polynomial is None:
            return torch.sigmoid(total)
        ratio = functional.local_response_norm(total, 5, alpha=5e-4, beta=0.75, k=2.0).clamp(-1, 1)
        found = torch.zeros_like(ratio)
        for coefficient in reversed(polynomial.coefficients):
            found = found * ratio + coefficient
        return found

    def reconstruction(self, h: Tensor, beside: Tensor | None) -> Tensor:
        """Return P(v = 1 | h)."""
        left, right, top, bottom = self._padding
        whole = functional.conv_transpose2d(h, self.filters) + self.visible_bias(beside)[:, None, None, None]
        height, width = whole.shape[2:]
        return torch.sigmoid(whole[:, :, top : height - bottom, left : width - right])


class Cdbn(nn.Module):
    """pCDBN's network: two CRBM layers, each under max-pooling by 2, a layer of units, a head.

    MNIST: 32 and 64 filters of 5×5, 1,024 units. Behaviour: 10 filters of 4×12 and 10 of 2×6, whose
    biases depend on the attributes of now and on friends; pooled units go to the head directly.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        filters: int,
        hidden: int,
        *,
        behaviour: bool,
        polynomial: Approximation | None,
    ) -> None:
        super().__init__()
        self.behaviour = attributes_of(shape) if behaviour else None
        self.polynomial = polynomial  # in place of the layers' sigmoid
        if self.behaviour:
            (height, width), channels = self.behaviour, 1
            sizes: tuple[Size, Size] = ((4, 12), (2, 6))
            groups, beside = (filters, filters), width + 1
        else:
            if len(shape) != 3 or min(shape[1:]) < 4:
                raise ModelError(
                    f"model.name = 'cdbn' needs images of 4×4 or more; the data has shape {shape}"
                )
            channels, height, width = shape
            sizes, groups, beside = ((5, 5), (5, 5)), (filters, 2 * filters), 0
        self.visible: list[tuple[int, int, int]] = []  # of each layer: channels, height, width
        layers: list[Crbm] = []
        for group, size in zip(groups, sizes, strict=True):
            layers.append(Crbm(channels, group, size, beside if not layers else 0))
            self.visible.append((channels, height, width))
            channels, height, width = group, max(1, height // 2), max(1, width // 2)
        self.layers = nn.ModuleList(layers)
        pooled = channels * height * width
        self.units = None if self.behaviour else nn.Linear(pooled, hidden)
        self.head = nn.Parameter(torch.zeros(pooled if self.behaviour else hidden, outputs(classes)))
        self.offset = offset(classes)
        self.dropout = nn.Dropout(0.5)

    def given(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the visible units, and what dynamic biases depend on."""
        v = to_unit_interval(x)
        if self.behaviour is None:
            return v, None
        return v[:, :, :-1], torch.cat([v[:, 0, -2], x[:, 0, -1, :1]], dim=1)

    def below(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return the visible units of a layer, in [0, 1]: a polynomial on [−1, 1] has a smaller range."""
        v, beside = self.given(x)
        low, high = (0.0, 1.0) if self.polynomial is None else self.polynomial.range
        for lower in range(layer):
            crbm = self.layers[lower]
            assert isinstance(crbm, Crbm)
            h = crbm.probability(crbm.total(v, beside), self.polynomial)
            v = functional.max_pool2d(h, (min(2, h.shape[2]), min(2, h.shape[3])))
            v = (v - low) / (high - low)
        return v, beside

    def features(self, x: Tensor) -> Tensor:
        """Return the head's inputs, in [−1, 1]."""
        pooled = 2 * self.below(x, len(self.layers))[0].flatten(1) - 1
        found = pooled if self.units is None else torch.tanh(self.units(pooled))
        dropped: Tensor = self.dropout(found)
        return dropped

    def logits(self, x: Tensor) -> Tensor:
        """Return the logistic outputs before their sigmoid."""
        return self.outputs(self.features(x))

    def outputs(self, features: Tensor) -> Tensor:
        """Return what the head makes of its inputs."""
        found: Tensor = features @ self.head + self.offset
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities."""
        return log_probabilities(self.logits(x))


def _spread(inputs: int, hidden: int) -> Tensor:
    bound = math.sqrt(6 / (inputs + hidden))
    return torch.empty(inputs, hidden).uniform_(-bound, bound)


def attributes_of(shape: tuple[int, ...]) -> Size:
    """Return how many rows of how many attributes a record of behaviour has."""
    if len(shape) != 3 or shape[0] != 1 or shape[1] < 3:
        raise ModelError(
            f"a model of behaviour needs records of shape (1, time points + 1, attributes), such as those of "
            f"data.name = 'health-daily'; the data has shape {shape}"
        )
    return shape[1] - 1, shape[2]
