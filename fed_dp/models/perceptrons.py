"""Several perceptrons of one shape, side by side: each layer of all of them is one batched product.

Nothing passes from one to another, and on one thread each one's numbers do not depend on how many stand
beside it; a test holds that for the shapes that `Chain` accepts. There is no graph to record: the backward
pass of linear layers is written out, and a step's gradient is added to the weights by the product that
computes it, so it is never written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fed_dp.models.flat import FlatNetwork, Vector, divided

MIN_OUTPUTS, MIN_WEIGHTS = (
    4,
    64,
)  # outputs, and weights, of a layer; smaller products round by where they stand


@dataclass(frozen=True, slots=True)
class Chain:
    """A network that is linear layers with ReLU or tanh between, and log-probabilities at the end."""

    layers: tuple[tuple[int, int], ...]  # (outputs, inputs)
    activations: tuple[type[nn.Module], ...]  # between them
    biased: tuple[bool, ...]  # whether each layer has a bias

    @classmethod
    def of(cls, net: FlatNetwork) -> Chain | None:
        """Return a network's chain, if that is all its trained part is, and its loss is the usual one."""
        if not net.task.is_cross_entropy:
            return None
        parts = list(net.trained) if isinstance(net.trained, nn.Sequential) else []
        if parts and isinstance(parts[0], nn.Flatten):
            parts = parts[1:]
        if not parts or not isinstance(parts[-1], nn.LogSoftmax):
            return None
        linear, between = parts[:-1:2], parts[1:-1:2]
        if len(linear) != len(between) + 1:
            return None
        layers = [(each.out_features, each.in_features) for each in linear if isinstance(each, nn.Linear)]
        if len(layers) != len(linear) or any(type(each) not in (nn.ReLU, nn.Tanh) for each in between):
            return None
        if any(out < MIN_OUTPUTS or out * into < MIN_WEIGHTS for out, into in layers):
            return None
        biased = tuple(each.bias is not None for each in linear)
        return cls(tuple(layers), tuple(type(each) for each in between), biased)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The parameters' shapes, in their order in the flat vector; a bias is a row, for all records."""
        return [
            shape
            for (out, into), biased in zip(self.layers, self.biased, strict=True)
            for shape in ((out, into), (1, out))[: 1 + biased]
        ]

    def by_layer(self, parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
        """Return the weight and, where there is one, the bias of each layer, of parameters in that order."""
        rest = iter(parameters)
        return [(next(rest), next(rest) if biased else None) for biased in self.biased]


class Perceptrons:
    """K perceptrons: parameters as (K, outputs, inputs) and (K, 1, outputs), layer by layer."""

    def __init__(self, chain: Chain, weights: Sequence[Vector], device: torch.device) -> None:
        self.chain = chain
        self.parameters = divided(weights, chain.shapes, device)
        self.layers = chain.by_layer(self.parameters)

    def add_gradients(
        self, targets: Sequence[Tensor], x: Tensor, labels: Tensor, each: Tensor, *, keep: float = 1.0
    ) -> Tensor:
        """Add Σ each · gradient over the records to `keep` · targets; return each record's loss."""
        values = self.forward(x.flatten(2))
        pulls = self.backward(values, labels, each)
        gradients_into(self.chain.by_layer(targets), values, pulls, keep=keep)
        return -values[-1].gather(2, labels[:, :, None])[:, :, 0]

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return each layer's inputs, the records' first, and at the end the log-probabilities.

        `x` is (k, records, inputs) with k ≤ K: those of the first k perceptrons.
        """
        count = len(x)
        values = [x]
        last = len(self.layers) - 1
        for layer, (weight, bias) in enumerate(self.layers):
            across = weight[:count].transpose(1, 2)
            if bias is None:
                out = torch.bmm(values[-1], across)
            else:
                out = torch.baddbmm(bias[:count], values[-1], across)
            if layer < last:
                out = out.relu_() if self.chain.activations[layer] is nn.ReLU else out.tanh_()
            values.append(out)
        values[-1] = torch.log_softmax(values[-1], 2)
        return values

    def backward(self, values: Sequence[Tensor], labels: Tensor, each: Tensor) -> list[Tensor]:
        """Return what the loss of each record pulls each layer's outputs by, times the record's `each`.

        Its gradient in a layer's weights is the outer product of that and the layer's inputs.
        """
        count = len(labels)
        pull = values[-1].exp()
        pull.scatter_add_(2, labels[:, :, None], pull.new_full((), -1.0).expand(*labels.shape, 1))
        pull *= each[:, :, None]
        pulls = [pull]
        for layer in range(len(self.layers) - 1, 0, -1):
            pull = torch.bmm(pulls[0], self.layers[layer][0][:count])
            if self.chain.activations[layer - 1] is nn.ReLU:
                pull *= values[layer] > 0
            else:
                pull *= 1 - values[layer] ** 2
            pulls.insert(0, pull)
        return pulls


def gradients_into(
    targets: Sequence[tuple[Tensor, Tensor | None]],
    values: Sequence[Tensor],
    pulls: Sequence[Tensor],
    *,
    keep: float = 1.0,
) -> None:
    """Add the gradients, summed over records, to `keep` · targets: weights and biases, or like them."""
    for (weights, biases), value, pull in zip(targets, values, pulls, strict=False):
        count = len(pull)
        weights[:count].baddbmm_(pull.transpose(1, 2), value, beta=keep)
        if biases is not None:
            bias = biases[:count]
            if keep != 1:
                bias.mul_(keep)
            bias.add_(pull.sum(1, keepdim=True))


def square_norms(chain: Chain, values: Sequence[Tensor], pulls: Sequence[Tensor]) -> Tensor:
    """Return the square L2 norm of each record's gradient: of an outer product, that of its factors."""
    found = pulls[0].new_zeros(pulls[0].shape[:2])
    for into, pull, biased in zip(values, pulls, chain.biased, strict=False):
        found.addcmul_(pull.square().sum(2), into.square().sum(2) + biased)
    return found
