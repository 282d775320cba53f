"""What it costs to keep the best of several runs: against the theorem, and never less than one run."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fed_dp.accounting import Gaussian, Laplace, SampledGaussian, total
from fed_dp.accounting.selection import of_runs, selected_epsilon
from fed_dp.errors import PrivacyError

DELTA = 1e-5
SAMPLED = {(SampledGaussian(2.0, 0.1, 10), "zero-out one"): 5}


def by_theorem(sigma: float, *, mean: float) -> float:
    """Theorem 2 of Papernot and Steinke for a Gaussian, whose Rényi divergence of order a is a/(2 sigma²)."""
    eta, orders = 1.0, np.concatenate([np.linspace(1.01, 20, 2000), np.linspace(20, 500, 2000)])
    divergence = orders / (2 * sigma**2)
    inner = (1 + eta) * (1 - 1 / orders) * divergence + (1 + eta) * math.log(mean) / orders
    selected = divergence + inner.min() + math.log(mean) / (orders - 1)
    conversion = np.log1p(-1 / orders) - np.log(DELTA * orders) / (orders - 1)
    return float((selected + conversion).min())


@pytest.mark.parametrize("mean", [1.0, 6.0, 50.0])
@pytest.mark.parametrize("sigma", [1.0, 4.0])
def test_a_gaussians_selection_is_that_of_the_theorem(sigma: float, mean: float) -> None:
    found = selected_epsilon({(Gaussian(sigma), "zero-out one"): 1}, mean=mean, delta=DELTA)
    assert found == pytest.approx(by_theorem(sigma, mean=mean), rel=0.02)


def test_more_runs_cost_more_and_one_run_is_never_free() -> None:
    alone = total(SAMPLED, delta=DELTA)
    costs = [selected_epsilon(SAMPLED, mean=mean, delta=DELTA) for mean in (1, 3, 10, 30)]
    assert alone < costs[0] < costs[1] < costs[2] < costs[3]
    assert costs[2] < total(of_runs([SAMPLED] * 10), delta=DELTA) * 1.5


def test_pure_runs_cost_three_times_their_epsilon_however_many_they_are() -> None:
    charges = {(Laplace(0.5), "replace one"): 2}
    assert selected_epsilon(charges, mean=50, delta=0.0) == 3.0
    assert selected_epsilon(charges, mean=50, delta=DELTA) == 3.0


def test_what_is_not_known_has_no_bound_and_wrong_numbers_are_refused() -> None:
    mixed = {(Laplace(0.5), "replace one"): 1, (Gaussian(1.0), "replace one"): 1}
    assert selected_epsilon(mixed, mean=5, delta=DELTA) == math.inf
    with pytest.raises(PrivacyError, match=r"mean number of runs = 0\.5"):
        selected_epsilon(SAMPLED, mean=0.5, delta=DELTA)


def test_all_runs_together_are_all_their_charges() -> None:
    [(charge, count)] = SAMPLED.items()
    assert of_runs([SAMPLED, SAMPLED, {(Laplace(1.0), None): 1}]) == {
        charge: 2 * count,
        (Laplace(1.0), None): 1,
    }
