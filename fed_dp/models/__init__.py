"""The networks, and each of them as one flat vector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fed_dp.lazy import exports

if TYPE_CHECKING:
    from fed_dp.models.encoders import Encoded
    from fed_dp.models.flat import Evaluator, FlatNetwork, Vector, initial_weights, use_one_thread
    from fed_dp.models.network import Network, NetworkSpec
    from fed_dp.models.solve import Solver, solved_head

__all__ = [
    "Encoded",
    "Evaluator",
    "FlatNetwork",
    "Network",
    "NetworkSpec",
    "Solver",
    "Vector",
    "initial_weights",
    "solved_head",
    "use_one_thread",
]
__getattr__ = exports(
    __name__,
    {
        "Encoded": "encoders",
        "Evaluator": "flat",
        "FlatNetwork": "flat",
        "Network": "network",
        "NetworkSpec": "network",
        "Solver": "solve",
        "Vector": "flat",
        "initial_weights": "flat",
        "solved_head": "solve",
        "use_one_thread": "flat",
    },
)
