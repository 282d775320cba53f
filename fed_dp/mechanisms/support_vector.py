"""The weights of a private support vector machine: ½‖w‖² + (C/n) Σ loss(yᵢ wᵀzᵢ), with ‖z‖₂ ≤ 1.

The objective is 1-strongly convex, and the loss is convex and 1-Lipschitz: replacing one record moves
the minimiser by at most Δ₂ = 2C/n. n is a public constant, expected or counted: without it the same noise
would lose n times as much (as the paper's Eq. 3 is printed). There is no intercept, for an unpenalised one
is not strongly convex.

The loss is the hinge, smoothed within h of the margin (Chaudhuri et al. 2011's Huber loss): then the
objective is smooth, too, and Nesterov's method with a fixed number of steps comes as near to the minimum as
was agreed, whatever the records are. A solver that runs until its records let it stop, or gives up,
would tell about them. At most `TOLERANCE`·C/n away on both sides joins the sensitivity.

References: Li, Xiong, Ohno-Machado, Jiang, "Privacy Preserving RBF Kernel SVM", 2014; Rubinstein et al.,
J. Privacy and Confidentiality 2012; Chaudhuri, Monteleoni, Sarwate, JMLR 2011; Nesterov, "Introductory
Lectures on Convex Optimization", 2004, Theorem 2.2.3.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from fed_dp.errors import PrivacyError
from fed_dp.mechanisms.laplace import check
from fed_dp.mechanisms.noise import FINENESS, Noise, Reals, SecureNoise
from fed_dp.mechanisms.statistics import ROUNDING, Exact

SvmNoise = Literal["gamma", "laplace", "gaussian", "paper"]
TOLERANCE = 0.02  # how far from the minimum, in units of C/n: Δ₂ grows by two hundredths
SMOOTH = 0.5  # h
MAX_COST_PER_RECORD = 1000.0  # C/n, how much one record may count
MIN_COST = 1e-3  # C
# Of `default_cost`, fitted to public data by benchmarks/fit_svm_cost.py.
NOISE_SHARE = 0.5  # how large the noise of a score is, beside the margin
COST_PER_RECORD = 64.0  # C/n without noise
MAX_DEFAULT = 10_000.0  # C: steps grow as its root


def check_size(*, cost: float, expected: int) -> None:
    """Refuse sizes for which the accuracy would not be reached, before any record is looked at.

    Half of `TOLERANCE` is for the steps, half for rounding: a sum of so many products is exact to n·2⁻⁵³ of
    its size C, and errors of all steps add up to √L of one. Only public numbers decide.
    """
    each = cost / expected
    if each > MAX_COST_PER_RECORD:
        raise PrivacyError(
            f"trainer.cost = {cost:g}: one record would count C/n = {each:g}; expected at most "
            f"{MAX_COST_PER_RECORD:g}; nothing was sent"
        )
    rounding = 4 * math.sqrt(_smoothness(cost)) * cost * expected * 2.0**-53
    if rounding > TOLERANCE / 2 * each:
        raise PrivacyError(
            f"trainer.cost = {cost:g}: the agreed accuracy of w is not reached for so many records; expected "
            "less; nothing was sent"
        )


def steps(*, cost: float, records: int, expected: int) -> int:
    """Return how many steps of Nesterov's method bring w within TOLERANCE/2 · C/n of the minimum.

    After k of them the objective is above its minimum by at most (1 − 1/√L)ᵏ of what it is at 0, and
    ½‖w − w*‖² is at most that.
    """
    each = cost / expected
    agreed = (TOLERANCE / 2 * each) ** 2 / 2
    return math.ceil(math.sqrt(_smoothness(each * records)) * max(math.log(each * records / agreed), 1))


def _smoothness(weight: float) -> float:
    """Return L of the objective, where the weights of all records add up to `weight`."""
    return 1 + weight / (2 * SMOOTH)


def solve(z: Reals, signs: Reals, *, cost: float, expected: int) -> Reals:
    """Return w (problems × features) of ½‖w‖² + (C/n) Σ loss for each column of signs (records × problems).

    There are `expected` records at most. The work is fixed by public numbers alone.
    """
    each, records = cost / expected, expected
    smoothness = _smoothness(each * records)
    momentum = (math.sqrt(smoothness) - 1) / (math.sqrt(smoothness) + 1)
    w = ahead = np.zeros((z.shape[1], signs.shape[1]))
    for _ in range(steps(cost=cost, records=records, expected=expected)):
        slope = np.clip((1 + SMOOTH - signs * (z @ ahead)) / (2 * SMOOTH), 0, 1) * signs
        before, w = w, ahead - (ahead - each * (z.T @ slope)) / smoothness
        ahead = w + momentum * (w - before)
    return w.T


def sensitivity(*, cost: float, records: int, problems: int = 1) -> float:
    """Return Δ₂ of the weights of all `problems` (one-vs-rest) together, solved to within `TOLERANCE`.

    Neighbours: replace one record. It moves every problem's weights, hence √problems: with Laplace or
    gamma noise that is the same as giving each problem an equal share of ε.
    """
    check(cost=cost, records=records, problems=problems)
    return math.sqrt(problems) * 2 * cost / records * (1 + TOLERANCE)


def perturbed(
    weights: Reals,
    *,
    cost: float,
    records: int,
    problems: int,
    kind: SvmNoise,
    noise_value: float,
    noise: Noise,
) -> Exact:
    """Release the weights (problems × features) with noise.

    gamma      density ∝ exp(−ε‖x‖₂/Δ₂): a random direction, a length of Gamma(numbers, Δ₂/ε); pure ε
    laplace    Lap(√numbers Δ₂/ε) on each number, since ‖·‖₁ ≤ √numbers ‖·‖₂; pure ε
    paper      Lap(2^2.5 C √D/(n ε)), D = features/2: twice as much as it takes for one problem; pure ε
    gaussian   N(0, (m Δ₂)²) for noise_value = m = σ/Δ

    Guarantee: pure ε = noise_value, or one Gaussian release; proved. Neighbours: replace one record.
    """
    check(noise_value=noise_value)
    delta = sensitivity(cost=cost, records=records, problems=problems) * (1 + ROUNDING)
    if kind == "gaussian":
        add, scale = noise.gaussian, noise_value * delta
    elif kind == "gamma":
        add, scale = noise.spherical, delta / noise_value
    elif kind == "paper":
        features = weights.size // problems
        add = noise.laplace
        scale = problems * paper_scale(cost=cost, records=records, features=features, epsilon=noise_value)
    else:
        on_grid = 2 * weights.size * FINENESS / noise_value  # a secure source rounds every number to its grid
        add, scale = noise.laplace, math.sqrt(weights.size) * delta / noise_value * (1 + on_grid)
    if isinstance(noise, SecureNoise):
        noise.check(cost, scale=scale)  # ‖w‖ ≤ C, whatever the records are
    return add(weights, scale=scale)


def paper_scale(*, cost: float, records: int, features: int, epsilon: float) -> float:
    """λ = 2^2.5 C √D/(n ε), D = features/2 (Algorithm 1, step 4)."""
    return 2**2.5 * cost * math.sqrt(features / 2) / (records * epsilon)


def score_noise(*, kind: SvmNoise, noise_value: float, records: int, problems: int, features: int) -> float:
    """Return τ, the standard deviation of the noise in a score ŵᵀz (‖z‖ = 1), for C = 1; it grows as C."""
    numbers, delta = problems * features, sensitivity(cost=1.0, records=records, problems=problems)
    if kind == "gaussian":
        return noise_value * delta
    if kind == "gamma":  # a length of Gamma(numbers, Δ₂/ε), in a random direction
        return math.sqrt(numbers + 1) * delta / noise_value
    if kind == "paper":
        one = paper_scale(cost=1.0, records=records, features=features, epsilon=noise_value)
        return math.sqrt(2) * problems * one
    return math.sqrt(2 * numbers) * delta / noise_value


def default_cost(*, records: int, score_noise: float = 0.0) -> float:
    """Return C for so many records and so much noise: 1/C = τ/NOISE_SHARE + 1/(COST_PER_RECORD · n).

    Regularisation holds scores below the margin, 1, and the more C the less; the noise of a score is τ C. So
    C is as large as keeps that noise at NOISE_SHARE of the margin. Without noise, a record counts as
    much as COST_PER_RECORD. At most MAX_DEFAULT. Only public numbers decide; `check_size` refuses none of
    it for up to four million records.

    Parameters
    ----------
    records
        n: the public number that C is divided by.
    score_noise
        τ, of the model that is used: over several sites, of the mean; 0 without noise.
    """
    check(records=records)
    cost = min(1 / (score_noise / NOISE_SHARE + 1 / (COST_PER_RECORD * records)), MAX_DEFAULT)
    if not score_noise:
        return cost
    largest = (TOLERANCE / 8 * 2.0**53 / records**2) ** 2 - 1  # of `check_size`
    return max(min(cost, 0.99 * largest), MIN_COST)
