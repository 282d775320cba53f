"""Several copies of one network, side by side, each with weights and records of its own.

Perceptrons by batched linear algebra, any other network by torch.func.vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fed_dp.errors import ModelError
from fed_dp.models.flat import FlatNetwork, Vector, divided, flat_rows
from fed_dp.models.layers import ChannelsLast
from fed_dp.models.perceptrons import Chain, Perceptrons

IN_CACHE, ON_GPU = 2_300_000, 100_000_000  # parameters of a block
ROWS = 8  # a batch is filled up to a multiple of it: very short products round in another way


class ClientBatch(Protocol):
    """K networks of one shape. What concerns the first k of them takes k rows of everything."""

    parameters: list[Tensor]  # (K, …) each, in the order of the flat vector

    def add_gradients(
        self, targets: Sequence[Tensor], x: Tensor, labels: Tensor, each: Tensor, *, keep: float = 1.0
    ) -> Tensor:
        """Add Σ each · gradient over the records to `keep` · targets; return each record's loss."""
        ...


def best_batch(net: FlatNetwork, limit: int | None) -> int:
    """Return how many copies are trained at once; None leaves it to what was measured.

    On a processor: perceptrons, as many as the caches hold. Other networks are slower side by side than one
    after the other, but for tiny ones. On a GPU, which small networks leave idle: all. (Not measured: the
    numbers for GPUs are a guess.)
    """
    if limit is not None:
        return limit
    if net.device.type != "cpu":
        return max(1, min(256, ON_GPU // net.size))
    return 1 if Chain.of(net) is None else max(1, min(64, IN_CACHE // net.size))


def client_batch_of(net: FlatNetwork, weights: Sequence[Vector]) -> ClientBatch:
    """Return as many copies of a network as there are weights."""
    chain = Chain.of(net)
    return Vmapped(net, weights) if chain is None else Perceptrons(chain, weights, net.device)


def without_layout(net: FlatNetwork) -> nn.Module:
    """Return the trained part of a network without what only orders memory, which vmap cannot."""
    parts = net.trained
    if isinstance(parts, nn.Sequential):
        return nn.Sequential(*(part for part in parts if not isinstance(part, ChannelsLast)))
    return parts


class Vmapped:
    """Copies of any network that torch.func.vmap takes."""

    def __init__(self, net: FlatNetwork, weights: Sequence[Vector]) -> None:
        network = without_layout(net)
        parameters = dict(network.named_parameters())
        if sum(p.numel() for p in parameters.values()) != net.size:
            raise ModelError(f"model.name = {net.name!r} cannot be trained side by side")
        shapes = [tuple(p.shape) for p in parameters.values()]
        self.parameters = divided(weights, shapes, net.device)
        self._named = dict(zip(parameters, self.parameters, strict=True))

        def loss(named: Mapping[str, Tensor], x: Tensor, y: Tensor, each: Tensor) -> tuple[Tensor, Tensor]:
            losses = net.task.loss(functional_call(network, dict(named), (x,)), y)
            return (losses * each).sum(), losses.detach()

        self._gradients = vmap(grad(loss, has_aux=True))

    def add_gradients(
        self, targets: Sequence[Tensor], x: Tensor, labels: Tensor, each: Tensor, *, keep: float = 1.0
    ) -> Tensor:
        """Add Σ each · gradient over the records to `keep` · targets; return each record's loss."""
        count = len(labels)
        found, losses = self._gradients({k: v[:count] for k, v in self._named.items()}, x, labels, each)
        for target, gradient in zip(targets, found.values(), strict=True):
            part = target[:count]
            if keep != 1:
                part.mul_(keep)
            part.add_(gradient)
        return cast(Tensor, losses)


def descend(parameter: Tensor, move: Tensor, rates: Tensor) -> None:
    """Move each copy's parameter by −rate · move, each at its own rate."""
    parameter.addcmul_(move, rates.view(-1, *[1] * (parameter.dim() - 1)), value=-1)


def per_record_gradients(
    net: FlatNetwork, *, views: bool = False
) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """Return a function of records and labels that returns each record's gradient in each parameter.

    With `views`, a record is several inputs, and its gradient that of their mean loss.
    """
    network = without_layout(net)
    # Views of the flat weights.
    named = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        inputs = x if views else x[None]
        outputs = functional_call(network, parameters, (inputs,))
        return net.task.loss(outputs, y.expand(len(inputs), *y.shape)).mean()

    gradients = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")  # dropout: of each record

    def each(x: Tensor, y: Tensor) -> list[Tensor]:
        if not len(y):  # an empty sample
            return [p.new_zeros(0, *p.shape) for p in named.values()]
        return list(gradients(named, x, y).values())

    return each


def gradients_of(net: FlatNetwork, weights: Vector, x: Vector, y: NDArray[Any]) -> NDArray[np.float64]:
    """Return each record's gradient at some weights, as one row."""
    net.load(weights)
    each = per_record_gradients(net)(net.inputs(x), net.targets(y))
    return flat_rows(each).detach().cpu().numpy().astype(np.float64)


class Batches:
    """The records of a block's next batches, filled up to a common length; those filled in count for nothing.

    They are gathered into the same buffer again and again: no batch is copied twice, and it stays in the
    cache.
    """

    def __init__(self, x: Sequence[Tensor], y: Sequence[Tensor], rows: int) -> None:
        self._x, self._y = x, y
        self._make_room(rows)

    def _make_room(self, rows: int) -> None:
        first = self._x[0]
        size = len(self._x), _filled(rows)
        self._inputs = first.new_empty(*size, *first.shape[1:])
        self._labels = self._y[0].new_zeros(*size, *self._y[0].shape[1:])
        self._there = first.new_zeros(size)

    def gather(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs, labels and which of them are there; rows[k] are of the k-th client."""
        longest = _filled(max(map(len, rows)))
        if longest > self._there.shape[1]:
            self._make_room(longest)
        self._there.zero_()
        for k, chosen in enumerate(rows):
            count = len(chosen)
            torch.index_select(self._x[k], 0, chosen, out=self._inputs[k, :count])
            self._inputs[k, count:longest] = 0
            torch.index_select(self._y[k], 0, chosen, out=self._labels[k, :count])
            self._there[k, :count] = 1
        part = slice(len(rows)), slice(longest)
        return self._inputs[part], self._labels[part], self._there[part]


def _filled(rows: int) -> int:
    return -(-max(rows, 1) // ROWS) * ROWS
