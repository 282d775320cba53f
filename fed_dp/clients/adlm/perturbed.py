"""What AdLM's training sees of a site's records: as they are, as printed, or as released."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fed_dp.data.dataset import Integers
from fed_dp.mechanisms import LaplaceNoise, Noise
from fed_dp.mechanisms.functional import (
    coefficient_noise,
    first_layer_sensitivity,
    head_sensitivity,
    released_first_layer_sensitivity,
)
from fed_dp.models.adlm import AdlmCnn
from fed_dp.models.paper import targets

INPUT_LIMIT = 10.0  # the released program cuts noisy inputs there


@dataclass(frozen=True, slots=True)
class Shares:
    """The budget's parts, ε2 for inputs and ε3 for labels; and β, by which ε2 is divided among the inputs."""

    inputs: float
    labels: float
    beta: np.ndarray


@dataclass(frozen=True, slots=True)
class Records:
    """Inputs in [0, 1], the static bias 1, and the coefficients φ₁ = ½ − y and φ₂ = ⅛ (Eq. 25)."""

    inputs: Tensor
    linear: Tensor
    square: Tensor
    truncate: bool
    bias: float = 1.0

    def batch(self, rows: Tensor) -> Tensor:
        """Return the inputs of a step's records."""
        return self.inputs[rows]

    def loss(self, z: Tensor, rows: Tensor, head: Tensor) -> Tensor:
        """Σ_l φ₁ z + φ₂ z² (Eq. 25), or, not truncated, the cross-entropy; mean over records."""
        linear, square = self.linear[rows].to(z.device), self.square[rows].to(z.device)
        if self.truncate:
            return (linear * z + square * z * z).sum(1).mean()
        return functional.binary_cross_entropy_with_logits(z, 0.5 - linear, reduction="none").sum(1).mean()


@dataclass(frozen=True, slots=True)
class ReleasedRecords(Records):
    """The same with a noise image that all records of a step share, another at every step.

    Of the labels, the head's weights get the noise Σ η W; each logistic output's loss holds all of it.
    """

    scale: np.ndarray | None = None  # of the noise, by input
    on_head: Tensor | None = None  # η
    noise: Noise | None = None

    def batch(self, rows: Tensor) -> Tensor:
        """Return inputs under the step's noise, within ±10."""
        assert self.noise is not None  # by perturbed()
        assert self.scale is not None
        unit = self.noise.laplace(np.zeros(self.scale.shape), scale=1.0)
        image = torch.from_numpy((unit * self.scale).astype(np.float32))
        return (self.inputs[rows] + image.reshape(self.inputs.shape[1:])).clamp(-INPUT_LIMIT, INPUT_LIMIT)

    def loss(self, z: Tensor, rows: Tensor, head: Tensor) -> Tensor:
        """Return the loss of Eq. 25, less Σ η W for each output."""
        assert self.on_head is not None  # by perturbed()
        plain = Records.loss(self, z, rows, head)
        return plain - len(head) * (self.on_head.to(z.device) * head).sum()


def plain(inputs: Tensor, y: Integers, network: AdlmCnn, *, truncate: bool) -> Records:
    """Return the records without noise."""
    linear = 0.5 - targets(torch.from_numpy(y), network.head.out_features)
    return Records(inputs, linear, torch.full_like(linear, 1 / 8), truncate)


def as_printed(
    records: Records, network: AdlmCnn, shares: Shares, *, batch: int, noise: LaplaceNoise
) -> Records:
    """Add Lap(Δ/ε)/|L| to every record's inputs, φ₁ and φ₂, and to the bias (Algorithm 1, lines 12–19)."""
    inputs = records.inputs
    size = inputs[0].numel()
    of_layer = first_layer_sensitivity(network.first, size)
    drawn = coefficient_noise((len(inputs), size), sensitivity=of_layer, epsilon=shares.inputs, noise=noise)
    bias = coefficient_noise((1,), sensitivity=of_layer, epsilon=shares.inputs, noise=noise) / batch
    image = torch.from_numpy((drawn / (shares.beta * batch)).astype(np.float32))
    delta = head_sensitivity(network.head.in_features, network.head.out_features)
    added = [
        coefficient_noise(tuple(part.shape), sensitivity=delta, epsilon=shares.labels, noise=noise) / batch
        for part in (records.linear, records.square)
    ]
    first, second = (torch.from_numpy(part.astype(np.float32)) for part in added)
    return Records(
        inputs + image.reshape(inputs.shape),
        records.linear + first,
        records.square + second,
        records.truncate,
        1.0 + float(bias[0]),
    )


def as_released(
    records: Records, network: AdlmCnn, shares: Shares, *, batch: int, labels: LaplaceNoise, noise: Noise
) -> ReleasedRecords:
    """Return what the released program trains on: its Δ, Lap(Δ/ε_j)/|L| once a step, η once for all."""
    channels, height, width = records.inputs.shape[1:]
    delta = released_first_layer_sensitivity(channels, height, width, side=network.side)
    hidden, outputs = network.head.in_features, network.head.out_features
    drawn = coefficient_noise(
        (outputs, hidden),
        sensitivity=head_sensitivity(hidden, outputs),
        epsilon=shares.labels,
        noise=labels,
    )
    return ReleasedRecords(
        records.inputs,
        records.linear,
        records.square,
        records.truncate,
        scale=delta / (shares.beta * shares.inputs * batch),
        on_head=torch.from_numpy((drawn / batch).astype(np.float32)),
        noise=noise,
    )
