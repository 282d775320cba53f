"""The exact loss of mechanisms that add noise: from what they really ask of their noise source.

A spy stands in for the noise source. It adds nothing, and notes every value and scale; the loss between two
inputs then follows without sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fed_dp.errors import PrivacyError
from fed_dp.mechanisms import Noise, NoiseSource, Released, gaussian_epsilon
from fed_dp.mechanisms.noise import Integers, Reals, SecureNoise, grid

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One request for noise."""

    kind: str
    values: Values
    scale: float


class Spy:
    """A noise source that adds nothing and notes what it was asked for; scales are told times `factor`."""

    name: NoiseSource = "simulation"

    def __init__(self, factor: float = 1.0) -> None:
        self.noted: list[Call] = []
        self._factor = factor

    def laplace(self, values: Reals, *, scale: float) -> Values:
        """Note Laplace noise."""
        return self._note("laplace", values, scale)

    def gaussian(self, values: Reals, *, scale: float) -> Values:
        """Note Gaussian noise."""
        return self._note("gaussian", values, scale)

    def spherical(self, values: Reals, *, scale: float) -> Values:
        """Note noise of random direction, its length a Gamma variable."""
        return self._note("spherical", values, scale)

    def shuffled(self, items: Integers) -> Integers:
        """Leave the order as it is."""
        return items

    def _note(self, kind: str, values: Reals, scale: float) -> Values:
        exact = np.array(values, np.float64)
        self.noted.append(Call(kind, exact, scale * self._factor))
        return exact


class SecureSpy(SecureNoise):
    """A spy in the place of the secure source: mechanisms do with it all that they do with that one.

    Of sums of whole multiples it notes what they stand for.
    """

    def __init__(self, factor: float = 1.0) -> None:
        self._spy = Spy(factor)

    @property
    def noted(self) -> list[Call]:
        """What it was asked for."""
        return self._spy.noted

    def laplace(self, values: Reals, *, scale: float) -> Values:
        """Note Laplace noise on a grid."""
        return self.laplace_on_whole(self.whole(values, scale=scale), scale=scale)

    def gaussian(self, values: Reals, *, scale: float) -> Values:
        """Note Gaussian noise on a grid."""
        return self.gaussian_on_whole(self.whole(values, scale=scale), scale=scale)

    def laplace_on_whole(self, whole: Integers, *, scale: float) -> Values:
        """Note Laplace noise on a sum."""
        return self._spy.laplace(whole * grid(scale), scale=scale)

    def gaussian_on_whole(self, whole: Integers, *, scale: float) -> Values:
        """Note Gaussian noise on a sum."""
        return self._spy.gaussian(whole * grid(scale), scale=scale)

    def shuffled(self, items: Integers) -> Integers:
        """Leave the order as it is."""
        return items


SPIES: dict[str, type[Spy] | type[SecureSpy]] = {"simulation": Spy, "secure": SecureSpy}


def loss(
    release: Callable[[Noise, bool], object],
    *,
    delta: float = 0.0,
    factor: float = 1.0,
    source: str = "simulation",
) -> float:
    """Return the exact ε at δ between what `release` does in two worlds (False, True).

    Laplace: Σ|Δ|/scale. Random direction: ‖Δ‖₂/scale. Gaussian: all of them are one, of shift √Σ(‖Δ‖₂/σ)².
    `source` names the noise source whose code is gone through.
    """
    spies = SPIES[source](factor), SPIES[source](factor)
    for spy, world in zip(spies, (False, True), strict=True):
        release(spy, world)
    pure, squared = 0.0, 0.0
    for one, other in zip(spies[0].noted, spies[1].noted, strict=True):
        if (one.kind, one.scale, one.values.shape) != (other.kind, other.scale, other.values.shape):
            return math.inf  # how much noise there is depends on the records
        apart = (one.values - other.values).ravel()
        if one.kind == "gaussian":
            squared += float(apart @ apart) / one.scale**2
        else:
            pure += float(np.linalg.norm(apart, 1 if one.kind == "laplace" else 2)) / one.scale
    if not squared:
        return pure
    if pure or not delta:
        raise PrivacyError(f"a Gaussian release has no loss at δ = {delta:g} that could be told exactly")
    return gaussian_epsilon(multiplier=1 / math.sqrt(squared), delta=delta)


