"""The networks: those of the papers, with DSSGD's exact parameter counts, and small ones.

Every network ends in log-probabilities (train with the negative log-likelihood) and has no layer
that mixes records (no BatchNorm), so that a per-record gradient exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fed_dp.errors import ModelError
from fed_dp.mechanisms.functional import Approximation
from fed_dp.models.encoders import (
    Behaviour,
    BehaviourFilters,
    Compression,
    Encoded,
    PatchFilters,
    Pixels,
    RandomFeatures,
    RandomProjection,
    Scattered,
    both_signs,
    pooled,
)
from fed_dp.models.fitted import ClassMeans, KernelMachine, Relevant
from fed_dp.models.paper import AdlmCnn, AutoEncoder, Cdbn, attributes_of

Shape = tuple[int, ...]
Options = Mapping[str, Any]


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


# ------------------------------------------------------ fixed or released encoders, linear heads


def _unit_linear(shape: Shape, classes: int) -> nn.Module:
    """Scale inputs to norm 1: with noise, the functional mechanism for logistic regression."""
    return Encoded([nn.Flatten()], _size(shape), classes)


def _random_features(shape: Shape, classes: int, features: int = 1000, gamma: float = 1.2) -> nn.Module:
    return Encoded([RandomFeatures(_size(shape), features, gamma)], features, classes)


def _private_pca(
    shape: Shape,
    classes: int,
    components: int | None = None,
    features: int = 1000,
    gamma: float = 1.2,
    layers: int = 1,
) -> nn.Module:
    """Principal components, then random features of them; as often as there are layers."""
    pixels = Pixels(shape)
    parts: list[nn.Module] = [pixels]
    channels, positions = pixels.channels, pixels.positions
    for _ in range(layers):
        count = components or min(40, channels * positions)
        parts.append(Compression(channels, positions, count, 0.0))
        parts.append(RandomFeatures(count, features, gamma))
        channels, positions = 1, features
    return Encoded(parts, features, classes)


def _scattering(
    shape: Shape, classes: int, components: int | None = None, whitening: float = 0.5
) -> nn.Module:
    scattered = Scattered(_image("scattering", shape, at_least=8))
    count = components or min(400, scattered.channels * scattered.positions)
    compression = Compression(scattered.channels, scattered.positions, count, whitening)
    return Encoded([scattered, compression], count, classes)


def _scattering_random(shape: Shape, classes: int, features: int = 400) -> nn.Module:
    """Put random directions in place of learnt ones: one stage."""
    scattered = Scattered(_image("scattering-random", shape, at_least=8))
    projection = RandomProjection(scattered.channels * scattered.positions, features)
    return Encoded([scattered, projection], features, classes)


def _scattering_linear(shape: Shape, classes: int) -> nn.Module:
    """Put the same scattering features under a trainable linear layer, for gradient methods."""
    scattered = Scattered(_image("scattering-linear", shape, at_least=8))
    features = scattered.channels * scattered.positions
    trained = nn.Sequential(nn.Linear(features, classes), nn.LogSoftmax(dim=1))
    return OnFrozen(nn.Sequential(scattered, nn.Flatten(), Shrunk(features)), trained)


def _patch_filters(
    shape: Shape,
    classes: int,
    filters: int = 12,
    components: int | None = None,
    whitening: float = 0.5,
    layers: int = 1,
) -> nn.Module:
    """Convolution, pooling, principal components. Two layers pool by 2 each, one by 4."""
    channels, height, width = _image("patch-filters", shape, at_least=4)
    parts: list[nn.Module] = []
    for layer in range(layers):
        pool = 4 if layers == 1 else 2
        parts.append(PatchFilters(channels, 5 if layer == 0 else 3, filters, pool))
        channels, height, width = 2 * filters, pooled(height, pool), pooled(width, pool)
    count = components or min(400, channels * height * width)
    parts.append(Compression(channels, height * width, count, whitening))
    return Encoded([*parts[:-1], nn.Flatten(2), parts[-1]], count, classes)


def _behaviour_linear(shape: Shape, classes: int) -> nn.Module:
    """Put past, now and friends, each of norm about 1, under a linear head: dPAH on a fixed encoder."""
    rows, attributes = attributes_of(shape)
    return Encoded([Behaviour()], rows * attributes + 1, classes)


def _patch_behaviour(shape: Shape, classes: int, filters: int = 6) -> nn.Module:
    """Build patch filters, pooled by 4, beside the attributes of now and friends."""
    rows, attributes = attributes_of(shape)
    layer = BehaviourFilters(1, 3, filters, 4)
    features = 2 * filters * pooled(rows, 4) * pooled(attributes, 4) + attributes + 1
    return Encoded([layer], features, classes)


def _patch_cnn(shape: Shape, classes: int, filters: int = 12) -> nn.Module:
    """Build the layers of patch-filters, trainable, for gradient methods."""
    channels, height, width = _image("patch-cnn", shape, at_least=4)
    return nn.Sequential(
        nn.Conv2d(channels, filters, 5, padding=2),
        BothSigns(),
        nn.AvgPool2d(4, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(2 * filters * pooled(height, 4) * pooled(width, 4), classes),
        nn.LogSoftmax(dim=1),
    )


def _auto_encoder(
    shape: Shape, classes: int, hidden: int = 200, layers: int = 2, intercept: bool = False
) -> nn.Module:
    return AutoEncoder(shape, classes, hidden, layers, behaviour=False, intercept=intercept)


def _dpah(
    shape: Shape, classes: int, hidden: int = 200, layers: int = 2, intercept: bool = False
) -> nn.Module:
    return AutoEncoder(shape, classes, hidden, layers, behaviour=True, intercept=intercept)


def _cdbn(
    shape: Shape,
    classes: int,
    filters: int = 32,
    hidden: int = 1024,
    polynomial: Approximation | None = None,
) -> nn.Module:
    return Cdbn(shape, classes, filters, hidden, behaviour=False, polynomial=polynomial)


def _cdbn_behaviour(
    shape: Shape, classes: int, filters: int = 10, polynomial: Approximation | None = None
) -> nn.Module:
    return Cdbn(shape, classes, filters, 0, behaviour=True, polynomial=polynomial)


def _class_sums(shape: Shape, classes: int, *, adaptive: bool = True) -> nn.Module:
    return ClassMeans(_size(shape), classes, adaptive=adaptive)


def _relevant_pixels(shape: Shape, classes: int, *, adaptive: bool = True) -> nn.Module:
    return Encoded([Relevant(_size(shape), adaptive=adaptive)], _size(shape), classes)


def _relevant_scattering(
    shape: Shape, classes: int, features: int = 400, *, adaptive: bool = True
) -> nn.Module:
    """Scale scattering features by relevance, then turn them to random directions."""
    scattered = Scattered(_image("relevant-scattering", shape, at_least=8))
    size = scattered.channels * scattered.positions
    layers = [scattered, Relevant(size, adaptive=adaptive), RandomProjection(size, features)]
    return Encoded(layers, features, classes)


def _adlm_cnn(shape: Shape, classes: int, filters: int | None = None, hidden: int | None = None) -> nn.Module:
    """MNIST: 32 and 64 filters of 5×5, 25 units. CIFAR-10: 128 of 3×3, 128 and 256 of 5×5, 30 units."""
    image = _image("adlm-cnn", shape, at_least=8)
    if image[0] == 1:
        first = filters or 32
        return AdlmCnn(image, classes, (first, 2 * first), (5, 5), hidden or 25)
    first = filters or 128
    return AdlmCnn(image, classes, (first, first, 2 * first), (3, 5, 5), hidden or 30)


def _rbf(shape: Shape, classes: int, features: int = 100, width: float | None = None) -> nn.Module:
    if features % 2:
        raise ModelError(f"model.features = {features}: Fourier features come in pairs; expected even")
    return KernelMachine(_size(shape), features, classes, width or 2 * math.sqrt(_size(shape)))


class OnFrozen(nn.Module):
    """A network on layers without parameters: a trainer passes its records through those once."""

    def __init__(self, frozen: nn.Module, trained: nn.Module) -> None:
        super().__init__()
        self.frozen, self.trained = frozen, trained

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """Return what the trained part sees."""
        return torch.cat([self.frozen(part) for part in torch.split(x, 500)])

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities."""
        found: Tensor = self.trained(self.frozen(x))
        return found


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


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "linear": _linear,
    "small-mlp": _small_mlp,
    "small-cnn": _small_cnn,
    "dssgd-mlp": _dssgd_mlp,
    "dssgd-cnn-mnist": _dssgd_cnn_mnist,
    "dssgd-cnn-svhn": _dssgd_cnn_svhn,
    "unit-linear": _unit_linear,
    "random-features": _random_features,
    "private-pca": _private_pca,
    "scattering": _scattering,
    "scattering-random": _scattering_random,
    "scattering-linear": _scattering_linear,
    "patch-filters": _patch_filters,
    "behaviour-linear": _behaviour_linear,
    "patch-behaviour": _patch_behaviour,
    "patch-cnn": _patch_cnn,
    "auto-encoder": _auto_encoder,
    "dpah": _dpah,
    "cdbn": _cdbn,
    "cdbn-behaviour": _cdbn_behaviour,
    "class-sums": _class_sums,
    "relevant-pixels": _relevant_pixels,
    "relevant-scattering": _relevant_scattering,
    "adlm-cnn": _adlm_cnn,
    "rbf": _rbf,
}


def build(name: str, shape: Shape, classes: int, options: Options | None = None) -> nn.Module:
    """Build a network for inputs of `shape`; `options` are those of the network's own builder."""
    return BUILDERS[name](shape, classes, **(options or {}))


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
