"""The papers' functional mechanism: polynomials against their definitions, sensitivities by search."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement

import numpy as np
import pytest
from numpy.polynomial import Polynomial
from scipy.integrate import quad
from scipy.optimize import linprog, minimize_scalar
from scipy.special import expit

from fed_dp.errors import PrivacyError
from fed_dp.mechanisms import SimulationNoise
from fed_dp.mechanisms.functional import (
    Approximation,
    approximation,
    auto_encoder_sensitivity,
    coefficient_noise,
    cross_entropy_error,
    cross_entropy_error_bound,
    energy_error_bound,
    energy_monomials,
    energy_sensitivity,
    head_sensitivity,
    printed_cross_entropy_error_bound,
    printed_energy_error_ceiling,
    printed_energy_error_floor,
    sigmoid_coefficient,
    sigmoid_error_ceiling,
    sigmoid_error_floor,
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


# ------------------------------------------------------------------------------ errors of truncation


def exact(z: np.ndarray, y: np.ndarray) -> float:
    """The cross-entropy, summed over outputs, per record."""
    return float((np.logaddexp(0, z) - y * z).sum(1).mean())


def truncated(z: np.ndarray, y: np.ndarray) -> float:
    return float((math.log(2) + (0.5 - y) * z + z * z / 8).sum(1).mean())


@pytest.mark.parametrize("scale", [0.3, 2.0, 8.0])
def test_the_auto_encoders_truncation_costs_no_more_than_its_bound(scale: float) -> None:
    """dPA, Lemma 4, with h = σ(Wᵀx) and tied weights: minimisers among random weights."""
    rng = np.random.default_rng(0)
    x = rng.random((40, 6))
    found = []
    for _ in range(300):
        weights = rng.normal(size=(6, 3)) * scale * rng.random()
        z = expit(x @ weights) @ weights.T
        found.append((exact(z, x), truncated(z, x), float(np.abs(z).max())))
        # At any weights, not only at minimisers:
        assert 0 <= found[-1][1] - found[-1][0] <= cross_entropy_error_bound(found[-1][2], 6)
    best, approximated = min(found), min(found, key=lambda each: each[1])
    assert approximated[0] - best[0] <= cross_entropy_error_bound(best[2], 6)


def test_the_error_bound_of_truncation_is_reached() -> None:
    """98 % of it, by two parameters between which truncation cannot tell: it is symmetric about z = 2."""
    y = np.ones((1, 1))
    near, far = np.array([[1 + 1e-9]]), np.array([[3.0]])
    assert truncated(near, y) < truncated(far, y)
    cost = exact(near, y) - exact(far, y)
    bound = cross_entropy_error_bound(3.0)
    assert 0.98 * bound < cost <= bound
    assert truncated(far, y) - exact(far, y) == pytest.approx(bound)


def test_logistic_regression_costs_no_more_than_its_bound_and_the_printed_one_is_exceeded() -> None:
    """dPA, Lemma 4 (Eq. 17), AdLM, Lemma 7: features in [0, 1], nothing that bounds the weights."""
    h = np.append(np.full(2499, 0.01), 1.0)[:, None]
    y = np.append(np.ones(2499), 0.0)[:, None]
    hat = 4 * float(((y - 0.5) * h).sum() / (h * h).sum())  # the truncated one's minimiser: least squares
    best = minimize_scalar(lambda w: exact(w * h, y), bounds=(0, 1000), method="bounded").x
    cost = exact(hat * h, y) - exact(best * h, y)
    assert cost == pytest.approx(0.3667, abs=1e-3)
    assert cost > printed_cross_entropy_error_bound()  # .3147
    assert cost <= cross_entropy_error_bound(float(np.abs(best * h).max()))


def test_the_printed_error_bound_is_64_times_too_large_where_it_holds() -> None:
    assert printed_cross_entropy_error_bound() == pytest.approx(0.3147, abs=1e-4)
    assert printed_cross_entropy_error_bound(784) == pytest.approx(784 * 0.31466, rel=1e-4)
    ratio = printed_cross_entropy_error_bound(10) / cross_entropy_error_bound(1.0, 10)
    assert ratio == pytest.approx(64.4, rel=0.01)
    # The third derivative of log(1 + exp(-z)) at 1, by differences, is not the printed 2e / (1 + e)³.
    at = [float(np.logaddexp(0, -(1 + k * 1e-2))) for k in (-1.5, -0.5, 0.5, 1.5)]
    third = (at[3] - 3 * at[2] + 3 * at[1] - at[0]) / 1e-6
    assert third == pytest.approx(expit(1) * expit(-1) * (1 - 2 * expit(1)), rel=1e-3)
    assert abs(third - 2 * math.e / (1 + math.e) ** 3) > 0.1


def best_error(degree: int, *, weighed: bool = False) -> float:
    """U_L by linear programming: of the best polynomial p for σ on [−1, 1]; weighed, of t p(t) for t σ(t)."""
    t = np.cos(np.linspace(0, np.pi, 401))
    weight = t if weighed else np.ones_like(t)
    powers, target = np.polynomial.chebyshev.chebvander(t, degree) * weight[:, None], expit(t) * weight
    ones = -np.ones((len(t), 1))
    rows = np.block([[powers, ones], [-powers, ones]])
    cost = np.append(np.zeros(degree + 1), 1)
    bounds = [(None, None)] * (degree + 1) + [(0, None)]
    found = linprog(cost, A_ub=rows, b_ub=np.append(target, -target), bounds=bounds, method="highs")
    return float(found.fun)


def test_sigmoid_coefficients_are_the_integrals_of_their_definition() -> None:
    for k in range(6):
        value, _ = quad(lambda t, k=k: expit(math.cos(t)) * math.cos(k * t), 0, math.pi)
        assert sigmoid_coefficient(k) == pytest.approx(2 / math.pi * value, abs=1e-9)


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5])
def test_the_chebyshev_series_is_as_wrong_as_the_lemma_of_the_sigmoid_says(degree: int) -> None:
    """pCDBN, Eqs. 20 and 21: the floor is 78 % of the truth, the ceiling four times of it."""
    error, best = approximation("chebyshev", degree).error, best_error(degree)
    assert sigmoid_error_floor(degree) <= best * (1 + 1e-4) <= error * (1 + 2e-3)
    assert error < sigmoid_error_ceiling(degree, best)
    assert best < 1.35 * sigmoid_error_floor(degree)
    assert sigmoid_error_ceiling(degree, best) / 5 < error


def energies(
    totals: np.ndarray, polynomial: Approximation, *, normalised: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Of records × groups × units: the energy with σ (of X, or of t itself), and with the polynomial of X."""
    padded = np.pad(totals**2, ((0, 0), (2, 2), (0, 0)))
    near = sum(padded[:, k : k + totals.shape[1]] for k in range(5))
    ratio = totals / np.maximum(np.abs(totals), (2 + 1e-4 * near) ** 0.75)
    target = expit(ratio if normalised else totals)
    approximated = Polynomial(polynomial.coefficients)(ratio)
    return (target * totals).sum((1, 2)), (approximated * totals).sum((1, 2))


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("degree", [1, 3, 7])
def test_the_energys_error_is_below_its_bound(degree: int, normalised: bool) -> None:
    rng = np.random.default_rng(degree)
    taken, tight = approximation("chebyshev", degree), 0.0
    for _ in range(50):
        largest = 5 * rng.random() + 0.1
        totals = rng.uniform(-largest, largest, (20, 6, 9))
        totals[0] = largest  # all units alike
        one, two = energies(totals, taken, normalised=normalised)
        most = float(np.abs(totals).max())
        bound = energy_error_bound(taken, units=54, largest=most, normalised=normalised)
        assert np.abs(one - two).max() <= bound * (1 + 1e-9)
        tight = max(tight, float(np.abs(one - two).max()) / bound)
    assert tight > 0.4  # a bound of 40 % would fail


