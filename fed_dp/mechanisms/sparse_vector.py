"""The sparse vector technique: find, and release, the few values that noisily reach a threshold.

Two forms of the same idea, both vectorised such that what they release has exactly the distribution
of the loop in their paper:

sparse_vector   Lyu, Su and Li's Algorithm 1 (one noisy threshold), then Laplace on what was found.
figure_12       Shokri and Shmatikov's Fig. 12 (a fresh threshold after every find), values clipped
                before noise; as printed, they are not, and then nothing is bounded: refuted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fed_dp.mechanisms.laplace import check, finite, laplace
from fed_dp.mechanisms.noise import Noise, Reals

Indices = NDArray[np.int64]
Split = Literal["equal", "lyu"]
RELEASE_SHARE = 1 / 9  # of ε, as in Fig. 12; the rest finds what to release


@dataclass(frozen=True, slots=True, eq=False)
class Released:
    """What leaves: which coordinates (sorted), and their noised values within ±bound."""

    indices: Indices
    values: NDArray[np.float64]


def above_threshold(
    values: Reals,
    *,
    bound: float,
    threshold: float,
    count: int,
    eps_threshold: float,
    eps_search: float,
    noise: Noise,
) -> Indices:
    """Return, sorted, up to `count` coordinates whose magnitude noisily reaches `threshold`.

    They are gone through in random order: |v_j|, clipped to `bound`, plus Lap(2·count·bound/eps_search)
    against threshold + Lap(bound/eps_threshold), drawn once; stop at `count`. All comparisons are
    made at once, and of those that reach it `count` are taken at random: which is the same, as long as
    that choice is as secret as the noise.

    Guarantee: pure (eps_threshold + eps_search)-DP, however many values there are; proved.
    Neighbours: any two inputs; every magnitude may move at once, by at most `bound`.
    Not covered: releasing the values themselves.

    Reference: Lyu, Su, Li, PVLDB 10(6) 2017, Algorithm 1 and Theorem 2.
    """
    check(bound=bound, count=count, eps_threshold=eps_threshold, eps_search=eps_search)
    queries = magnitudes(values, bound)
    [limit] = noise.laplace(np.array([threshold]), scale=bound / eps_threshold)
    noisy = noise.laplace(queries, scale=2 * count * bound / eps_search)
    found = np.flatnonzero(noisy >= limit)
    return found if found.size <= count else np.sort(noise.shuffled(found)[:count])


def sparse_vector(
    values: Reals,
    *,
    bound: float,
    threshold: float,
    count: int,
    epsilon: float,
    noise: Noise,
    split: Split = "lyu",
) -> Released:
    """Release up to `count` values that noisily reach `threshold`, each within ±bound.

    8ε/9 find them (by above_threshold), ε/9 releases them (by laplace, then clipped again, which is
    free). Of the 8ε/9, threshold and search get equal parts, or 1 : (2·count)^⅔ ("lyu", §5), with
    which fewest comparisons go wrong.

    Guarantee: pure ε-DP; proved. Neighbours: any two inputs. An input that yields fewer than `count`
    values costs as much: ε is paid as a whole.
    """
    check(epsilon=epsilon)
    finding = (1 - RELEASE_SHARE) * epsilon
    part = 0.5 if split == "equal" else 1 / (1 + (2 * count) ** (2 / 3))
    chosen = above_threshold(
        values,
        bound=bound,
        threshold=threshold,
        count=count,
        eps_threshold=part * finding,
        eps_search=(1 - part) * finding,
        noise=noise,
    )
    noised = laplace(values[chosen], bound=bound, epsilon=RELEASE_SHARE * epsilon, count=count, noise=noise)
    return Released(chosen, np.clip(noised, -bound, bound))


def figure_12(
    values: Reals,
    *,
    bound: float,
    threshold: float,
    count: int,
    epsilon: float,
    noise: Noise,
    as_printed: bool = False,
) -> Released:
    """Release up to `count` values by Fig. 12, with a fresh noisy threshold after every one.

    c = count, γ = bound, Δf = 2γ, σ(x) = 2cΔf/x, ε₁ = 8ε/9, ε₂ = 2ε/9:
    r_τ ~ Lap(σ(ε₁)), r_w ~ Lap(2σ(ε₁)), r′_w ~ Lap(σ(ε₂)); upload when |v_j| + r_w ≥ τ + r_τ.

    Guarantee: pure ε-DP with values clipped before noise, as here: each of at most c segments costs
    ε₁/c, each release ε₂/(2c); proved. `as_printed` clips only after noise, so that a value moves the
    release without a bound: refuted.
    Neighbours: any two inputs.

    Reference: Shokri and Shmatikov, CCS 2015, Fig. 12.
    """
    check(bound=bound, count=count, epsilon=epsilon)
    sensitivity = 2 * bound  # Δf
    chosen = _segments(
        magnitudes(values, bound),
        threshold,
        count,
        threshold_scale=2 * count * sensitivity / (8 / 9 * epsilon),
        noise=noise,
    )
    released = finite(values[chosen]).astype(np.float64)
    if not as_printed:
        released = np.clip(released, -bound, bound)
    noised = noise.laplace(released, scale=2 * count * sensitivity / (2 / 9 * epsilon))
    return Released(chosen, np.clip(noised, -bound, bound))


def magnitudes(values: Reals, bound: float) -> Reals:
    """Return |v_j|, clipped to the bound: each lies in [0, bound], so none moves by more."""
    found = np.abs(finite(values))
    limit = found.dtype.type(bound)
    if float(limit) > bound:  # float32 has rounded it up
        limit = np.nextafter(limit, found.dtype.type(0))
    np.minimum(found, limit, out=found)
    return found


def _segments(
    queries: Reals, threshold: float, count: int, *, threshold_scale: float, noise: Noise
) -> Indices:
    """Find up to `count` coordinates in random order, each against a fresh noisy threshold.

    Query noise is drawn for all at once (a coordinate is asked at most once), thresholds for all
    segments at once. A coordinate below the lowest of them is found in no segment: only the others
    are put in (secret) random order and gone through.
    """
    noisy = noise.laplace(queries, scale=2 * threshold_scale)
    limits = noise.laplace(np.full(count, threshold), scale=threshold_scale)
    able = np.flatnonzero(noisy >= limits.min())
    order = noise.shuffled(able)
    return np.sort(order[_crossings(noisy[order], limits)])


def _crossings(noisy: NDArray[np.float64], limits: NDArray[np.float64]) -> Indices:
    """Return where each limit in turn is reached first, going on behind the one before.

    A crossing is mostly near where both are many: a few values are looked at one by one, then
    ever more of them at a time.
    """
    near, values = 16, noisy.tolist()
    found: list[int] = []
    position, size = 0, noisy.size
    for limit in limits.tolist():
        stop = min(position + near, size)
        for here in range(position, stop):
            if values[here] >= limit:
                break
        else:
            here = _far(noisy, stop, limit)
            if here == size:
                break
        found.append(here)
        position = here + 1
    return np.array(found, np.int64)


def _far(noisy: NDArray[np.float64], start: int, limit: float) -> int:
    width = 64
    while start < noisy.size:
        reached = noisy[start : start + width] >= limit
        first = int(reached.argmax())
        if reached[first]:
            return start + first
        start += width
        width *= 4
    return int(noisy.size)
