"""The work of a client that peers are given. It runs in their environments: torch and NumPy are enough."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import nn

RECORDS, BATCH, LEARNING_RATE = 600, 32, 0.01


def network() -> nn.Sequential:
    """Return DSSGD's MLP."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(1024, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
        nn.LogSoftmax(1),
    )


@lru_cache
def _all(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    with np.load(path) as archive:
        return torch.from_numpy(archive["X"]), torch.from_numpy(archive["y"])


def records(path: str, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a client's records, in an order of this round's own."""
    x, y = _all(path)
    chosen = np.random.default_rng(client).choice(len(y), RECORDS, replace=False)
    rows = torch.from_numpy(chosen)[torch.randperm(RECORDS)]
    return x[rows].float() / 255, y[rows]
