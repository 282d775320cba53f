"""Laplace and Gaussian: sensitivities by search, calibration against two other ways to compute it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.integrate import quad
from scipy.stats import norm

from fed_dp.errors import PrivacyError
from fed_dp.mechanisms import gaussian, gaussian_delta, gaussian_epsilon, gaussian_multiplier, laplace
from tests.mechanisms.privacy_loss import Spy, mutant

BOUND, EPSILON, CLIP, SIZE = 0.3, 1.5, 2.0, 6  # a bound that float32 rounds up


def pairs() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    ones = np.ones(SIZE)
    yield 1e9 * ones, -1e9 * ones
    yield np.eye(SIZE)[0] * 50, -np.eye(SIZE)[0] * 50
    yield np.full(SIZE, np.inf), np.full(SIZE, np.nan)
    for _ in range(300):
        yield tuple(rng.normal(size=(2, SIZE)) * rng.exponential(3, (2, 1)))  # type: ignore[misc]


def laplace_losses(release: Callable[..., Any]) -> list[float]:
    """Σ|Δ_j| / scale, exactly."""
    losses = []
    for one, other in pairs():
        spy = Spy()
        for values in (one, other):
            release(values, bound=BOUND, epsilon=EPSILON, noise=spy)
        (first, scale), (second, _) = spy.calls
        losses.append(float(np.abs(first - second).sum() / scale))
    return losses


def test_laplace_costs_epsilon_for_the_worst_pair_and_less_for_all_others() -> None:
    losses = laplace_losses(laplace)
    assert 0.999 * EPSILON < max(losses) <= EPSILON * (1 + 1e-12)


@pytest.mark.parametrize(
    "change",
    [
        ("scale=2 * bound * max(most, 1) / epsilon", "scale=bound * max(most, 1) / epsilon"),
        ("scale=2 * bound * max(most, 1) / epsilon", "scale=2 * bound / epsilon"),
        ("np.clip(exact, -bound, bound)", "exact"),
        ("exact = values.astype(np.float64)", "exact = values.astype(np.float32)"),
    ],
)
def test_weakened_laplace_is_found(change: tuple[str, str]) -> None:
    weakened = mutant(import_module("fed_dp.mechanisms.laplace"), change)
    assert not max(laplace_losses(weakened.laplace)) <= EPSILON * (1 + 1e-12)


def gaussian_distances(release: Callable[..., Any]) -> list[float]:
    """‖Δ‖₂ over σ, in units of 1/multiplier."""
    found = []
    for one, other in pairs():
        spy = Spy()
        for values in (one, other):
            release(values, clip=CLIP, multiplier=3.0, noise=spy)
        (first, scale), (second, _) = spy.calls
        found.append(float(np.linalg.norm(first - second) / scale * 3.0))
    return found


def test_gaussian_moves_by_one_sensitivity_for_the_worst_pair_and_less_for_all_others() -> None:
    assert 0.999 < max(gaussian_distances(gaussian)) <= 1


@pytest.mark.parametrize(
    "change",
    [("scale=multiplier * 2 * clip", "scale=multiplier * clip"), ("if norm > clip:", "if norm > 10 * clip:")],
)
def test_weakened_gaussian_is_found(change: tuple[str, str]) -> None:
    weakened = mutant(import_module("fed_dp.mechanisms.gaussian"), change)
    assert max(gaussian_distances(weakened.gaussian)) > 1.01


@pytest.mark.parametrize("multiplier", [0.4, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0, 4.0])
def test_delta_is_the_hockey_stick_divergence(multiplier: float, epsilon: float) -> None:
    one, other = norm(1 / multiplier, 1), norm(0, 1)
    expected, _ = quad(
        lambda x: max(0.0, one.pdf(x) - math.exp(epsilon) * other.pdf(x)),
        -30,
        30,
        limit=500,
        points=[multiplier * epsilon + 0.5 / multiplier],
    )
    assert gaussian_delta(epsilon, multiplier) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 4.0])
def test_epsilon_agrees_with_the_privacy_loss_distribution(multiplier: float) -> None:
    theirs = pld.from_gaussian_mechanism(multiplier, value_discretization_interval=1e-4)
    ours = gaussian_epsilon(multiplier=multiplier, delta=1e-5)
    assert ours == pytest.approx(theirs.get_epsilon_for_delta(1e-5), rel=2e-3)
    assert gaussian_delta(ours, multiplier) <= 1e-5
    assert gaussian_delta(0.999 * ours, multiplier) > 1e-5


@pytest.mark.parametrize(("epsilon", "delta", "releases"), [(1.0, 1e-5, 1), (0.1, 1e-6, 50), (8.0, 1e-5, 15)])
def test_calibration_spends_the_budget_and_never_more(epsilon: float, delta: float, releases: int) -> None:
    multiplier = gaussian_multiplier(epsilon=epsilon, delta=delta, releases=releases)
    spent = gaussian_epsilon(multiplier=multiplier / math.sqrt(releases), delta=delta)
    assert 0.999 * epsilon < spent <= epsilon * (1 + 1e-9)


def test_known_values_of_the_analytic_gaussian() -> None:
    """σ = 3.730632 for ε = 1, δ = 1e-5, from the authors' own code (Balle and Wang 2018)."""
    assert gaussian_multiplier(epsilon=1.0, delta=1e-5) == pytest.approx(3.730632, abs=1e-5)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PrivacyError, match="bound = -1"):
        laplace(np.ones(3), bound=-1.0, epsilon=1.0, noise=Spy())
    with pytest.raises(PrivacyError, match="3 values: at most 2 were agreed"):
        laplace(np.ones(3), bound=1.0, epsilon=1.0, count=2, noise=Spy())
    with pytest.raises(PrivacyError, match="clip = nan"):
        gaussian(np.ones(3), clip=math.nan, multiplier=1.0, noise=Spy())
    with pytest.raises(PrivacyError, match="delta = 0"):
        gaussian_epsilon(multiplier=1.0, delta=0.0)
