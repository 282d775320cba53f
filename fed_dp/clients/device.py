"""The one place that chooses where a client trains."""

from __future__ import annotations

import torch


def choose(gpus: float) -> torch.device:
    """Return the GPU that Ray gave to this process if clients ask for one and torch sees one."""
    return torch.device("cuda" if gpus > 0 and torch.cuda.is_available() else "cpu")
