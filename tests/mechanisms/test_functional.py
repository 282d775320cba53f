"""The papers' functional mechanism: polynomials against their definitions, sensitivities by search."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.polynomial import Polynomial
from scipy.integrate import quad
from scipy.special import expit

from fed_dp.errors import PrivacyError
from fed_dp.mechanisms import SimulationNoise
from fed_dp.mechanisms.functional import (
    approximation,
    auto_encoder_sensitivity,
    coefficient_noise,
    cross_entropy_error,
    energy_sensitivity,
    head_sensitivity,
)


def test_chebyshev_coefficients_are_the_integrals_of_their_definition() -> None:
    found = Polynomial(approximation("chebyshev", 7).coefficients)

    def a(k: int) -> float:  # (2/π) ∫ f(cos t) cos kt dt
        value, _ = quad(lambda t: expit(math.cos(t)) * math.cos(k * t), 0, math.pi)
        return 2 / math.pi * value

    x = np.linspace(-1, 1, 101)
    series = a(0) / 2 + sum(a(k) * np.cos(k * np.arccos(x)) for k in range(1, 8))
    assert found(x) == pytest.approx(series, abs=1e-9)


def test_approximations_have_the_errors_that_theory_gives_them() -> None:
    errors = {name: approximation(name, 7).error for name in ("chebyshev", "taylor", "piecewise", "printed")}
    assert errors["chebyshev"] == pytest.approx(6.5e-8, rel=0.01)
    assert errors["taylor"] == pytest.approx(1.94e-5, rel=0.01)
    assert errors["piecewise"] == pytest.approx(0.00706, rel=0.01)
    assert errors["printed"] == pytest.approx(0.322, rel=0.01)
    assert approximation("chebyshev", 1).error == pytest.approx(0.0047, rel=0.01)
    by_degree = [approximation("chebyshev", degree).error for degree in (1, 3, 5, 7, 9)]
    assert by_degree == sorted(by_degree, reverse=True)


def test_the_printed_polynomial_is_a_smoothstep_at_four_and_a_half_times_the_sensitivity() -> None:
    printed = approximation("printed")
    for x in (-1.0, -0.3, 0.5, 1.0):
        area, _ = quad(lambda t: (1 - t * t) ** 3, 0, x)
        assert Polynomial(printed.coefficients)(x) == pytest.approx(0.5 + 35 / 32 * area)
    assert printed.weight / approximation("chebyshev", 7).weight == pytest.approx(4.53, rel=0.01)


def test_taylor_coefficients_are_derivatives() -> None:
    assert approximation("taylor", 5).coefficients == pytest.approx((0.5, 0.25, 0, -1 / 48, 0, 1 / 480))


def test_an_impossible_approximation_is_refused() -> None:
    with pytest.raises(PrivacyError, match=r"degree = 0: expected 1 to 15"):
        approximation("chebyshev", 0)
    with pytest.raises(PrivacyError, match=r"approximation = 'spline': expected one of chebyshev, taylor"):
        approximation("spline")  # type: ignore[arg-type]


def test_the_truncated_cross_entropy_is_as_wrong_as_stated() -> None:
    assert cross_entropy_error(1) == pytest.approx(0.0049, rel=0.01)
    assert cross_entropy_error(4) == pytest.approx(0.675, rel=0.01)


def coefficients(x: np.ndarray, h: np.ndarray) -> np.ndarray:
    """Of one record: (½ − x_j) h_e, and h_e h_q / 8 for every j, as the lemma counts them."""
    square = np.outer(h, h).ravel() / 8
    return np.concatenate([np.outer(0.5 - x, h).ravel(), np.tile(square, len(x))])


def test_the_papers_sensitivities_hold_for_a_fixed_encoder() -> None:
    rng = np.random.default_rng(0)
    d, b = 4, 5
    bound = auto_encoder_sensitivity(d, b)
    largest = 0.0
    for _ in range(500):
        (x, v), (h, g) = rng.integers(2, size=(2, d)), rng.random((2, b)).round(int(rng.integers(2)))
        largest = max(largest, float(np.abs(coefficients(x, h) - coefficients(v, g)).sum()))
    assert largest <= bound
    one, none = coefficients(np.ones(d), np.ones(b)), coefficients(np.zeros(d), np.ones(b))
    assert np.abs(one - none).sum() == pytest.approx(d * b)  # the linear half of Lemma 2 is reached
    assert head_sensitivity(b) == auto_encoder_sensitivity(1, b)
    assert head_sensitivity(b, 10) == 10 * head_sensitivity(b)


def test_the_energys_sensitivity_holds_over_the_domain() -> None:
    """Coefficients of one record of the energy, as Eq. 15 counts them: with X at most 1."""
    rng = np.random.default_rng(0)
    taken = approximation("chebyshev", 3)
    hidden, patch, visible = 4, 9, 16
    bound = energy_sensitivity(taken, hidden=hidden, patch=patch, visible=visible)
    powers = np.abs(taken.coefficients)
    for _ in range(300):
        each = []
        for _ in range(2):
            v, ratio = rng.random((hidden, patch)), rng.random((hidden, 1))
            terms = powers * ratio ** np.arange(4)
            each.append(np.concatenate([terms.ravel(), (terms[:, :, None] * v[:, None]).ravel()]))
        assert np.abs(each[0] - each[1]).sum() + visible <= bound
    assert energy_sensitivity(approximation("printed"), hidden=4, patch=9, visible=16) > 3 * bound


def test_coefficient_noise_has_the_scale_of_the_mechanism() -> None:
    drawn = coefficient_noise(
        (100, 100), sensitivity=6.0, epsilon=2.0, noise=SimulationNoise(np.random.default_rng(0))
    )
    assert np.abs(drawn).mean() == pytest.approx(3.0, rel=0.05)
    with pytest.raises(PrivacyError, match="epsilon = 0"):
        coefficient_noise((2,), sensitivity=1.0, epsilon=0.0, noise=SimulationNoise(np.random.default_rng(0)))
