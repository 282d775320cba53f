"""The networks: those of the DSSGD paper with its exact parameter counts, and small ones.

Every network ends in log-probabilities (train with the negative log-likelihood) and has no layer
that mixes records (no BatchNorm), so that a per-record gradient exists.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from fed_dp.errors import ModelError

Shape = tuple[int, ...]


def _linear(shape: Shape, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(_size(shape), classes), nn.LogSoftmax(dim=1))


def _small_mlp(shape: Shape, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(_size(shape), 32),
        nn.ReLU(),
        nn.Linear(32, classes),
        nn.LogSoftmax(dim=1),
    )


def _small_cnn(shape: Shape, classes: int) -> nn.Module:
    channels, height, width = _image("small-cnn", shape, at_least=8)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), classes),
        nn.LogSoftmax(dim=1),
    )


def _dssgd_mlp(shape: Shape, classes: int) -> nn.Module:
    """Fig. 5: 140,106 parameters for 1024 inputs, 402,250 for 3072."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(_size(shape), 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, classes),
        nn.LogSoftmax(dim=1),
    )


def _dssgd_cnn_mnist(shape: Shape, classes: int) -> nn.Module:
    """Fig. 6: 105,506 parameters. 32 → 28 → 9 → 5 → 2, so 64 · 2 · 2 = 256.

    The paper has tanh before the pooling; tanh grows, so the maximum commutes with it: same values,
    a ninth of the work.
    """
    _exactly("dssgd-cnn-mnist", shape, (1, 32, 32))
    return nn.Sequential(
        ChannelsLast(),
        nn.Conv2d(1, 32, 5),
        nn.MaxPool2d(3),
        nn.Tanh(),
        nn.Conv2d(32, 64, 5),
        nn.MaxPool2d(2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(256, 200),
        nn.Tanh(),
        nn.Linear(200, classes),
        nn.LogSoftmax(dim=1),
    )


def _dssgd_cnn_svhn(shape: Shape, classes: int) -> nn.Module:
    """Fig. 7: 313,546 parameters. 32 → 28 → 14 → 10 → 5, so 64 · 5 · 5 = 1600."""
    _exactly("dssgd-cnn-svhn", shape, (3, 32, 32))
    return nn.Sequential(
        ChannelsLast(),
        nn.Conv2d(3, 64, 5),
        nn.Tanh(),
        L2Pooling(),
        SubtractiveNormalisation(64),
        nn.Conv2d(64, 64, 5),
        nn.Tanh(),
        L2Pooling(),
        SubtractiveNormalisation(64),
        nn.Flatten(),
        nn.Linear(1600, 128),
        nn.Tanh(),
        nn.Linear(128, classes),
        nn.LogSoftmax(dim=1),
    )


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


BUILDERS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "linear": _linear,
    "small-mlp": _small_mlp,
    "small-cnn": _small_cnn,
    "dssgd-mlp": _dssgd_mlp,
    "dssgd-cnn-mnist": _dssgd_cnn_mnist,
    "dssgd-cnn-svhn": _dssgd_cnn_svhn,
}


def build(name: str, shape: Shape, classes: int) -> nn.Module:
    """Build a network for inputs of `shape`."""
    return BUILDERS[name](shape, classes)


def _size(shape: Shape) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _image(name: str, shape: Shape, *, at_least: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < at_least:
        raise ModelError(
            f"model.name = {name!r} needs images of {at_least}×{at_least} or more; the data has shape {shape}"
        )
    return shape[0], shape[1], shape[2]


def _exactly(name: str, shape: Shape, wanted: Shape) -> None:
    if shape != wanted:
        raise ModelError(f"model.name = {name!r} needs inputs of shape {wanted}; the data has shape {shape}")
