"""Several views of each image: itself, and shifted or mirrored ones, whose gradients are averaged.

Reference: De et al., "Unlocking High-Accuracy Differentially Private Image Classification through Scale",
arXiv 2204.13650, 2022 (augmentation multiplicity).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Views:
    """How many views of each image there are, and how they differ. The first is the image itself."""

    count: int = 1
    shift: int = 0  # pixels, at most, up or down and left or right; the border is repeated
    flip: bool = False  # whether every other view, on average, is mirrored

    def of(self, x: Tensor, source: torch.Generator) -> Tensor:
        """Return the views of images (n, channels, height, width) as (n, count, channels, height, width)."""
        views = [x, *(self._view(x, source) for _ in range(self.count - 1))]
        return torch.stack(views, 1)

    def _view(self, x: Tensor, source: torch.Generator) -> Tensor:
        n, _, height, width = x.shape
        device = x.device
        rows, columns = (
            torch.arange(side, device=device) + self._shifts(n, source).to(device) for side in (height, width)
        )
        rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
        if self.flip:
            mirrored = torch.rand(n, 1, generator=source).to(device) < 0.5
            columns = torch.where(mirrored, columns.flip(1), columns)
        by_row = x.gather(2, rows[:, None, :, None].expand_as(x))
        return by_row.gather(3, columns[:, None, None, :].expand_as(x))

    def _shifts(self, n: int, source: torch.Generator) -> Tensor:
        return torch.randint(-self.shift, self.shift + 1, (n, 1), generator=source)
