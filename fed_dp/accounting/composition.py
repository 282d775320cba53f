"""Composition of releases into one (ε, δ).

Three ways, the best that applies: the exact sum of pure ε (δ = 0); the exact curve of Gaussians (any
number of them are one Gaussian); and privacy loss distributions of dp-accounting for any mixture,
rounded to the private side, so that every ε is an upper bound. Of valid bounds the least is taken.
Each release counts for the neighbours of its own guarantee; together they hold for the weakest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import dp_accounting
from dp_accounting.mechanism_calibration import NoBracketIntervalFoundError
from dp_accounting.pld import PLDAccountant, common
from dp_accounting.pld import privacy_loss_distribution as pld

from fed_dp.accounting.events import Gaussian, Release, SampledGaussian, SparseVector
from fed_dp.errors import PrivacyError
from fed_dp.mechanisms import gaussian_epsilon

LEAST_NOISE = 0.25  # σ below this is no protection worth the name
GRID = 1e-3  # step of the discretised privacy loss; costs less than 0.1 % of ε here
SLACK = 1e-12  # of δ, for the rounding errors of composing distributions (1e-13, measured)
LEAST_DELTA = 1e-10  # below, rounding errors could matter
MOST_PURE = 5000.0  # a sum beyond which, …
LARGEST_PURE = 50.0  # … and a single ε beyond which a distribution takes long and gains nothing
Groups = tuple[tuple[Release, int], ...]


def balance(releases: Iterable[Release] | Mapping[Release, int]) -> Groups:
    """Return how often each release was made, in a fixed order."""
    steps: Counter[Release] = Counter()
    for release, count in Counter(releases).items():
        if isinstance(release, SampledGaussian):  # steps of one kind are one kind, in however many rounds
            steps[SampledGaussian(release.noise_multiplier, release.sample_rate, 1)] += count * release.steps
        else:
            steps[release] += count
    return tuple(sorted(((r, n) for r, n in steps.items() if n), key=repr))


def epsilon(releases: Iterable[Release] | Mapping[Release, int], *, delta: float) -> float:
    """Return ε such that all releases together are (ε, δ)-DP for everyone they all touch."""
    return _epsilon(balance(releases), delta)


def pure_epsilon(releases: Iterable[Release] | Mapping[Release, int]) -> float | None:
    """Return the exact sum of pure ε, which holds at δ = 0; None when a release is not pure."""
    groups = balance(releases)
    return None if any(r.pure is None for r, _ in groups) else _sum(groups)


@lru_cache(maxsize=4096)
def _epsilon(groups: Groups, delta: float) -> float:
    if not groups:
        return 0.0
    pure = tuple((r, n) for r, n in groups if r.pure is not None)
    rest = tuple((r, n) for r, n in groups if r.pure is None)
    if delta == 0:
        return math.inf if rest else _sum(pure)
    if delta < LEAST_DELTA:
        raise PrivacyError(f"delta = {delta!r}: expected 0, or at least {LEAST_DELTA:g}")
    if not pure and all(isinstance(r, Gaussian) for r, _ in rest):
        return gaussian_epsilon(multiplier=_one_gaussian(rest), delta=delta)
    large = any((r.pure or 0) > LARGEST_PURE for r, _ in pure) or _sum(pure) > MOST_PURE
    if not rest:
        return _sum(pure) if large else min(_sum(pure), _by_distribution(pure, delta))
    apart = _sum(pure) + _epsilon(rest, delta) if pure else math.inf
    return apart if large else min(apart, _by_distribution(groups, delta))


def _sum(pure: Groups) -> float:
    return math.fsum(n * (r.pure or 0.0) for r, n in pure)


def _one_gaussian(gaussians: Groups) -> float:
    """Return σ of the one Gaussian that all of them are: 1/σ² = Σ 1/σ_i²."""
    return 1 / math.sqrt(
        math.fsum(n / r.noise_multiplier**2 for r, n in gaussians if isinstance(r, Gaussian))
    )


def _by_distribution(groups: Groups, delta: float) -> float:
    smallest = min((r.pure for r, _ in groups if r.pure is not None), default=1.0)
    mixed = any(r.pure is None for r, _ in groups)
    finest = 1e-4 if mixed else _sum(groups) / 1e6
    grid = min(GRID, max(smallest / 100, finest))
    each = [_distribution(r, grid).self_compose(n) for r, n in groups]
    whole = each[0]
    for other in each[1:]:
        whole = whole.compose(other)
    return float(whole.get_epsilon_for_delta(delta - SLACK))


def _distribution(release: Release, grid: float) -> Any:
    if release.pure is not None:
        return pld.from_privacy_parameters(
            common.DifferentialPrivacyParameters(release.pure), value_discretization_interval=grid
        )
    rate = release.sample_rate if isinstance(release, SampledGaussian) else 1.0
    return pld.from_gaussian_mechanism(
        release.noise_multiplier, value_discretization_interval=grid, sampling_prob=rate
    )


@lru_cache(maxsize=256)
def noise_multiplier(*, epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """Return the smallest σ (to 0.001, from above) for which `steps` sampled steps cost at most ε.

    Never less than LEAST_NOISE: a budget that would allow less is not spent in full.
    """
    if _epsilon(balance([SampledGaussian(LEAST_NOISE, sample_rate, steps)]), delta) <= epsilon:
        return LEAST_NOISE
    try:
        sigma = dp_accounting.calibrate_dp_mechanism(
            lambda: PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, GRID),
            lambda value: dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(sample_rate, dp_accounting.GaussianDpEvent(value)), steps
            ),
            target_epsilon=epsilon,
            target_delta=delta - SLACK,
            bracket_interval=dp_accounting.LowerEndpointAndGuess(LEAST_NOISE, 1.0),
            tol=1e-3,
        )
    except (NoBracketIntervalFoundError, ValueError) as error:
        raise PrivacyError(
            f"no noise multiplier fits ε = {epsilon:g}, δ = {delta:g} over {steps} steps at "
            f"sample rate {sample_rate:g}: {error}"
        ) from None
    return float(sigma)


@lru_cache(maxsize=256)
def pure_share(*, epsilon: float, delta: float, releases: int) -> float:
    """Return the largest ε₀ (to 0.1 %, from below) such that so many ε₀-DP releases are (ε, δ)-DP.

    ε/releases always fits; with δ > 0 and many small releases, more does.
    """
    low = epsilon / releases
    if delta == 0 or low > LARGEST_PURE or releases == 1:
        return low

    def total(each: float) -> float:
        return _epsilon(balance({SparseVector(each, 1): releases}), delta)

    high = min(epsilon, 2 * low)
    while high < epsilon and total(high) <= epsilon:
        low, high = high, min(epsilon, 2 * high)
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if total(middle) <= epsilon else (low, middle)
    return low
