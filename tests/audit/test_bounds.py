"""Bounds: what perfect attacks certify, and that true statements are rarely refuted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom

from fed_dp.audit.bounds import LARGEST, from_rates, one_run, one_run_p_value, rate_bounds, two_worlds
from fed_dp.errors import ConfigError


@pytest.mark.parametrize(("trials", "shown"), [(50, 2.57), (100, 3.28), (300, 4.39), (1000, 5.60)])
def test_a_perfect_attack_certifies_what_its_trials_allow(trials: int, shown: float) -> None:
    assert from_rates(trials, 0, trials, delta=0.0, doubt=0.05) == pytest.approx(shown, abs=0.01)
    scores = np.arange(2 * trials, dtype=float)
    assert two_worlds(scores + 1e6, scores) == pytest.approx(shown, abs=0.01)
    assert two_worlds(scores, scores + 1e6) == pytest.approx(shown, abs=0.01)  # either way round


def test_rates_are_bounded_from_both_sides() -> None:
    assert rate_bounds(0, 10, 0.05)[0] == 0
    assert rate_bounds(10, 10, 0.05)[1] == 1
    low, high = rate_bounds(5, 10, 0.05)
    assert binom.sf(4, 10, low) == pytest.approx(0.05)
    assert binom.cdf(5, 10, high) == pytest.approx(0.05)
    assert from_rates(0, 5, 10, delta=0.0, doubt=0.05) == -math.inf
    assert from_rates(9, 0, 10, delta=0.9, doubt=0.05) == -math.inf  # δ alone explains it


@pytest.mark.statistical
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_a_true_statement_is_refuted_no_more_often_than_stated(epsilon: float) -> None:
    rng = np.random.default_rng(1)
    wrong, near = 0, []
    for _ in range(300):
        worlds = [rng.laplace(shift, 1 / epsilon, 2000) for shift in (1.0, 0.0)]
        bound = two_worlds(*worlds, confidence=0.9)
        wrong += bound > epsilon
        near.append(bound)
    assert wrong <= binom.ppf(0.999, 300, 0.1)
    assert np.median(near) > 0.6 * epsilon  # and it is not for want of trying


@pytest.mark.statistical
def test_half_of_the_noise_is_noticed() -> None:
    rng = np.random.default_rng(2)
    worlds = [rng.laplace(shift, 0.5, 20_000) for shift in (1.0, 0.0)]  # ε = 2, said to be 1
    assert two_worlds(*worlds) > 1.5


def test_choosing_the_event_on_the_trials_it_is_measured_on_would_not_do() -> None:
    """Scores that mean nothing show nothing: over many repetitions, bounds stay below 0."""
    rng = np.random.default_rng(3)
    bounds = [two_worlds(rng.normal(size=200), rng.normal(size=200)) for _ in range(200)]
    assert np.mean(np.array(bounds) > 0) <= 0.05


def test_too_few_trials_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 20"):
        two_worlds(np.zeros(18), np.zeros(18))
    with pytest.raises(ConfigError, match="as many of both"):
        two_worlds(np.zeros(40), np.zeros(30))


def test_one_run_of_pure_dp_is_a_binomial_tail() -> None:
    p = one_run_p_value(canaries=100, guesses=50, correct=40, epsilon=1.0, delta=0.0)
    assert p == pytest.approx(binom.sf(39, 50, math.e / (1 + math.e)))
    with_delta = one_run_p_value(canaries=100, guesses=50, correct=40, epsilon=1.0, delta=1e-3)
    assert p < with_delta < p + 2 * 100 * 1e-3
    found = one_run(canaries=100, guesses=100, correct=100, delta=0.0)
    assert binom.sf(99, 100, 1 / (1 + math.exp(-found))) == pytest.approx(0.05)
    assert one_run(canaries=100, guesses=100, correct=50, delta=0.0) == 0
    assert one_run(canaries=10**9, guesses=10**9, correct=10**9, delta=0.0) <= LARGEST
    assert one_run(canaries=100, guesses=100, correct=99, delta=1e-5) < one_run(
        canaries=100, guesses=100, correct=99, delta=0.0
    )


@pytest.mark.statistical
def test_randomized_response_is_not_refuted_by_one_run() -> None:
    rng, epsilon = np.random.default_rng(4), 1.0
    rate = 1 / (1 + math.exp(-epsilon))
    bounds = [
        one_run(canaries=500, guesses=500, correct=int(rng.binomial(500, rate)), delta=0.0)
        for _ in range(300)
    ]
    assert np.sum(np.array(bounds) > epsilon) <= binom.ppf(0.999, 300, 0.05)
    assert np.median(bounds) > 0.7
