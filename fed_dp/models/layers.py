"""Layers that several networks share."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fed_dp.models.encoders import Encoded, both_signs, unit
from fed_dp.tasks import Task


class ChannelsLast(nn.Module):
    """Order the memory of images by pixel, then channel: convolutions take half the time on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the same images."""
        return x.to(memory_format=torch.channels_last)


class L2Pooling(nn.Module):
    """Square, average over 2 × 2, root (Fig. 7). A tiny floor keeps the root's slope finite at 0."""

    def forward(self, x: Tensor) -> Tensor:
        """Pool each channel."""
        return (functional.avg_pool2d(x * x, 2) + 1e-8).sqrt()


class SubtractiveNormalisation(nn.Module):
    """Subtract from each pixel the Gaussian-weighted mean of its 7 × 7 neighbourhood over all channels.

    As Torch7's SpatialSubtractiveNormalization: near the border the weights are divided by the
    part of the kernel that lies inside. It has no parameters and does not mix records.
    """

    kernel: Tensor

    def __init__(self, channels: int, size: int = 7) -> None:
        super().__init__()
        place = torch.arange(size) - (size - 1) / 2
        bell = torch.exp(-(place**2) / (2 * (0.25 * size) ** 2))
        kernel = torch.outer(bell, bell).expand(1, channels, size, size)
        self.register_buffer("kernel", kernel / kernel.sum(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x minus its local mean."""
        margin = self.kernel.shape[-1] // 2
        mean = functional.conv2d(x, self.kernel, padding=margin)
        inside = functional.conv2d(torch.ones_like(x[:1]), self.kernel, padding=margin)
        return x - mean / inside


class OnFrozen(nn.Module):
    """A network on layers without parameters: a trainer passes its records through those once."""

    def __init__(self, frozen: nn.Module, trained: nn.Module) -> None:
        super().__init__()
        self.frozen, self.trained = frozen, trained

    def features(self, x: Tensor) -> Tensor:
        """Return what the trained part sees."""
        found: Tensor = self.frozen(x)
        return found

    def outputs(self, features: Tensor) -> Tensor:
        """Return what the trained part does with that."""
        found: Tensor = self.trained(features)
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Return what it does with records."""
        return self.outputs(self.features(x))


class Frozen(nn.Module):
    """A module that is never trained: it is no part of the weights, and always in evaluation mode."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._held = [module.eval()]  # in a list, where torch does not look for parameters

    def forward(self, x: Tensor) -> Tensor:
        """Return what it makes of records."""
        with torch.no_grad():
            found: Tensor = self._held[0](x)
        return found

    def _apply(self, fn: Any, recurse: bool = True) -> Frozen:
        self._held[0]._apply(fn)  # type: ignore[no-untyped-call]
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def __deepcopy__(self, memo: Any) -> Frozen:
        """Return a copy."""
        return Frozen(copy.deepcopy(self._held[0], memo))


class Unit(nn.Module):
    """Rows of norm 1."""

    def forward(self, x: Tensor) -> Tensor:
        """Return them."""
        return unit(x)


class TwoClasses(nn.Module):
    """The log-probabilities of two classes, from one logit of the second."""

    def forward(self, x: Tensor) -> Tensor:
        """Return both."""
        return torch.cat([functional.logsigmoid(-x), functional.logsigmoid(x)], 1)


def without_log_softmax(network: nn.Module, task: Task) -> nn.Module | None:
    """Return a network without the log-softmax that it ends in; None where it does not end so."""
    if isinstance(network, OnFrozen):
        trained = without_log_softmax(network.trained, task)
        return None if trained is None else OnFrozen(network.frozen, trained)
    if isinstance(network, Encoded):
        network.log_probabilities = False
        network.target_scale = task.target_scale(network.head.out_features)
        return network
    if isinstance(network, nn.Sequential) and isinstance(network[-1], nn.LogSoftmax):
        return network[:-1]
    return None


class Shrunk(nn.Module):
    """Divide by √(number of inputs): standardised inputs get norm about 1."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self._root = inputs**0.5

    def forward(self, x: Tensor) -> Tensor:
        """Return the inputs, smaller."""
        smaller: Tensor = x / self._root
        return smaller


class BothSigns(nn.Module):
    """max(x, 0) and max(−x, 0), as channels."""

    def forward(self, x: Tensor) -> Tensor:
        """Return twice as many channels."""
        return both_signs(x)
