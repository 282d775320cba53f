"""The exact loss of mechanisms that add noise: from what they really ask of their noise source.

A spy stands in for the noise source. It adds nothing, and notes every value and scale; the loss between two
inputs then follows without sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import quad
from scipy.stats import laplace

from fed_dp.errors import PrivacyError
from fed_dp.mechanisms import Noise, NoiseSource, Released, gaussian_epsilon
from fed_dp.mechanisms.noise import Integers, Reals

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


def loss(release: Callable[[Noise, bool], object], *, delta: float = 0.0, factor: float = 1.0) -> float:
    """Return the exact ε at δ between what `release` does in two worlds (False, True).

    Laplace: Σ|Δ|/scale. Random direction: ‖Δ‖₂/scale. Gaussian: all of them are one, of shift √Σ(‖Δ‖₂/σ)².
    """
    spies = Spy(factor), Spy(factor)
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
    *, threshold_scale: float, query_scale: float, moved: float, positives: int, negatives: int = 10_000
) -> float:
    """Return the exact loss of finding: `negatives` queries move up, `positives` down, each by `moved`.

    ln of ∫ p(z) F(τ + z)^m (1 − F(τ + z − moved))^c dz over the same with the queries swapped; τ is
    chosen such that it is worst.
    """

    def logarithm(tau: float, low: float, high: float) -> float:
        def exponent(z: Values) -> Values:
            return np.asarray(
                laplace.logpdf(z, scale=threshold_scale)
                + negatives * laplace.logcdf(tau + z - low, scale=query_scale)
                + positives * laplace.logsf(tau + z - high, scale=query_scale)
            )

        span = 60 * (threshold_scale + query_scale)
        grid = np.linspace(-span, span, 200_001)
        peak = exponent(grid)
        top, centre = peak.max(), grid[peak.argmax()]
        near = 15 * threshold_scale
        value, _ = quad(
            lambda z: math.exp(float(exponent(np.array(z))) - top),
            centre - near,
            centre + near,
            limit=2000,
            points=[centre, 0.0] if abs(centre) < near else [centre],
        )
        return float(top + math.log(value))

    taus = [factor * query_scale for factor in (0, 2, 5, 10)]
    return max(logarithm(tau, 0, moved) - logarithm(tau, moved, 0) for tau in taus)


def sparse_vector_losses(
    release: Callable[[Values, Noise], Released],
    *,
    bound: float,
    count: int,
    segments: bool,
    factor: float = 1.0,
) -> tuple[float, float]:
    """Return what finding and what releasing cost: from the scales and ranges that are really used.

    `release` is a sparse vector mechanism of γ = `bound` and c = `count`; with `segments` it has a fresh
    threshold for each of its finds. All magnitudes move by what they can, all values from far below −γ to
    far above γ.
    """
    size = 2 * count

    def asked(fill: float) -> list[Call]:
        spy = Spy(factor)
        release(np.full(size, fill), spy)
        return spy.noted

    high, low, none = asked(40 * bound), asked(-40 * bound), asked(0.0)
    [query] = [i for i in (0, 1) if high[i].values.size == size]
    moved = float(np.abs(high[query].values - none[query].values).max())

    def found(positives: int) -> float:
        threshold_scale, query_scale = high[1 - query].scale, high[query].scale
        return find_loss(
            threshold_scale=threshold_scale, query_scale=query_scale, moved=moved, positives=positives
        )

    finding = count * found(1) if segments else found(count)
    return finding, float(np.abs(high[2].values - low[2].values).sum()) / high[2].scale
