"""AdLM's convolutional network: as its paper has it, and as its program was released.

Paper: Phan, Wu, Hu, Dou, "Adaptive Laplace Mechanism", ICDM 2017 (arXiv 1709.05750v2).
Program: github.com/haiphanNJIT/PrivateDeepLearning, AdLM/MNIST/AdLM.py of 2018-12-25 (commit 15fb1f3).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fed_dp.models.paper import log_probabilities, offset, outputs, to_unit_interval


class Lrn(nn.Module):
    """Local response normalisation of feature maps (AdLM, Eq. 22): h / max(h, (q + α Σ h²)^β)."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise what a rectifier gave, to [0, 1]; Σ over five maps."""
        bound = 2.0 + 1e-4 * 5 * functional.avg_pool3d(
            functional.pad(x.pow(2).unsqueeze(1), (0, 0, 0, 0, 2, 2)), (5, 1, 1), stride=1
        ).squeeze(1)
        return x / torch.maximum(x, bound**0.75)


class BatchNormalisation(nn.Module):
    """A layer that takes two numbers of each unit from the batch: it mixes records.

    In training they are the batch's own, so that every record's output depends on all records of the batch.
    Otherwise they are those in `kept`, a part of the model, which `keep` sets. No noise hides them.
    """

    kept: nn.Parameter

    def __init__(self, units: int) -> None:
        super().__init__()
        self.kept = nn.Parameter(torch.tensor([[0.0], [1.0]]).repeat(1, units), requires_grad=False)

    @abstractmethod
    def of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both numbers of each unit over a batch."""

    @abstractmethod
    def normalised(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Normalise by them."""

    @torch.no_grad()
    def keep(self, x: Tensor) -> None:
        """Put the numbers of these records into the model."""
        self.kept.copy_(torch.stack(self.of(x)))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, in training by the batch."""
        first, second = self.of(x) if self.training else (self.kept[0], self.kept[1])
        return self.normalised(x, first, second)


class MinMax(BatchNormalisation):
    """Normalisation of a fully connected layer (AdLM, before Eq. 22): (h − χ) / (φ − χ), in [0, 1].

    χ and φ are a unit's smallest and largest value in the batch. Where they are those of other records, what
    lies outside is cut off. A unit that is the same for all records gives 0.
    """

    def of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return χ and φ."""
        return x.amin(0), x.amax(0)

    def normalised(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Map [χ, φ] to [0, 1]."""
        return ((x - first) / (second - first).clamp_min(1e-6)).clamp(0, 1)


class OwnMinMax(nn.Module):
    """The same by the smallest and the largest unit of a record itself: no record depends on another.

    For pSGD, whose guarantee a normalisation by the batch would void.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each record."""
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        return (x - low) / (high - low).clamp_min(1e-6)


class MeanVariance(BatchNormalisation):
    """Batch normalisation, which the released program has in the place of `MinMax`, before the rectifier."""

    def __init__(self, units: int) -> None:
        super().__init__(units)
        self.scale, self.shift = nn.Parameter(torch.ones(units)), nn.Parameter(torch.zeros(units))

    def of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance."""
        return x.mean(0), x.var(0, correction=0)

    def normalised(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Normalise, scale and shift."""
        return (x - first) / (second + 1e-3).sqrt() * self.scale + self.shift


class AdlmCnn(nn.Module):
    """AdLM's network: convolutions under rectifier, normalisation and pooling, a layer of units, a head.

    With `released`, as the program has it: no normalisation of feature maps; units under batch normalisation
    and rectifier, cut at 1; a head with an intercept that is learnt, in place of the constant.
    With `apart`, units are normalised by each record itself, in place of the batch.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        counts: Sequence[int],
        sides: Sequence[int],
        hidden: int,
        *,
        released: bool = False,
        apart: bool = False,
    ) -> None:
        super().__init__()
        channels, height, width = shape
        self.first = counts[0] * height * width  # |h0|: neurons of the first layer
        self.side = sides[0]  # of the first layer's filters
        parts: list[nn.Module] = []
        for count, side in zip(counts, sides, strict=True):
            parts += [nn.Conv2d(channels, count, side, padding=side // 2), nn.ReLU()]
            parts += [nn.MaxPool2d(2)] if released else [Lrn(), nn.MaxPool2d(2)]
            channels, height, width = count, height // 2, width // 2
        parts += [nn.Flatten(), nn.Linear(channels * height * width, hidden)]
        normalisation: nn.Module = MeanVariance(hidden) if released else MinMax(hidden)
        normalisation = OwnMinMax() if apart else normalisation
        parts += [normalisation, nn.ReLU(), nn.Hardtanh()] if released else [nn.ReLU(), normalisation]
        self.encoder = nn.Sequential(*parts)
        self.head = nn.Linear(hidden, outputs(classes), bias=released)
        self.offset = 0.0 if released else offset(classes)

    @property
    def layers(self) -> nn.Sequential:
        """All layers, as relevance goes through them."""
        return nn.Sequential(*self.encoder, self.head)

    def logits(self, x: Tensor, bias: float = 1.0) -> Tensor:
        """Return the logistic outputs, before their sigmoid; inputs in [0, 1] and bias may be noisy."""
        h = self._first(x, bias)
        found: Tensor = self.head(self.encoder[1:](h)) + self.offset
        return found

    @torch.no_grad()
    def keep(self, x: Tensor, bias: float = 1.0) -> None:
        """Normalise by these records from now on, where not by a batch (see `BatchNormalisation`)."""
        parts = list(self.encoder)
        [place] = [i for i, part in enumerate(parts) if isinstance(part, BatchNormalisation)]
        layer = parts[place]
        assert isinstance(layer, BatchNormalisation)
        before = self.encoder[1:place]
        layer.keep(torch.cat([before(self._first(part, bias)) for part in torch.split(x, 500)]))

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities."""
        return log_probabilities(self.logits(to_unit_interval(x)))

    def _first(self, x: Tensor, bias: float) -> Tensor:
        first = self.encoder[0]
        assert isinstance(first, nn.Conv2d)
        assert first.bias is not None
        return functional.conv2d(x, first.weight, bias * first.bias, padding=first.kernel_size[0] // 2)
