"""Networks by name, for tests of what is below an experiment."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fed_dp import plugins
from fed_dp.models import NetworkSpec

network = NetworkSpec.named


class Flat(nn.Module):
    """A network of somebody's own, for ten classes."""

    def __init__(self, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__()
        self.layer = nn.Linear(math.prod(shape), classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))


class Pooled(nn.Module):
    """An encoder of somebody's own, with running statistics that are frozen with it."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).flatten(1)


def options_of(name: str, folder: Path, channels: int = 1) -> dict[str, Any]:
    """The options without which a network cannot be built: those of networks of one's own."""
    fields = plugins.find("model", name).model_fields
    if "weights" in fields:
        torch.save(Pooled(channels).state_dict(), folder / "encoder.pt")
        return {
            "weights": str(folder / "encoder.pt"),
            "factory": "tests.networks:Pooled",
            "options": {"channels": channels},
        }
    return {"factory": "tests.networks:Flat"} if "factory" in fields else {}
