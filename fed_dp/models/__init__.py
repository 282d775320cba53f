"""The papers' networks, and each of them as one flat vector."""

from __future__ import annotations

from fed_dp.models.flat import Evaluator, FlatNetwork, Vector, initial_weights, use_one_thread
from fed_dp.models.networks import BUILDERS, build

__all__ = [
    "BUILDERS",
    "Evaluator",
    "FlatNetwork",
    "Vector",
    "build",
    "initial_weights",
    "use_one_thread",
]
