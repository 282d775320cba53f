"""Support vector machines: how far one record moves w, how exact the solver is, and what noise covers it."""

from __future__ import annotations

import math
from importlib import import_module
from types import ModuleType

import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.datasets import load_digits

from fed_dp.clients.svm.trainer import liblinear
from fed_dp.errors import PrivacyError
from fed_dp.mechanisms import SimulationNoise, support_vector
from fed_dp.mechanisms.statistics import ROUNDING
from fed_dp.mechanisms.support_vector import (
    COST_PER_RECORD,
    MAX_DEFAULT,
    NOISE_SHARE,
    SMOOTH,
    TOLERANCE,
    SvmNoise,
    check_size,
    default_cost,
    paper_scale,
    perturbed,
    score_noise,
    sensitivity,
    solve,
    steps,
)
from tests.mechanisms.privacy_loss import Spy, mutant

TIGHT = ("gamma", "laplace", "gaussian")
KINDS = (*TIGHT, "paper")


def unit(rows: np.ndarray) -> np.ndarray:
    found: np.ndarray = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    return found


def opposed(records: int, last: np.ndarray, sign: float) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of equal records with opposite labels, which cancel, and one more."""
    rng = np.random.default_rng(0)
    half = unit(rng.normal(size=(records // 2, len(last))))
    z = np.concatenate([half, half, last[None]])
    return z, np.concatenate([np.ones(len(half)), -np.ones(len(half)), [sign]])


def solved(z: np.ndarray, signs: np.ndarray, *, cost: float, expected: int) -> np.ndarray:
    return np.asarray(solve(z, signs[:, None], cost=cost, expected=expected)[0])


def loss(margin: np.ndarray) -> np.ndarray:
    """The smoothed hinge: it is the hinge but within SMOOTH of margin 1, where a parabola joins the two."""
    near = (1 + SMOOTH - margin) ** 2 / (4 * SMOOTH)
    return np.where(margin > 1 + SMOOTH, 0, np.where(margin < 1 - SMOOTH, 1 - margin, near))


def exact(z: np.ndarray, signs: np.ndarray, each: float) -> np.ndarray:
    """The minimum, by another method, run until it moves no more."""
    rows = z * signs[:, None]

    def objective(w: np.ndarray) -> tuple[float, np.ndarray]:
        margin = rows @ w
        slope = np.clip((1 + SMOOTH - margin) / (2 * SMOOTH), 0, 1)
        return 0.5 * float(w @ w) + each * float(loss(margin).sum()), w - each * rows.T @ slope

    start = np.zeros(z.shape[1])
    options = {"gtol": 1e-13, "ftol": 1e-16, "maxiter": 20_000, "maxcor": 50}
    found = minimize(objective, start, jac=True, method="L-BFGS-B", options=options)
    assert np.linalg.norm(found.jac) < TOLERANCE / 20 * each  # which is its distance, at most
    return np.asarray(found.x)


def test_an_explicit_pair_of_neighbours_moves_w_by_2c_over_n() -> None:
    records, cost = 101, 20.0
    last = unit(np.random.default_rng(1).normal(size=12))
    one, two = (
        solved(*opposed(records - 1, last, sign), cost=cost, expected=records) for sign in (1.0, -1.0)
    )
    moved = float(np.linalg.norm(one - two))
    assert 0.95 * 2 * cost / records <= moved <= sensitivity(cost=cost, records=records)


def test_no_replaced_record_moves_w_by_more() -> None:
    rng = np.random.default_rng(2)
    for trial in range(60):
        records, features = int(rng.integers(2, 40)), int(rng.integers(2, 9))
        cost, expected = float(10 ** rng.uniform(-1, 3)), int(rng.integers(records, 80))
        z, signs = unit(rng.normal(size=(records, features))), rng.choice([-1.0, 1.0], records)
        other, flipped = z.copy(), signs.copy()
        other[0] = -z[0] if trial % 2 else unit(rng.normal(size=features))
        flipped[0] = rng.choice([-1.0, 1.0])
        one = solved(z, signs, cost=cost, expected=expected)
        two = solved(other, flipped, cost=cost, expected=expected)
        assert np.linalg.norm(one - two) <= sensitivity(cost=cost, records=expected)


def test_the_printed_objective_with_the_papers_noise_loses_n_epsilon_over_2() -> None:
    """Eq. 3 has C Σ hinge: C is not divided by n, and the noise is."""
    records, cost, epsilon, pairs = 101, 0.5, 1.0, 8
    last = np.full(2 * pairs, 1 / math.sqrt(2 * pairs))
    one, two = (liblinear(*opposed(records - 1, last, sign), cost=cost) for sign in (1.0, -1.0))
    scale = paper_scale(cost=cost, records=records, features=2 * pairs, epsilon=epsilon)
    lost = float(np.abs(one - two).sum() / scale)  # of Laplace noise, exactly
    assert lost == pytest.approx(records * epsilon / 2, rel=0.02)
    first, second = (
        solved(*opposed(records - 1, last, sign), cost=cost, expected=records) for sign in (1.0, -1.0)
    )
    assert np.abs(first - second).sum() / scale <= epsilon


# Where liblinear, run until a duality gap was certified, gave up or not, by one label: C/n from 5,000 on.
HARD = [(3, 1000.0), (40, 1000.0), (400, 1000.0), (60, 30.0), (2000, 0.3), (1, 0.5), (5000, 1e-6)]


@pytest.mark.parametrize(("records", "each"), HARD)
@pytest.mark.parametrize("kind", ["random", "few kinds", "one class", "separable"])
def test_after_a_fixed_number_of_steps_w_is_as_near_to_the_minimum_as_was_agreed(
    kind: str, records: int, each: float
) -> None:
    rng = np.random.default_rng(3)
    z, signs = unit(rng.normal(size=(records, 5))), rng.choice([-1.0, 1.0], records)
    if kind == "few kinds":
        z = unit(rng.normal(size=(6, 5)))[rng.integers(0, 6, records)]
    elif kind == "one class":
        signs = np.ones(records)
    elif kind == "separable":
        signs = np.where(z[:, 0] > 0, 1.0, -1.0)
    check_size(cost=each * records, expected=records)
    w = solved(z, signs, cost=each * records, expected=records)
    away = np.linalg.norm(w - exact(z, signs, each))
    assert away <= TOLERANCE * each * (0.5 + 0.05)  # half is for rounding; `exact` is not quite exact


def test_with_a_tenth_of_the_steps_it_is_not() -> None:
    rng = np.random.default_rng(3)
    z, signs = unit(rng.normal(size=(3000, 5))), np.ones(3000)
    changes = ("range(steps(", "range(0, steps("), ("expected=expected)):", "expected=expected), 10):")
    fewer = mutant(support_vector, *changes)
    w = fewer.solve(z, signs[:, None], cost=300.0, expected=3000)[0]
    assert np.linalg.norm(w - exact(z, signs, 0.1)) > TOLERANCE * 0.1


def test_how_much_work_is_done_depends_on_sizes_alone() -> None:
    assert steps(cost=300.0, records=27_000, expected=27_000) < 1000
    assert steps(cost=300.0, records=54_000, expected=27_000) > steps(
        cost=300.0, records=27_000, expected=27_000
    )


def test_sizes_that_the_accuracy_could_not_be_reached_for_are_refused_beforehand() -> None:
    with pytest.raises(PrivacyError, match=r"trainer\.cost = 1e\+06: one record would count C/n = 5000"):
        check_size(cost=1e6, expected=200)
    with pytest.raises(PrivacyError, match="the agreed accuracy of w is not reached for so many records"):
        check_size(cost=300.0, expected=10**8)


def test_a_site_of_one_class_or_one_record_is_solved() -> None:
    z = unit(np.random.default_rng(0).normal(size=(9, 4)))
    assert solved(z, np.ones(9), cost=0.09, expected=9) == pytest.approx(0.01 * z.sum(0), rel=1e-2)
    assert solved(z[:1], -np.ones(1), cost=0.5, expected=1) == pytest.approx(-0.5 * z[0], rel=1e-2)


def scales(module: ModuleType = support_vector) -> dict[str, float]:
    found = {}
    for kind in KINDS:
        spy = Spy()
        module.perturbed(
            np.zeros((3, 8)), cost=5.0, records=50, problems=3, kind=kind, noise_value=0.5, noise=spy
        )
        [(_, found[kind])] = spy.calls
    return found


def losses(module: ModuleType = support_vector) -> dict[str, float]:
    """The loss of the worst neighbours over what was paid: every problem's w moves by all of 2C/n."""
    one = 2 * 5.0 / 50 * (1 + TOLERANCE)
    found = scales(module)
    together = math.sqrt(3) * one
    flat = 3 * math.sqrt(8) * one  # its L1 norm where all numbers are alike
    return {
        "gamma": together / found["gamma"] / 0.5,
        "laplace": flat / found["laplace"] / 0.5,
        "paper": flat / found["paper"] / 0.5,
        "gaussian": together / found["gaussian"] * 0.5,
    }


