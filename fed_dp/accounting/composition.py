"""Composition of releases into one (ε, δ).

Three ways, the best that applies: the exact sum of pure ε (δ = 0); the exact curve of Gaussians (any
number of them are one Gaussian); and privacy loss distributions of dp-accounting for any mixture,
rounded to the private side, so that every ε is an upper bound. Of valid bounds the least is taken.

Each release is charged for the neighbours of its own guarantee. Where some are for records that are replaced,
`total` composes all of them for that: a sum whose neighbours add, remove or zero out a record has twice the
sensitivity where one is replaced. (ε itself does not just double: at a fixed δ it more than doubles.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation as Relation
from dp_accounting.mechanism_calibration import NoBracketIntervalFoundError
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld import common as pld_common
from dp_accounting.pld import privacy_loss_distribution as pld
from numpy.typing import NDArray

from fed_dp.accounting.events import Charge, Gaussian, Laplace, Release, SampledGaussian, SparseVector
from fed_dp.accounting.guarantee import common
from fed_dp.errors import PrivacyError
from fed_dp.mechanisms import gaussian_epsilon, gaussian_multiplier
from fed_dp.mechanisms.gaussian import gaussian_delta
from fed_dp.mechanisms.noise import Reals

MIN_NOISE_MULTIPLIER = 0.25  # σ below this is no protection worth the name
GRID = 1e-3  # step of the discretised privacy loss; costs less than 0.1 % of ε here
SLACK = 1e-12  # of δ, for the rounding errors of composing distributions (1e-13, measured)
MIN_DELTA = 1e-10  # below, rounding errors could matter
MAX_PURE_RELEASES = 5000.0  # a sum beyond which, …
LARGEST_PURE = 50.0  # … and a single ε beyond which a distribution takes long and gains nothing


@dataclass(frozen=True, slots=True)
class Replaced:
    """SampledGaussian, composed for records that are replaced."""

    noise_multiplier: float  # σ, in units of the clip C
    sample_rate: float  # q
    steps: int
    pure = None


Part = Release | Replaced
Exact = NDArray[np.float64]
Groups = tuple[tuple[Part, int], ...]


def total(charges: Iterable[Charge] | Mapping[Charge, int], *, delta: float) -> float:
    """Return ε of all charges together, for the strongest neighbours that any of them is for."""
    return _epsilon(balance(_parts(charges)), delta)


def _parts(charges: Iterable[Charge] | Mapping[Charge, int]) -> Counter[Part]:
    """Return what is composed: each release for the strongest neighbours that any of them is for."""
    counted = Counter(charges)
    replaced = common(relation for _, relation in counted) == "replace one"
    parts: Counter[Part] = Counter()
    for (release, relation), count in counted.items():
        doubled = replaced and relation not in (None, "replace one")
        parts[for_replacement(release) if doubled else release] += count
    return parts


def for_replacement(release: Release) -> Part:
    """Return what a sum of records is for neighbours that replace one: of twice the sensitivity."""
    match release:
        case Gaussian():
            return Gaussian(release.noise_multiplier / 2)
        case Laplace():
            return Laplace(2 * release.epsilon)
        case SparseVector():
            return SparseVector(2 * release.epsilon, release.count)
        case SampledGaussian():
            return Replaced(release.noise_multiplier, release.sample_rate, release.steps)
        case _:
            return release


def balance(releases: Iterable[Part] | Mapping[Part, int]) -> Groups:
    """Return how often each release was made, in a fixed order."""
    steps: Counter[Part] = Counter()
    for release, count in Counter(releases).items():
        if isinstance(release, SampledGaussian | Replaced) and release.sample_rate == 1:
            halved = release.noise_multiplier / (1 if isinstance(release, SampledGaussian) else 2)
            steps[Gaussian(halved)] += count * release.steps  # everybody is in every sample
        elif isinstance(release, SampledGaussian | Replaced):  # steps of one kind are one kind
            one = type(release)(release.noise_multiplier, release.sample_rate, 1)
            steps[one] += count * release.steps
        else:
            steps[release] += count
    return tuple(sorted(((r, n) for r, n in steps.items() if n), key=repr))


def epsilon(releases: Iterable[Part] | Mapping[Part, int], *, delta: float) -> float:
    """Return ε such that all releases together are (ε, δ)-DP, each for the neighbours it is made for."""
    return _epsilon(balance(releases), delta)


def pure_epsilon(charges: Iterable[Charge] | Mapping[Charge, int]) -> float | None:
    """Return the exact sum of pure ε, which holds at δ = 0; None when a release is not pure."""
    groups = balance(_parts(charges))
    return None if any(r.pure is None for r, _ in groups) else _sum(groups)


@lru_cache(maxsize=4096)
def _epsilon(groups: Groups, delta: float) -> float:
    if not groups:
        return 0.0
    pure = tuple((r, n) for r, n in groups if r.pure is not None)
    rest = tuple((r, n) for r, n in groups if r.pure is None)
    if delta == 0:
        return math.inf if rest else _sum(pure)
    if delta < MIN_DELTA:
        raise PrivacyError(f"delta = {delta!r}: expected 0, or at least {MIN_DELTA:g}")
    if not pure and all(isinstance(r, Gaussian) for r, _ in rest):
        return gaussian_epsilon(multiplier=_one_gaussian(rest), delta=delta)
    large = any((r.pure or 0) > LARGEST_PURE for r, _ in pure) or _sum(pure) > MAX_PURE_RELEASES
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


def deltas(releases: Iterable[Part] | Mapping[Part, int], epsilons: Reals) -> Exact:
    """Return δ at each ε ≥ 0: the whole privacy profile of releases with Gaussian noise, from above."""
    groups = balance(releases)
    if all(isinstance(r, Gaussian) for r, _ in groups):
        one = _one_gaussian(groups)
        return np.array([gaussian_delta(float(each), one) for each in epsilons])
    found: Exact = np.asarray(_composed(groups).get_delta_for_epsilon(list(epsilons)), np.float64)
    return found


def _by_distribution(groups: Groups, delta: float) -> float:
    return float(_composed(groups).get_epsilon_for_delta(delta - SLACK))


def _composed(groups: Groups) -> Any:
    """Return the distribution of the privacy loss of all releases together."""
    smallest = min((r.pure for r, _ in groups if r.pure is not None), default=1.0)
    mixed = any(r.pure is None for r, _ in groups)
    finest = 1e-4 if mixed else _sum(groups) / 1e6
    grid = min(GRID, max(smallest / 100, finest))
    each = [_distribution(r, grid).self_compose(n) for r, n in groups]
    whole = each[0]
    for other in each[1:]:
        whole = whole.compose(other)
    return whole


@lru_cache(maxsize=64)
def _distribution(release: Part, grid: float) -> Any:
    """Return a distribution of the privacy loss that dominates that of every pair of neighbours.

    Where a sampled record is replaced, that is the pair (1 − q) N(0, σ²) + q N(±1, σ²): for gradients v, v′
    of norm 1 at most and any event S of probability m under N(0, σ²), N(v, σ²) gives S at most
    Φ(Φ⁻¹(m) + 1/σ) and N(v′, σ²) at least Φ(Φ⁻¹(m) − 1/σ) (Neyman and Pearson); in that pair, S = {x > c}
    attains both. So its hockey-stick divergence is the largest at every α.
    """
    if release.pure is not None:
        return pld.from_privacy_parameters(
            pld_common.DifferentialPrivacyParameters(release.pure), value_discretization_interval=grid
        )
    replaced = isinstance(release, Replaced)
    return pld.from_gaussian_mechanism(
        release.noise_multiplier,
        value_discretization_interval=grid,
        sampling_prob=getattr(release, "sample_rate", 1.0),
        neighboring_relation=Relation.REPLACE_ONE if replaced else Relation.ADD_OR_REMOVE_ONE,
    )


@lru_cache(maxsize=256)
def noise_multiplier(
    *, epsilon: float, delta: float, sample_rate: float, steps: int, beside: tuple[Gaussian, ...] = ()
) -> float:
    """Return the smallest σ (to 0.001, from above) for which `steps` sampled steps cost at most ε.

    Never less than MIN_NOISE_MULTIPLIER: a budget that would allow less is not spent in full. `beside` is
    what else is released, and paid for by the same ε.
    """

    def cost(sigma: float) -> float:
        return _epsilon(balance([*beside, SampledGaussian(sigma, sample_rate, steps)]), delta)

    if cost(MIN_NOISE_MULTIPLIER) <= epsilon:
        return MIN_NOISE_MULTIPLIER
    if sample_rate == 1:
        one = gaussian_multiplier(epsilon=epsilon, delta=delta, releases=steps)
        left = 1 - sum((one / each.noise_multiplier) ** 2 for each in beside) / steps
        if left <= 0:
            raise PrivacyError(f"ε = {epsilon:g}, δ = {delta:g} leaves nothing for {steps} steps")
        return max(one / math.sqrt(left) * (1 + 1e-11), MIN_NOISE_MULTIPLIER)
    try:
        sigma = dp_accounting.calibrate_dp_mechanism(
            lambda: PLDAccountant(Relation.ADD_OR_REMOVE_ONE, GRID),
            lambda value: dp_accounting.ComposedDpEvent(
                [
                    *(dp_accounting.GaussianDpEvent(each.noise_multiplier) for each in beside),
                    dp_accounting.SelfComposedDpEvent(
                        dp_accounting.PoissonSampledDpEvent(
                            sample_rate, dp_accounting.GaussianDpEvent(value)
                        ),
                        steps,
                    ),
                ]
            ),
            target_epsilon=epsilon,
            target_delta=delta - SLACK,
            bracket_interval=dp_accounting.LowerEndpointAndGuess(MIN_NOISE_MULTIPLIER, 1.0),
            tol=1e-3,
        )
    except (NoBracketIntervalFoundError, ValueError) as error:
        raise PrivacyError(
            f"no noise multiplier fits ε = {epsilon:g}, δ = {delta:g} over {steps} steps at "
            f"sample rate {sample_rate:g}: {error}"
        ) from None
    while cost(float(sigma)) > epsilon:  # composed in another order, it may round otherwise
        sigma *= 1 + 1e-5
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
