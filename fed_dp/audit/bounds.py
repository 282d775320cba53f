"""From what an attack got right to a lower bound on ε.

References: Jagielski, Ullman, Oprea, "Auditing Differentially Private Machine Learning", NeurIPS 2020;
Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023, Theorem 5.2;
Mahloujifar, Melis, Chaudhuri, "Auditing f-Differential Privacy in One Run", 2024, Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import beta, binom

from fed_dp.errors import ConfigError

Scores = NDArray[np.float64]
MAX_EPSILON = 50.0  # no number of trials or canaries here can show more


def check_confidence(confidence: float) -> None:
    """Refuse a confidence that is none."""
    if not 0.5 <= confidence < 1:
        raise ConfigError(f"--confidence = {confidence!r}: expected from 0.5 to below 1")


def rate_bounds(hits: int, trials: int, doubt: float) -> tuple[float, float]:
    """Return lower and upper bounds on a rate, each wrong with chance at most `doubt` (Clopper–Pearson)."""
    low = float(beta.ppf(doubt, hits, trials - hits + 1)) if hits else 0.0
    high = float(beta.isf(doubt, hits + 1, trials - hits)) if hits < trials else 1.0
    return low, high


def from_rates(more: int, fewer: int, trials: int, *, delta: float, doubt: float) -> float:
    """Return the ε that an event shows which came `more` times in one world, `fewer` in the other.

    P(event) ≤ e^ε P′(event) + δ, hence ε ≥ ln((P − δ)/P′); each rate is bounded with half of the doubt.
    """
    low, _ = rate_bounds(more, trials, doubt / 2)
    _, high = rate_bounds(fewer, trials, doubt / 2)
    return math.log((low - delta) / high) if low > delta else -math.inf


def two_worlds(present: Scores, absent: Scores, *, delta: float = 0.0, confidence: float = 0.95) -> float:
    """Return a lower bound on ε from an attack's scores in two worlds, larger where the canary is present.

    The event (scores above or below a threshold, in which world they are more frequent) is chosen on the
    first half of the trials and measured on the second, so that it is one event, whatever was chosen.
    """
    trials = len(present) // 2
    if trials < 10 or len(present) != len(absent):
        raise ConfigError(f"{len(present)} and {len(absent)} trials: expected as many of both, at least 20")
    doubt = 1 - confidence
    learnt = np.sort(present[:trials]), np.sort(absent[:trials])
    limits = np.unique(np.concatenate(learnt))
    best, chosen = -math.inf, (limits[0], True, True)
    for above in (True, False):
        counts = [_count(scores, limits, above=above) for scores in learnt]
        for swapped in (False, True):
            more, fewer = (counts[1], counts[0]) if swapped else (counts[0], counts[1])
            low = np.where(more > 0, beta.ppf(doubt / 2, np.maximum(more, 1), trials - more + 1), 0.0)
            high = np.where(
                fewer < trials, beta.isf(doubt / 2, fewer + 1, np.maximum(trials - fewer, 1)), 1.0
            )
            shown = np.log(np.maximum(low - delta, 1e-300) / high)
            if (found := float(shown.max())) > best:
                best, chosen = found, (float(limits[shown.argmax()]), above, swapped)
    limit, above, swapped = chosen
    tested = [
        int(_count(np.sort(scores[trials : 2 * trials]), np.array([limit]), above=above)[0])
        for scores in (present, absent)
    ]
    often, seldom = reversed(tested) if swapped else tested
    return from_rates(often, seldom, trials, delta=delta, doubt=doubt)


def _count(scores: Scores, limits: Scores, *, above: bool) -> NDArray[np.int64]:
    """Count the (sorted) scores at or above each limit, or at or below it."""
    if above:
        return np.asarray(len(scores) - np.searchsorted(scores, limits, "left"), np.int64)
    return np.asarray(np.searchsorted(scores, limits, "right"), np.int64)


def one_run_p_value(*, canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return how likely an (ε, δ)-DP run would allow so many correct guesses, at most.

    `canaries` records were each in or out by a fair coin; of them `guesses` were guessed. Under pure ε-DP
    the number of correct guesses is dominated by Binomial(guesses, e^ε/(1 + e^ε)); δ adds 2 · canaries · δ ·
    max_i P(correct − i ≤ Binomial < correct)/i.
    """
    rate = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, rate))
    if not correct or not delta:
        return tail
    below = binom.cdf(correct - 1, guesses, rate) - binom.cdf(
        correct - 1 - np.arange(1, correct + 1), guesses, rate
    )
    return min(1.0, tail + 2 * canaries * delta * float((below / np.arange(1, correct + 1)).max()))


def one_run(*, canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """Return the largest ε that so many correct guesses speak against; 0 where there is none."""
    doubt = 1 - confidence

    def beyond(epsilon: float) -> float:
        return (
            one_run_p_value(canaries=canaries, guesses=guesses, correct=correct, epsilon=epsilon, delta=delta)
            - doubt
        )

    if beyond(0.0) >= 0:
        return 0.0
    if beyond(MAX_EPSILON) < 0:
        return MAX_EPSILON
    return float(brentq(beyond, 0.0, MAX_EPSILON, xtol=1e-9))


Least = Callable[[float], float]  # see `least_wrong`


def least_wrong(epsilons: Scores, deltas: Scores) -> Least:
    """Return the least chance of an event in one world, as a function of its chance r in the other.

    `deltas` is the privacy profile at `epsilons` ≥ 0: P(E) ≤ e^ε P′(E) + δ(ε), whichever world is which.
    """

    def least(r: float) -> float:
        direct = ((r - deltas) * np.exp(-epsilons)).max()
        reverse = (1 - deltas - np.exp(epsilons) * (1 - r)).max()
        return max(0.0, float(direct), float(reverse))

    return least


def one_run_rejects(
    least: Least, *, canaries: int, guesses: int, correct: int, confidence: float = 0.95
) -> bool:
    """Return whether so many correct guesses speak against a privacy profile.

    Let p_t be the chance of t correct guesses, r_i = Σ_{t ≥ i} p_t t/m that a canary is guessed right with i
    or more right in all, h_i = Σ_{t ≥ i} p_t (g − t)/m the same for wrong. Flipping a canary's coin turns its
    right guess into a wrong one, with one right guess less in all: h_i ≥ least(r_{i+1}). Were the chance of
    `correct` or more above 1 − confidence, these would add up to more than r_0 + h_0 = g/m.
    """
    right = (1 - confidence) * correct / canaries
    wrong = (1 - confidence) * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        more = max(wrong, least(right))
        right, wrong = right + i / (guesses - i) * (more - wrong), more
        if right + wrong >= guesses / canaries:
            return True
    return False


def sampled(
    draw: Callable[[np.random.Generator, bool], float], *, trials: int, seed: int
) -> tuple[Scores, Scores]:
    """Return the scores of `trials` runs in each world, from one seed."""
    rng = np.random.default_rng(seed)
    present = np.array([draw(rng, True) for _ in range(trials)])
    return present, np.array([draw(rng, False) for _ in range(trials)])
