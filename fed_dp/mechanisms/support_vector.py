"""Noise for the weights of a support vector machine: ½‖w‖² + (C/n) Σ hinge(yᵢ wᵀzᵢ), with ‖z‖₂ ≤ 1.

The objective is 1-strongly convex, and the hinge is convex and 1-Lipschitz: replacing one record moves
the minimiser by at most Δ₂ = 2C/n. n, which is public, divides C: without it the same noise would lose
n times as much (as the paper's Eq. 3 is printed). There is no intercept, for an unpenalised one is not
strongly convex.

A solver stops before the minimum. At a duality gap g it is within √(2g) of it, on both sides, so that
2√(2g) joins the sensitivity. `TOLERANCE` fixes g beforehand: noise must not depend on the records.

References: Li, Xiong, Ohno-Machado, Jiang, "Privacy Preserving RBF Kernel SVM", 2014; Rubinstein et al.,
J. Privacy and Confidentiality 2012; Chaudhuri, Monteleoni, Sarwate, JMLR 2011.
"""

from __future__ import annotations

import math
from typing import Literal

from fed_dp.mechanisms.laplace import check
from fed_dp.mechanisms.noise import FINENESS, Noise, Reals, SecureNoise
from fed_dp.mechanisms.statistics import ROUNDING, Exact

SvmNoise = Literal["gamma", "laplace", "gaussian", "paper"]
TOLERANCE = 0.02  # √(2g) in units of C/n, such that Δ₂ grows by two hundredths


def gap(each: float) -> float:
    """Return the duality gap g that a solver must reach where a record's loss counts `each` = C/n."""
    return (TOLERANCE * each) ** 2 / 2


def sensitivity(*, cost: float, records: int, problems: int = 1) -> float:
    """Return Δ₂ of the weights of all `problems` (one-vs-rest) together, solved to within `gap`.

    Neighbours: replace one record. It moves every problem's weights, hence √problems: with Laplace or
    gamma noise that is the same as giving each problem an equal share of ε.
    """
    check(cost=cost, records=records, problems=problems)
    return math.sqrt(problems) * 2 * cost / records * (1 + TOLERANCE)


def perturbed(
    weights: Reals, *, cost: float, records: int, problems: int, kind: SvmNoise, amount: float, noise: Noise
) -> Exact:
    """Release the weights (problems × features) with noise.

    gamma      density ∝ exp(−ε‖x‖₂/Δ₂): a random direction, a length of Gamma(numbers, Δ₂/ε); pure ε
    laplace    Lap(√numbers Δ₂/ε) on each number, since ‖·‖₁ ≤ √numbers ‖·‖₂; pure ε
    paper      Lap(2^2.5 C √D/(n ε)), D = features/2: twice as much as it takes for one problem; pure ε
    gaussian   N(0, (m Δ₂)²) for amount = m = σ/Δ

    Guarantee: pure ε = amount, or one Gaussian release; proved. Neighbours: replace one record.
    """
    check(amount=amount)
    delta = sensitivity(cost=cost, records=records, problems=problems) * (1 + ROUNDING)
    if kind == "gaussian":
        add, scale = noise.gaussian, amount * delta
    elif kind == "gamma":
        add, scale = noise.spherical, delta / amount
    elif kind == "paper":
        features = weights.size // problems
        add = noise.laplace
        scale = problems * paper_scale(cost=cost, records=records, features=features, epsilon=amount)
    else:
        on_grid = 2 * weights.size * FINENESS / amount  # a secure source rounds every number to its grid
        add, scale = noise.laplace, math.sqrt(weights.size) * delta / amount * (1 + on_grid)
    if isinstance(noise, SecureNoise):
        noise.check(cost, scale=scale)  # ‖w‖ ≤ C, whatever the records are
    return add(weights, scale=scale)


def paper_scale(*, cost: float, records: int, features: int, epsilon: float) -> float:
    """λ = 2^2.5 C √D/(n ε), D = features/2 (Algorithm 1, step 4)."""
    return 2**2.5 * cost * math.sqrt(features / 2) / (records * epsilon)
