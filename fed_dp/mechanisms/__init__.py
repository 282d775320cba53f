"""Mechanisms: pure functions from bounded values to released ones. NumPy and SciPy only.

Each derives its sensitivity from the bound it enforces, so that no caller can pass one that
disagrees with a clip, and states its guarantee, its neighbours and its source.
"""

from __future__ import annotations

from fed_dp.mechanisms.gaussian import gaussian, gaussian_delta, gaussian_epsilon, gaussian_multiplier
from fed_dp.mechanisms.laplace import laplace
from fed_dp.mechanisms.noise import KeptNoise, LaplaceNoise, Noise, NoiseSource, SecureNoise, SimulationNoise
from fed_dp.mechanisms.sparse_vector import (
    Released,
    Split,
    above_threshold,
    figure_12,
    sparse_vector,
)

__all__ = [
    "KeptNoise",
    "LaplaceNoise",
    "Noise",
    "NoiseSource",
    "Released",
    "SecureNoise",
    "SimulationNoise",
    "Split",
    "above_threshold",
    "figure_12",
    "gaussian",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_multiplier",
    "laplace",
    "sparse_vector",
]
