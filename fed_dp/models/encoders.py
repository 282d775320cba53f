"""Networks whose encoder is fixed, or learnt from released moments, under one linear head.

A learnt layer has one parameter: the mean of its statistic over all records. What it does with an input
is computed from that, so the means of several sites average to the mean of all, whatever basis
each of them would have chosen. Layers are frozen for gradients; only the head is trained.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fed_dp.errors import ModelError
from fed_dp.mechanisms.noise import Reals
from fed_dp.mechanisms.statistics import (
    HeadStatistics,
    MapMoments,
    OfHead,
    PatchMoments,
    Statistic,
    principal,
)
from fed_dp.models.scattering import CHANNELS, Scattering

LOGITS = 10.0  # least squares gives scores near 0 and 1; as logits, they are stretched
PUBLIC_SEED = 20_130_503  # of everything random in an encoder: fixed and public
MIN_VARIANCE = 3e-4  # of the largest: a component of less, or less than none by noise, is not blown up
NO_VARIANCE = 1e-8  # of maps of norm 1: where noise leaves less, there is nothing to scale by
NORM_FLOOR = 1.0  # a patch of smaller contrast is not blown up to norm 1


class Learnt(nn.Module, ABC):
    """A layer that is learnt from one statistic of its inputs.

    What `derived` makes of the moments is made anew only when they have changed.
    """

    statistic: Statistic
    moments: nn.Parameter
    _made: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def made(self) -> tuple[Tensor, ...]:
        """Return what the moments come to, on the layer's device."""
        moments = self.moments.detach()
        if self._made is None or not torch.equal(self._made[0], moments):
            found = self.derived(moments.cpu().numpy())
            parts = tuple(torch.from_numpy(part.astype(np.float32)).to(moments.device) for part in found)
            self._made = moments.clone(), parts
        return self._made[1]

    @abstractmethod
    def derived(self, moments: Reals) -> tuple[Reals, ...]:
        """Compute what `forward` needs of the moments."""

    @abstractmethod
    def seen(self, x: Tensor) -> Tensor:
        """Return what the statistic is taken of."""


class Fitted(nn.Module, ABC):
    """A layer that is fitted to public records before the first round, and the same ever after.

    What it has learnt is a parameter, so that it travels with the model: sites take it from the server. No
    guarantee rests on it: whatever it is, features are bounded after it.
    """

    @abstractmethod
    def fit(self, x: Tensor, y: Tensor) -> None:
        """Fit to public records, as the layer sees them, and their labels."""