def find_loss(
    *,
    threshold_scale: float,
    query_scale: float,
    moved: float,
    positives: int,
    negatives: int = 10_000,
    thresholds: Sequence[float] | None = None,
) -> float:
    """Return the exact loss of finding: `negatives` queries move up, `positives` down, each by `moved`.

    ln of ∫ p(z) F(τ + z)^m (1 − F(τ + z − moved))^c dz over the same with the queries swapped. Of the
    thresholds τ (by default some that are far apart) the worst counts.
    """

    def logarithm(tau: float, low: float, high: float) -> float:
        def exponent(z: Values) -> Values:
            return np.asarray(
                _log_density(z, threshold_scale)
                + negatives * _log_below(tau + z - low, query_scale)
                + positives * _log_below(high - tau - z, query_scale)
            )

        return _log_integral(exponent, (0.0, low - tau, high - tau), threshold_scale + query_scale)

    taus = [factor * query_scale for factor in (0, 2, 5, 10)] if thresholds is None else thresholds
    return max(logarithm(tau, 0, moved) - logarithm(tau, moved, 0) for tau in taus)


def _log_density(z: Values, scale: float) -> Values:
    """Return the logarithm of the Laplace density, also where the density itself would be 0."""
    return np.asarray(-np.abs(z) / scale - math.log(2 * scale))


def _log_below(z: Values, scale: float) -> Values:
    """Return the logarithm of the chance that Laplace noise is below z."""
    far = np.exp(-np.abs(z) / scale) / 2
    return np.where(z < 0, z / scale - math.log(2), np.log1p(-np.where(z < 0, 0.0, far)))


def _log_integral(exponent: Callable[[Values], Values], kinks: Sequence[float], scale: float) -> float:
    """Return ln ∫ e^exponent for a concave exponent that is smooth but for its kinks.

    Its peak is found by thirds, its ends where it has fallen by more than e^−60; between kinks, Gauss and
    Legendre on short pieces.
    """
    left, right = min(kinks) - 1e3 * scale, max(kinks) + 1e3 * scale
    for _ in range(400):
        third = (right - left) / 3
        inner = exponent(np.array([left + third, right - third]))
        left, right = (left + third, right) if inner[0] < inner[1] else (left, right - third)
    peak = (left + right) / 2
    top = float(exponent(np.array([peak]))[0])

    def end(way: float) -> float:
        away = 1e-9 * scale
        while float(exponent(np.array([peak + way * away]))[0]) > top - 60:
            away *= 1.5
        return peak + way * away

    ends = end(-1.0), end(1.0)
    marks = sorted({*ends, peak, *(kink for kink in kinks if ends[0] < kink < ends[1])})
    nodes, weights = np.polynomial.legendre.leggauss(12)
    total = 0.0
    for start, stop in pairwise(marks):
        edges = np.linspace(start, stop, 401)
        half = np.diff(edges) / 2
        z = (edges[:-1] + half)[:, None] + half[:, None] * nodes
        total += float((np.exp(exponent(z) - top) * weights * half[:, None]).sum())
    return top + math.log(total)


def sparse_vector_losses(
    release: Callable[[Values, Noise], Released],
    *,
    bound: float,
    count: int,
    segments: bool,
    factor: float = 1.0,
    negatives: int = 10_000,
    threshold: float | None = None,
    source: str = "simulation",
) -> tuple[float, float]:
    """Return what finding and what releasing cost: from the scales and ranges that are really used.

    `release` is a sparse vector mechanism of γ = `bound` and c = `count`; with `segments` it has a fresh
    threshold for each of its finds. All magnitudes move by what they can, all values from far below −γ to
    far above γ. `negatives` and `threshold` are the mechanism's own, where they are given.
    """
    size = 2 * count

    def asked(fill: float) -> list[Call]:
        spy = SPIES[source](factor)
        release(np.full(size, fill), spy)
        return spy.noted

    high, low, none = asked(40 * bound), asked(-40 * bound), asked(0.0)
    [query] = [i for i in (0, 1) if high[i].values.size == size]
    moved = float(np.abs(high[query].values - none[query].values).max())

    def found(positives: int) -> float:
        threshold_scale, query_scale = high[1 - query].scale, high[query].scale
        return find_loss(
            threshold_scale=threshold_scale,
            query_scale=query_scale,
            moved=moved,
            positives=positives,
            negatives=negatives,
            thresholds=None if threshold is None else (threshold,),
        )

    finding = count * found(1) if segments else found(count)
    return finding, float(np.abs(high[2].values - low[2].values).sum()) / high[2].scale