def test_noise_covers_the_worst_neighbours_and_no_more_than_it_must() -> None:
    found = losses()
    assert all(loss <= 1 for loss in found.values())
    assert all(found[kind] > 1 - 2 * ROUNDING for kind in TIGHT)
    assert found["paper"] == pytest.approx((1 + TOLERANCE) / 2)  # twice what it takes


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (("math.sqrt(problems) * 2 * cost / records", "2 * cost / records"), TIGHT),
        (("math.sqrt(problems) * 2 * cost", "math.sqrt(problems) * cost"), TIGHT),
        (("cost / records * (1 + TOLERANCE)", "cost / records"), TIGHT),
        (("noise.spherical, delta / noise_value", "noise.spherical, delta / noise_value / 2"), ("gamma",)),
        (("noise.gaussian, noise_value * delta", "noise.gaussian, noise_value * delta / 2"), ("gaussian",)),
        (("math.sqrt(weights.size) * delta", "delta"), ("laplace",)),
        (("scale = problems * paper_scale", "scale = paper_scale"), ("paper",)),
        (("2**2.5 *", "2**0.5 *"), ("paper",)),
    ],
)  # fmt: skip
def test_weakened_noise_is_found(change: tuple[str, str], found: tuple[str, ...]) -> None:
    weakened = mutant(import_module("fed_dp.mechanisms.support_vector"), change)
    after = losses(weakened)
    assert {kind for kind in KINDS if after[kind] > 1} == set(found)


