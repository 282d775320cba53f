"""The Gaussian mechanism on a clipped vector, with exact ("analytic") calibration.

Reference: Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy: Analytical
Calibration and Optimal Denoising", ICML 2018, Theorem 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr

from fed_dp.errors import PrivacyError
from fed_dp.mechanisms.laplace import check, finite
from fed_dp.mechanisms.noise import Noise, Reals


def gaussian(values: Reals, *, clip: float, multiplier: float, noise: Noise) -> NDArray[np.float64]:
    """Release a vector, its L2 norm clipped to `clip`, with noise N(0, (multiplier · 2·clip)²).

    Guarantee: that of one Gaussian release with σ/Δ = `multiplier`, so 1/(2·multiplier²)-zCDP, and
    (ε, δ)-DP for every δ ≥ gaussian_delta(ε, multiplier); proved.
    Neighbours: any two inputs; the clipped vectors differ by at most 2·clip.
    """
    check(clip=clip, multiplier=multiplier)
    values = np.clip(finite(values), -1e30, 1e30).astype(np.float64)
    norm = float(np.linalg.norm(values))
    if norm > clip:
        values = values * (clip / norm) * (1 - 1e-12)  # never a rounding error over the clip
    return noise.gaussian(values, scale=multiplier * 2 * clip)


def gaussian_delta(epsilon: float, multiplier: float) -> float:
    """Return the least δ for which one release with σ/Δ = `multiplier` is (ε, δ)-DP.

    δ = Φ(1/(2m) − ε m) − e^ε Φ(−1/(2m) − ε m).
    """
    half = 1 / (2 * multiplier)
    first = math.exp(log_ndtr(half - epsilon * multiplier))
    return first - math.exp(epsilon + log_ndtr(-half - epsilon * multiplier))


def gaussian_epsilon(*, multiplier: float, delta: float) -> float:
    """Return the least ε for which one release with σ/Δ = `multiplier` is (ε, δ)-DP."""
    check(multiplier=multiplier, delta=delta)
    if gaussian_delta(0.0, multiplier) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(high, multiplier) > delta:
        high *= 2
        if high > 1e9:
            raise PrivacyError(f"multiplier = {multiplier:g}: no ε below 1e9 fits δ = {delta:g}")
    return _upper(lambda e: gaussian_delta(e, multiplier) - delta, 0.0, high)


@lru_cache(maxsize=256)
def gaussian_multiplier(*, epsilon: float, delta: float, releases: int = 1) -> float:
    """Return the least σ/Δ with which `releases` of them together are (ε, δ)-DP.

    k releases with σ/Δ = m are exactly one with m/√k.
    """
    check(epsilon=epsilon, delta=delta, releases=releases)
    low, high = 1.0, 1.0
    while gaussian_delta(epsilon, high) > delta:
        high *= 2
    while gaussian_delta(epsilon, low) < delta and low > 1e-6:
        low /= 2
    one = _upper(lambda m: gaussian_delta(epsilon, m) - delta, low, high) if low < high else low
    return one * math.sqrt(releases)


def _upper(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a falling function passes 0, from the private side."""
    root = float(brentq(function, low, high, xtol=1e-13, rtol=1e-13))
    while function(root) > 0:
        root += max(1e-12, abs(root) * 1e-12)
    return root