class Encoded(nn.Module):
    """Layers, unit norm, linear head without intercept, log-probabilities.

    Without `unit`, features are as the layers leave them: for gradients, which are clipped themselves.
    """

    def __init__(self, layers: list[nn.Module], features: int, classes: int, *, unit: bool = True) -> None:
        super().__init__()
        self.layers, self._unit = nn.ModuleList(layers), unit
        self.head = nn.Linear(features, classes, bias=False)
        nn.init.zeros_(self.head.weight)
        self.log_probabilities = True  # else: what the head says, as it is, learnt from rows of targets
        self.target_scale = 1.0  # of outputs over such targets

    @property
    def learnt(self) -> list[Learnt]:
        """The layers that are learnt, first to last."""
        return [layer for layer in self.layers if isinstance(layer, Learnt)]

    @property
    def stages(self) -> int:
        """How many statistics it is made of: one for each learnt layer, in order, and the head's."""
        return len(self.learnt) + 1

    def segment(self, stage: int) -> slice:
        """Return which of the flat weights a stage (from 1) decides: those of its layer, or the head's."""
        if stage == self.stages:
            size = sum(parameter.numel() for parameter in self.parameters())
            return slice(size - self.head.weight.numel(), size)
        sizes = [layer.statistic.size for layer in self.learnt[:stage]]
        return slice(sum(sizes[:-1]), sum(sizes))

    def statistics(self, cross: float) -> list[Statistic]:
        """Return the statistic of every stage."""
        return [*(layer.statistic for layer in self.learnt), self.head_statistics(cross)]

    def head_statistics(self, cross: float) -> OfHead:
        """Return what the head is learnt from."""
        return HeadStatistics(
            self.head.in_features,
            self.head.out_features,
            cross,
            rows=not self.log_probabilities,
            scale=self.target_scale,
        )

    @torch.no_grad()
    def fit(self, x: Tensor, y: Tensor) -> None:
        """Fit the layers that can be to public records."""
        for layer in self.layers:
            if isinstance(layer, Fitted):
                layer.fit(x, y)
            x = layer(x)

    def features(self, x: Tensor) -> Tensor:
        """Return the head's inputs: of norm 1 (or 0), unless told otherwise."""
        for layer in self.layers:
            x = layer(x)
        return unit(x.flatten(1)) if self._unit else x.flatten(1)

    @property
    def trained(self) -> nn.Module:
        """The head as gradients train it: of `scaled` features, it gives what `outputs` gives of features."""
        return (
            nn.Sequential(self.head, nn.LogSoftmax(dim=1))
            if self.log_probabilities
            else nn.Sequential(self.head)
        )

    def scaled(self, features: Tensor) -> Tensor:
        """Return features as the head takes them where gradients train it."""
        return LOGITS * features if self.log_probabilities else features

    def before(self, x: Tensor, stage: int) -> Tensor:
        """Return what learnt layer `stage` (from 0) takes its statistic of."""
        wanted = self.learnt[stage]
        for layer in self.layers:
            if layer is wanted:
                break
            x = layer(x)
        return wanted.seen(x)

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities, or the head's own outputs."""
        return self.outputs(self.features(x))

    def outputs(self, features: Tensor) -> Tensor:
        """Return log-probabilities, or the head's own outputs, of features."""
        outputs: Tensor = self.head(features)
        return functional.log_softmax(LOGITS * outputs, dim=1) if self.log_probabilities else outputs


def unit(x: Tensor) -> Tensor:
    """Return rows of norm 1; a row of zeros stays."""
    norms: Tensor = x.norm(dim=1, keepdim=True)
    return x / norms.clamp_min(1e-12)


class Scattered(nn.Module):
    """The scattering transform, normalised: by constants of generated images, or each image by itself.

    `groups`, for each channel of the image: the maps of a group are centred and scaled by the mean and the
    standard deviation of that image's group (Tramèr and Boneh 2021), so that an image's norm is bounded.
    None: channels are centred and scaled by constants.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, shape: tuple[int, int, int], *, groups: int | None = None) -> None:
        super().__init__()
        self.transform = Scattering(*shape[1:])
        self.channels = shape[0] * CHANNELS
        self.positions = self.transform.height * self.transform.width
        self._groups = None if groups is None else shape[0] * groups
        mean, deviation = _public_constants(*shape[1:])
        for name, values in (("mean", mean), ("scale", 1 / deviation)):
            each = torch.from_numpy(np.tile(values, shape[0]).astype(np.float32))
            self.register_buffer(name, each[:, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (channels, positions)."""
        maps: Tensor = self.transform(x)
        if self._groups is not None:
            return functional.group_norm(maps, self._groups).flatten(2)
        return (maps.flatten(2) - self.mean) * self.scale


@lru_cache(maxsize=4)
def _public_constants(height: int, width: int) -> tuple[Reals, Reals]:
    """Return mean and standard deviation of each channel over generated strokes: no record decides them.

    Strokes are where a smooth random field is near 0; images are standardised as data sets are.
    """
    rng = np.random.default_rng(PUBLIC_SEED)
    y, x = np.meshgrid(np.fft.fftfreq(height), np.fft.fftfreq(width), indexing="ij")
    smooth = np.exp(-(x**2 + y**2) * (2 * math.pi * 3.0) ** 2 / 2)
    field = np.fft.ifft2(np.fft.fft2(rng.normal(size=(512, height, width))) * smooth).real
    strokes = np.clip(1.5 - np.abs(field) / field.std() * 4, 0, 1)
    images = (strokes - strokes.mean()) / strokes.std()
    with torch.no_grad():
        inputs = torch.from_numpy(images[:, None].astype(np.float32))
        maps = Scattering(height, width)(inputs).double().numpy()
    return maps.mean((0, 2, 3)), maps.std((0, 2, 3)) + 1e-6