def test_noise_of_random_direction_has_its_density() -> None:
    """Its length is Gamma(numbers, scale), its direction has no preference."""
    noise = SimulationNoise(np.random.default_rng(0))
    drawn = np.stack([noise.spherical(np.zeros((2, 3)), scale=0.5).ravel() for _ in range(4000)])
    lengths = np.linalg.norm(drawn, axis=1)
    assert lengths.mean() == pytest.approx(6 * 0.5, rel=0.03)
    assert lengths.var() == pytest.approx(6 * 0.25, rel=0.1)
    assert np.abs(unit(drawn).mean(0)).max() < 0.03
    assert noise.spherical(np.full(3, 7.0), scale=1e-9) == pytest.approx(np.full(3, 7.0))


def test_one_draw_for_one_release() -> None:
    spy = Spy()
    perturbed(np.zeros((2, 4)), cost=1.0, records=9, problems=2, kind="gamma", noise_value=1.0, noise=spy)
    assert len(spy.calls) == 1


# ----------------------------------------------------------------------------- C by rule


def measured(kind: SvmNoise, noise_value: float) -> float:
    """The standard deviation that a score's noise has, at C = 3, in units of C."""
    noise = SimulationNoise(np.random.default_rng(0))
    z = unit(np.random.default_rng(1).normal(size=(40, 8)))
    options = {"cost": 3.0, "records": 50, "problems": 3}
    drawn = [
        perturbed(np.zeros((3, 8)), kind=kind, noise_value=noise_value, noise=noise, **options) @ z.T  # type: ignore[arg-type]
        for _ in range(1500)
    ]
    return float(np.std(drawn)) / 3.0


@pytest.mark.parametrize("kind", KINDS)
def test_the_rule_knows_how_large_the_noise_of_a_score_is(kind: SvmNoise) -> None:
    stated = score_noise(kind=kind, noise_value=0.7, records=50, problems=3, features=8)
    assert measured(kind, 0.7) == pytest.approx(stated, rel=0.03)


def test_c_is_as_large_as_noise_lets_it_be_and_without_noise_counts_records_alike() -> None:
    assert default_cost(records=100) == pytest.approx(COST_PER_RECORD * 100)
    assert default_cost(records=10**6) == MAX_DEFAULT
    loud = default_cost(records=500, score_noise=3.0)
    assert loud * 3.0 == pytest.approx(NOISE_SHARE, rel=1e-3)
    by_noise = [default_cost(records=500, score_noise=noise) for noise in (1e-6, 1e-4, 1e-2, 1.0, 100.0)]
    assert by_noise == sorted(by_noise, reverse=True)
    with pytest.raises(PrivacyError, match="records = 0: expected a number above 0"):
        default_cost(records=0)


def test_what_the_rule_decides_is_never_refused() -> None:
    for records in (1, 2, 30, 27_000, 300_000, 1_000_000, 4_000_000):
        for noise in (1e-12, 1e-6, 1e-3, 1.0, 1e6):
            check_size(cost=default_cost(records=records, score_noise=noise), expected=records)


def area(scores: np.ndarray, labels: np.ndarray) -> float:
    return float(np.mean(scores[labels > 0][:, None] > scores[labels < 0][None]))


@pytest.mark.parametrize("noise", [2.0**-4, 2.0**-6, 2.0**-9])
def test_on_public_records_the_rule_loses_little_against_the_best_c(noise: float) -> None:
    """benchmarks/fit_svm_cost.py does this on ten problems; here digits alone, their parity."""
    digits, rng = load_digits(), np.random.default_rng(5)
    angles = (digits.data / 8 - 1) @ rng.normal(size=(64, 20)) * (math.sqrt(2) / 16)
    z, signs = (
        np.concatenate([np.cos(angles), np.sin(angles)], 1) / math.sqrt(20),
        digits.target % 2 * 2.0 - 1,
    )
    draws = rng.normal(size=(20, 40))

    def found(cost: float) -> float:
        w = solve(z[:900], signs[:900, None], cost=cost, expected=900)[0]
        scores = z[900:] @ (w + noise * cost * draws).T
        return float(np.mean([area(each, signs[900:]) for each in scores.T]))

    best = max(found(cost) for cost in 4.0 ** np.arange(-1, 6))
    assert found(default_cost(records=900, score_noise=noise)) > best - 0.02
    assert min(found(0.25), found(1024.0)) < best - 0.02  # so that there is something to lose