def test_the_printed_floor_of_energies_is_undercut() -> None:
    """pCDBN, Lemma 3, lower bound: over |t| ≤ 1 polynomials come closer; without weights nothing is lost."""
    for degree in (2, 4):
        assert best_error(degree, weighed=True) < 0.9 * printed_energy_error_floor(degree, 1)
    assert printed_energy_error_floor(7, 54) == 0
    one, two = energies(np.zeros((1, 6, 9)), approximation("chebyshev", 2), normalised=True)
    assert one == two
    assert printed_energy_error_floor(2, 54) > 0.1


def test_the_printed_ceiling_of_energies_is_exceeded_by_the_normaliser_alone() -> None:
    """pCDBN, Lemma 3, upper bound, of the energy of Eq. 12: all units at t = 1, where X is .59."""
    five = approximation("chebyshev", 5)
    one, two = energies(np.ones((1, 6, 9)), five, normalised=False)
    cost = float(np.abs(one - two).max())
    assert cost > 50 * printed_energy_error_ceiling(5, 54, 54 * best_error(5, weighed=True))
    assert cost <= energy_error_bound(five, units=54, largest=1, normalised=False)


def test_monomials_of_the_energy_are_counted() -> None:
    """Written out for two weights and a bias, and c; in the paper's networks they cannot be."""
    taken = approximation("chebyshev", 3)  # without a term of degree 2
    written = [m for power in (0, 1, 3) for m in combinations_with_replacement("wvb", power + 1)]
    assert energy_monomials(taken, patch=2) == (len(written) + 1, 4)
    seven = approximation("chebyshev", 7)
    assert energy_monomials(seven, patch=25) == (14_644_566, 27)  # MNIST, first layer
    assert energy_monomials(seven, patch=32 * 25)[0] > 4e18  # second