class Pixels(nn.Module):
    """An image as rows of all channels × columns; a vector as one row."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.positions = shape[-1]
        self.channels = math.prod(shape[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """Return (channels, positions)."""
        return x.reshape(len(x), self.channels, self.positions)


class Compression(Learnt):
    """Principal components of maps, each a product of a channel and a position direction.

    Maps are scaled to norm 1, centred, and projected to the `components` products of largest variance;
    each component is divided by its variance to the power `whitening` / 2. Where `unit` is false, which says
    that nothing brings the components to norm 1 after this, their mean square norm is 1 by the moments.
    """

    def __init__(
        self, channels: int, positions: int, components: int, whitening: float, *, unit: bool = True
    ) -> None:
        super().__init__()
        most = channels * positions
        if components > most:
            raise ModelError(f"model.components = {components}: the maps have only {most} dimensions")
        self.statistic: MapMoments = MapMoments(channels, positions)
        self._components, self._whitening, self._unit = components, whitening, unit
        plain = np.concatenate(  # before it is learnt: no mean, all directions alike
            [np.zeros(most), *(np.eye(side)[np.triu_indices(side)] for side in self.statistic.sides)]
        )
        self.moments = nn.Parameter(torch.from_numpy(plain.astype(np.float32)), requires_grad=False)

    def seen(self, x: Tensor) -> Tensor:
        """Return maps of norm 1."""
        return unit(x.flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the components."""
        mean, axes = self.made()
        return (self.seen(x) - mean) @ axes

    def derived(self, moments: Reals) -> tuple[Reals, ...]:
        """Return the mean map and the scaled directions."""
        mean, channels, positions = self.statistic.unpack(moments)
        (over, across), (under, along) = principal(channels), principal(positions)
        variance = np.outer(over, under) / max(over.sum(), 1e-300)
        order = np.argsort(-variance, axis=None, kind="stable")[: self._components]
        i, j = np.unravel_index(order, variance.shape)
        products = np.einsum("ck,sk->csk", across[:, i], along[:, j]).reshape(-1, len(order))
        chosen = variance[i, j]
        floor = max(float(chosen.max()) * MIN_VARIANCE, 1e-30 if self._unit else NO_VARIANCE)
        scale = np.maximum(chosen, floor) ** (-self._whitening / 2)
        if self._unit:
            return mean.ravel()[None], products * (scale / scale.max())
        mean_square = float((np.maximum(chosen, floor) * scale**2).sum())
        return mean.ravel()[None], products * (scale / math.sqrt(mean_square))


