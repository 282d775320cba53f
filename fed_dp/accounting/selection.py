"""What it costs to try several runs and keep the best: ε of the run that is published, and of all of them.

A random number of runs is made, each of the same releases; the best by a score that costs nothing (of records
that are not protected) is published, the others are not. The number has a geometric distribution, so that it
tells nothing by itself.

Reference: Papernot and Steinke, "Hyperparameter Tuning with Renyi Differential Privacy", ICLR 2022.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import dp_accounting
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant

from fed_dp.accounting.composition import pure_epsilon
from fed_dp.accounting.events import Charge, Gaussian, Release, SampledGaussian
from fed_dp.errors import PrivacyError

WHOLE_ORDERS = [*range(2, 65), 80, 96, 128, 192, 256, 384, 512, 1024]  # of others, series may not converge
GEOMETRIC = 1.0  # η of the truncated negative binomial distribution that the number of runs has


def selected_epsilon(charges: Mapping[Charge, int], *, mean: float, delta: float) -> float:
    """Return ε of the published run, the best of a number of runs of these charges that is `mean` on average.

    For those who see that run alone. By Rényi differential privacy (Theorem 2), or, where all is pure, three
    times its ε (Corollary 3); of two valid bounds the smaller.
    """
    if not mean >= 1:
        raise PrivacyError(f"mean number of runs = {mean!r}: expected at least 1")
    pure = pure_epsilon(charges)
    best = math.inf if pure is None else (2 + GEOMETRIC) * pure
    if not delta or any(release.pure is not None for release, _ in charges):
        return best
    sampled = any(isinstance(release, SampledGaussian) for release, _ in charges)
    accountant = RdpAccountant(WHOLE_ORDERS if sampled else None)
    events = [_event(release, count) for (release, _), count in charges.items()]
    whole = dp_accounting.ComposedDpEvent(events)
    accountant.compose(dp_event.RepeatAndSelectDpEvent(whole, mean, GEOMETRIC))
    return min(best, float(accountant.get_epsilon(delta)))


def _event(release: Release, count: int) -> dp_accounting.DpEvent:
    """Return one release as dp-accounting has it."""
    match release:
        case Gaussian():
            return dp_accounting.SelfComposedDpEvent(
                dp_accounting.GaussianDpEvent(release.noise_multiplier), count
            )
        case SampledGaussian():
            step = dp_accounting.PoissonSampledDpEvent(
                release.sample_rate, dp_accounting.GaussianDpEvent(release.noise_multiplier)
            )
            return dp_accounting.SelfComposedDpEvent(step, release.steps * count)
    raise PrivacyError(f"{release}: the cost of selecting among such runs is not known")


def of_runs(runs: Sequence[Mapping[Charge, int]]) -> dict[Charge, int]:
    """Return all charges of several runs together: what somebody has seen who saw all of them."""
    together: dict[Charge, int] = {}
    for charges in runs:
        for charge, count in charges.items():
            together[charge] = together.get(charge, 0) + count
    return together
