"""Support vector machines: how far one record moves w, how exact the solver is, and what noise covers it."""

from __future__ import annotations

import math
from importlib import import_module
from types import ModuleType

import numpy as np
import pytest
from sklearn.svm import LinearSVC

from fed_dp.clients.svm import duality_gap, solve
from fed_dp.mechanisms import SimulationNoise, support_vector
from fed_dp.mechanisms.statistics import ROUNDING
from fed_dp.mechanisms.support_vector import TOLERANCE, gap, paper_scale, perturbed, sensitivity
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


def test_an_explicit_pair_of_neighbours_moves_w_by_2c_over_n() -> None:
    records, cost = 101, 20.0
    last = unit(np.random.default_rng(1).normal(size=12))
    one, two = (
        solve(*opposed(records - 1, last, sign), cost=cost / records, gap=gap(cost / records))
        for sign in (1.0, -1.0)
    )
    moved = float(np.linalg.norm(one - two))
    assert 0.95 * 2 * cost / records <= moved <= sensitivity(cost=cost, records=records)


def test_no_replaced_record_moves_w_by_more() -> None:
    rng = np.random.default_rng(2)
    for trial in range(60):
        records, features = int(rng.integers(2, 40)), int(rng.integers(2, 9))
        cost = float(10 ** rng.uniform(-1, 3))
        z, signs = unit(rng.normal(size=(records, features))), rng.choice([-1.0, 1.0], records)
        other, flipped = z.copy(), signs.copy()
        other[0] = -z[0] if trial % 2 else unit(rng.normal(size=features))
        flipped[0] = rng.choice([-1.0, 1.0])
        each = cost / records
        one, two = solve(z, signs, cost=each, gap=gap(each)), solve(other, flipped, cost=each, gap=gap(each))
        assert np.linalg.norm(one - two) <= sensitivity(cost=cost, records=records)


def test_the_printed_objective_with_the_papers_noise_loses_n_epsilon_over_2() -> None:
    """Eq. 3 has C Σ hinge: C is not divided by n, and the noise is."""
    records, cost, epsilon, pairs = 101, 0.5, 1.0, 8
    last = np.full(2 * pairs, 1 / math.sqrt(2 * pairs))
    one, two = (solve(*opposed(records - 1, last, sign), cost=cost, gap=gap(cost)) for sign in (1.0, -1.0))
    scale = paper_scale(cost=cost, records=records, features=2 * pairs, epsilon=epsilon)
    loss = float(np.abs(one - two).sum() / scale)  # of Laplace noise, exactly
    assert loss == pytest.approx(records * epsilon / 2, rel=0.02)
    divided = (
        solve(*opposed(records - 1, last, sign), cost=cost / records, gap=gap(cost / records))
        for sign in (1.0, -1.0)
    )
    first, second = divided
    assert np.abs(first - second).sum() / scale <= epsilon


def test_the_gap_is_never_below_the_distance_from_the_minimum() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        z, signs = unit(rng.normal(size=(60, 5))), rng.choice([-1.0, 1.0], 60)
        cost = float(10 ** rng.uniform(-2, 1))

        def objective(
            w: np.ndarray, z: np.ndarray = z, signs: np.ndarray = signs, cost: float = cost
        ) -> float:
            return 0.5 * float(w @ w) + cost * float(np.maximum(0, 1 - signs * (z @ w)).sum())

        least = (1e-4 * cost) ** 2
        best = solve(z, signs, cost=cost, gap=least)
        assert duality_gap(z, signs, best, cost=cost) <= least
        rough = LinearSVC(C=cost, loss="hinge", fit_intercept=False, tol=0.05, random_state=0)
        for w in (best + 1e-4 * rng.normal(size=5), rough.fit(z, signs).coef_[0], np.zeros(5)):
            found = duality_gap(z, signs, w, cost=cost)
            assert found >= objective(w) - objective(best) - 1e-12
            assert np.linalg.norm(w - best) <= math.sqrt(2 * found) + 2e-4 * cost


def test_many_equal_records_on_the_margin_are_certified_too() -> None:
    rng = np.random.default_rng(4)
    few = unit(rng.normal(size=(6, 3)))
    z = np.repeat(few, 400, axis=0)
    signs = np.repeat([1.0, -1.0, 1.0, -1.0, 1.0, 1.0], 400)
    each = 300 / len(z)
    w = solve(z, signs, cost=each, gap=gap(each))
    assert duality_gap(z, signs, w, cost=each) <= gap(each)


def test_a_site_of_one_class_or_one_record_is_solved() -> None:
    z = unit(np.random.default_rng(0).normal(size=(9, 4)))
    w = solve(z, np.ones(9), cost=0.01, gap=gap(0.01))
    assert w == pytest.approx(0.01 * z.sum(0), rel=1e-3)
    assert solve(z[:1], -np.ones(1), cost=0.5, gap=gap(0.5)) == pytest.approx(-0.5 * z[0], rel=1e-2)


def scales(module: ModuleType = support_vector) -> dict[str, float]:
    found = {}
    for kind in KINDS:
        spy = Spy()
        module.perturbed(np.zeros((3, 8)), cost=5.0, records=50, problems=3, kind=kind, amount=0.5, noise=spy)
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
        (("noise.spherical, delta / amount", "noise.spherical, delta / amount / 2"), ("gamma",)),
        (("noise.gaussian, amount * delta", "noise.gaussian, amount * delta / 2"), ("gaussian",)),
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
    perturbed(np.zeros((2, 4)), cost=1.0, records=9, problems=2, kind="gamma", amount=1.0, noise=spy)
    assert len(spy.calls) == 1


def test_no_record_decides_whether_a_site_can_answer() -> None:
    """The certificate keeps its digits where C/n is tiny."""
    rng = np.random.default_rng(5)
    z, signs = unit(rng.normal(size=(50_000, 10))), rng.choice([-1.0, 1.0], 50_000)
    each = 1e-3 / len(z)
    for _ in range(6):
        z[0], signs[0] = unit(rng.normal(size=10)), -signs[0]
        w = solve(z, signs, cost=each, gap=gap(each))
        assert duality_gap(z, signs, w, cost=each) <= gap(each)


def test_all_records_on_the_margin_are_certified() -> None:
    """As frequencies that are multiples of π make of records of one class, if a server sends them."""
    x = np.random.default_rng(6).uniform(-1, 1, 3000)
    angles = np.outer(x, np.pi * np.arange(5))
    z = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) / math.sqrt(5)
    each = 300 / len(z)
    w = solve(z, np.ones(len(z)), cost=each, gap=gap(each))
    assert np.abs(z @ w - 1).max() < 1e-9
    assert duality_gap(z, np.ones(len(z)), w, cost=each) <= gap(each)