class RandomFeatures(nn.Module):
    """cos(Rᵀx) and sin(Rᵀx) of inputs of norm 1: the Gaussian kernel (Rahimi and Recht 2007), norm 1."""

    directions: Tensor

    def __init__(self, inputs: int, features: int, gamma: float) -> None:
        super().__init__()
        if features % 2:
            raise ModelError(f"model.features = {features}: random features come in pairs; expected even")
        rng = np.random.default_rng([PUBLIC_SEED, inputs, features])
        directions = rng.normal(size=(inputs, features // 2)) * gamma
        self.register_buffer("directions", torch.from_numpy(directions.astype(np.float32)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        angles = unit(x.flatten(1)) @ self.directions
        return torch.cat([angles.cos(), angles.sin()], dim=1) / math.sqrt(angles.shape[1])


class RandomProjection(nn.Module):
    """Inputs of norm 1, turned to fewer random directions."""

    directions: Tensor

    def __init__(self, inputs: int, features: int) -> None:
        super().__init__()
        rng = np.random.default_rng([PUBLIC_SEED, inputs, features])
        directions = rng.normal(size=(inputs, features)) / math.sqrt(features)
        self.register_buffer("directions", torch.from_numpy(directions.astype(np.float32)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the projections."""
        return unit(x.flatten(1)) @ self.directions


def both_signs(x: Tensor) -> Tensor:
    """Return max(x, 0) and max(−x, 0), as channels."""
    return torch.cat([functional.relu(x), functional.relu(-x)], dim=1)


class PatchFilters(Learnt):
    """Convolution with the leading principal components of patches, both signs, average pooling.

    The degree-1 form of a convolutional RBM layer with a fixed normaliser: a patch, less its mean, is
    divided by the larger of its norm and NORM_FLOOR, so that every response lies in [−1, 1].
    """

    box: Tensor

    def __init__(self, channels: int, side: int, filters: int, pool: int) -> None:
        super().__init__()
        patch = channels * side * side
        if filters >= patch:
            raise ModelError(f"model.filters = {filters}: patches have {patch} numbers, expected fewer")
        self.statistic: PatchMoments = PatchMoments(patch)
        self._channels, self._side, self._filters, self._pool = channels, side, filters, pool
        self.moments = nn.Parameter(
            torch.from_numpy(np.eye(patch, dtype=np.float32)[np.triu_indices(patch)]), requires_grad=False
        )
        self.register_buffer("box", torch.full((1, channels, side, side), 1.0), persistent=False)

    def _padded(self, x: Tensor) -> Tensor:
        return functional.pad(x, (self._side // 2,) * 4, mode="replicate")

    def seen(self, x: Tensor) -> Tensor:
        """Return every fourth patch, less its mean, normalised: (patches, numbers)."""
        patches = functional.unfold(self._padded(x), self._side, stride=2).transpose(1, 2)
        patches = patches - patches.mean(2, keepdim=True)
        norms: Tensor = patches.norm(dim=2, keepdim=True)
        return patches / norms.clamp_min(NORM_FLOOR)

    def forward(self, x: Tensor) -> Tensor:
        """Return the pooled responses, 2 · filters channels."""
        [bank] = self.made()
        padded = self._padded(x)
        numbers = self.box.numel()
        total = functional.conv2d(padded, self.box)
        squares = functional.conv2d(padded * padded, self.box)
        norm = (squares - total * total / numbers).clamp_min(NORM_FLOOR**2).sqrt()
        responses = functional.conv2d(padded, bank) / norm  # filters have no mean: the patch's drops out
        return functional.avg_pool2d(both_signs(responses), self._pool, ceil_mode=True)

    def derived(self, moments: Reals) -> tuple[Reals, ...]:
        """Return the filters."""
        second = self.statistic.unpack(moments)
        centre = np.eye(len(second)) - 1 / len(second)  # noise gives patches a mean again
        _, vectors = principal(centre @ second @ centre)
        bank = (centre @ vectors[:, : self._filters]).T
        return (bank.reshape(self._filters, self._channels, self._side, self._side),)


class BehaviourFilters(PatchFilters):
    """Patch filters over the time points of a record of behaviour, with what happens now beside them.

    In place of dynamic biases: the attributes of now and the influence of friends join the features.
    """

    def seen(self, x: Tensor) -> Tensor:
        """Return patches of the time points alone."""
        return super().seen(x[:, :, :-1])

    def forward(self, x: Tensor) -> Tensor:
        """Return pooled responses, attributes and influence, each part of norm about 1."""
        return _beside(super().forward(x[:, :, :-1]), x)


class Behaviour(nn.Module):
    """A record of behaviour in three parts of norm about 1: the past, now, and the influence of friends."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what dPAH's hidden units see."""
        return _beside(x[:, 0, :-2], x)


def _beside(part: Tensor, x: Tensor) -> Tensor:
    """Return a part of norm 1 with the attributes of now and the influence of friends beside it.

    Of a record of zeros, which stands for none, there is no feature.
    """
    now, friends = x[:, 0, -2], x[:, 0, -1, :1]
    there = (x != 0).flatten(1).any(dim=1, keepdim=True)
    return torch.cat([unit(part.flatten(1)), unit(now), 2 * friends - 1], dim=1) * there


def pooled(size: int, pool: int) -> int:
    """Return the side of a map after pooling."""
    return -(-size // pool)
