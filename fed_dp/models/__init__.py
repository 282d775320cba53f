"""The papers' networks, and each of them as one flat vector."""

from __future__ import annotations

from fed_dp.models.encoders import Encoded
from fed_dp.models.flat import Evaluator, FlatNetwork, Vector, initial_weights, use_one_thread
from fed_dp.models.networks import BUILDERS, build
from fed_dp.models.solve import Solver, solved_head

__all__ = [
    "BUILDERS",
    "Encoded",
    "Evaluator",
    "FlatNetwork",
    "Solver",
    "Vector",
    "build",
    "initial_weights",
    "solved_head",
    "use_one_thread",
]
