"""Bounds: what perfect attacks certify, and that true statements are rarely refuted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from fed_dp.accounting import Gaussian, Laplace, SampledGaussian, epsilon
from fed_dp.accounting.composition import deltas
from fed_dp.audit.bounds import (
    MAX_EPSILON,
    from_rates,
    least_wrong,
    one_run,
    one_run_p_value,
    one_run_rejects,
    rate_bounds,
    two_worlds,
)
from fed_dp.audit.one_run import EPSILONS, by_profile
from fed_dp.errors import ConfigError
from fed_dp.mechanisms import gaussian_multiplier


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
    assert one_run(canaries=10**9, guesses=10**9, correct=10**9, delta=0.0) <= MAX_EPSILON
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


# --------------------------------------------------------------- against a whole privacy profile


def guesses(rng: np.random.Generator, shift: float, *, canaries: int, guessed: int) -> int:
    """How many guesses are right of ideal canaries: scores that are Gaussian, and `shift` apart."""
    inside = rng.random(canaries) < 0.5
    order = np.argsort(rng.normal(size=canaries) + shift * inside)
    each = guessed // 2
    return int((~inside[order[:each]]).sum() + inside[order[-each:]].sum())


@pytest.mark.statistical
def test_ideal_canaries_show_more_against_a_profile_than_against_epsilon_alone() -> None:
    rng, truth = np.random.default_rng(0), gaussian_multiplier(epsilon=8.0, delta=1e-5)
    both = []
    for _ in range(20):
        correct = guesses(rng, 1 / truth, canaries=1000, guessed=300)
        told = {"canaries": 1000, "guesses": 300, "correct": correct, "delta": 1e-5}
        profile = by_profile([Gaussian(truth)], confidence=0.95, **told)  # type: ignore[arg-type]
        both.append((one_run(**told), profile))  # type: ignore[arg-type]
    alone, profile = np.median(both, axis=0)
    assert 2.2 < alone < 3.2
    assert 3.5 < profile < 8
    assert np.max(both) <= 8


@pytest.mark.statistical
@pytest.mark.parametrize("truth", [0.5, 2.0])
def test_a_true_profile_is_rejected_no_more_often_than_stated(truth: float) -> None:
    rng = np.random.default_rng(1)
    least = least_wrong(EPSILONS, deltas([Gaussian(truth)], EPSILONS))
    for guessed in (20, 200):
        rejected = sum(
            one_run_rejects(
                least,
                canaries=200,
                guesses=guessed,
                correct=guesses(rng, 1 / truth, canaries=200, guessed=guessed),
            )
            for _ in range(200)
        )
        assert rejected <= binom.ppf(0.999, 200, 0.05)


def test_a_profile_with_too_much_noise_is_rejected() -> None:
    """The truth has four times the shift that is claimed."""
    rng = np.random.default_rng(2)
    least = least_wrong(EPSILONS, deltas([Gaussian(2.0)], EPSILONS))
    correct = guesses(rng, 4 / 2.0, canaries=500, guessed=100)
    assert one_run_rejects(least, canaries=500, guesses=100, correct=correct)
    assert not one_run_rejects(least, canaries=500, guesses=100, correct=60)


def test_the_least_chance_is_that_of_the_trade_off_curve() -> None:
    """Of a Gaussian: Φ(Φ⁻¹(r) − μ)."""
    least = least_wrong(np.linspace(0, 30, 3001), deltas([Gaussian(0.7)], np.linspace(0, 30, 3001)))
    for r in (0.001, 0.1, 0.5, 0.9, 0.999):
        assert least(r) == pytest.approx(norm.cdf(norm.ppf(r) - 1 / 0.7), rel=1e-3, abs=1e-9)
    pure = least_wrong(np.array([0.0, 1.0]), np.array([1 - math.exp(-1.0), 0.0]))  # ε = 1, δ = 0
    assert pure(0.5) == pytest.approx(0.5 * math.exp(-1))
    assert pure(0.99) == pytest.approx(1 - 0.01 * math.e)


@pytest.mark.parametrize("release", [Gaussian(1.3), SampledGaussian(1.0, 0.1, 30)])
def test_a_profile_is_at_delta_what_epsilon_is(release: Gaussian | SampledGaussian) -> None:
    [found] = deltas([release], np.array([epsilon([release], delta=1e-4)]))
    assert found == pytest.approx(1e-4, rel=1e-3)


def test_what_is_not_gaussian_is_held_against_epsilon_alone() -> None:
    from fed_dp.audit.one_run import _gaussian

    assert _gaussian([Gaussian(1.0), SampledGaussian(1.0, 0.1, 3)])
    assert not _gaussian([Gaussian(1.0), Laplace(1.0)])
    assert not _gaussian([])
