"""Composition of releases into one (ε, δ), by privacy loss distributions of dp-accounting.

The distributions are rounded to the private side (connect-the-dots), so every ε is an upper bound.
Neighbours: add or remove one record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import dp_accounting
from dp_accounting.mechanism_calibration import NoBracketIntervalFoundError
from dp_accounting.pld import PLDAccountant

from fed_dp.accounting.events import SampledGaussian
from fed_dp.errors import PrivacyError

LEAST_NOISE = 0.25  # σ below this is no protection worth the name
GRID = 1e-3  # step of the discretised privacy loss; costs less than 0.1 % of ε here


def epsilon(releases: Iterable[SampledGaussian], *, delta: float) -> float:
    """Return ε such that all releases together are (ε, δ)-DP for every record they all touch."""
    steps: Counter[tuple[float, float]] = Counter()
    for release in releases:
        steps[release.noise_multiplier, release.sample_rate] += release.steps
    groups = tuple(sorted((*key, count) for key, count in steps.items() if count))
    return _epsilon(groups, delta) if groups else 0.0


@lru_cache(maxsize=4096)
def _epsilon(groups: tuple[tuple[float, float, int], ...], delta: float) -> float:
    accountant = _accountant()
    for sigma, rate, steps in groups:
        accountant.compose(_sampled_gaussian(sigma, rate, steps))
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=256)
def noise_multiplier(*, epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """Return the smallest σ (to 0.001, from above) for which `steps` sampled steps cost at most ε.

    Never less than LEAST_NOISE: a budget that would allow less is not spent in full.
    """
    if _epsilon(((LEAST_NOISE, sample_rate, steps),), delta) <= epsilon:
        return LEAST_NOISE
    try:
        sigma = dp_accounting.calibrate_dp_mechanism(
            _accountant,
            lambda value: _sampled_gaussian(value, sample_rate, steps),
            target_epsilon=epsilon,
            target_delta=delta,
            bracket_interval=dp_accounting.LowerEndpointAndGuess(LEAST_NOISE, 1.0),
            tol=1e-3,
        )
    except (NoBracketIntervalFoundError, ValueError) as error:
        raise PrivacyError(
            f"no noise multiplier fits ε = {epsilon:g}, δ = {delta:g} over {steps} steps at "
            f"sample rate {sample_rate:g}: {error}"
        ) from None
    return float(sigma)


def _accountant() -> Any:
    return PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, GRID)


def _sampled_gaussian(sigma: float, rate: float, steps: int) -> Any:
    event = dp_accounting.GaussianDpEvent(sigma)
    return dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(rate, event), steps)
