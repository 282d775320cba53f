"""Measuring privacy loss: exactly, from what a mechanism asks of its noise, and from many transcripts."""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Hashable
from types import ModuleType

import numpy as np
from scipy.integrate import quad
from scipy.stats import beta, laplace


def mutant(module: ModuleType, *changes: tuple[str, str]) -> ModuleType:
    """Return the module with its source changed; a change that does not apply is an error."""
    source = inspect.getsource(module)
    for old, new in changes:
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
        source = source.replace(old, new)
    spec = importlib.util.spec_from_loader(f"{module.__name__}_mutant", loader=None)
    assert spec is not None
    weakened = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = weakened  # dataclasses look it up
    exec(compile(source, f"<mutant of {module.__name__}>", "exec"), weakened.__dict__)
    return weakened


class Spy:
    """A noise source that adds nothing and notes what it was asked for."""

    name = "simulation"

    def __init__(self) -> None:
        self.calls: list[tuple[np.ndarray, float]] = []

    def laplace(self, values: np.ndarray, *, scale: float) -> np.ndarray:
        self.calls.append((np.array(values, np.float64), scale))
        return np.array(values, np.float64)

    gaussian = laplace

    def shuffled(self, items: np.ndarray) -> np.ndarray:
        return items


def find_loss(
    *, threshold_scale: float, query_scale: float, moved: float, positives: int, negatives: int = 10_000
) -> float:
    """Return the exact loss of finding: `negatives` queries move up, `positives` down, each by `moved`.

    ln of ∫ p(z) F(τ + z)^m (1 − F(τ + z − moved))^c dz over the same with the queries swapped; τ is
    chosen such that it is worst.
    """

    def logarithm(tau: float, low: float, high: float) -> float:
        def exponent(z: np.ndarray) -> np.ndarray:
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


def empirical_loss(
    transcript: Callable[[np.random.Generator, np.ndarray], Hashable],
    one: np.ndarray,
    other: np.ndarray,
    *,
    runs: int = 10_000,
    seed: int = 1,
) -> float:
    """Return a lower bound (99.9 %) on the loss between two inputs, from the transcripts of many runs.

    The event is chosen on one half of the runs and measured on the other.
    """
    rng = np.random.default_rng(seed)
    halves = [
        [Counter(transcript(rng, values) for _ in range(runs // 2)) for values in (one, other)]
        for _ in range(2)
    ]
    chosen, measured = halves
    best = max(
        chosen[0].keys() | chosen[1].keys(),
        key=lambda event: abs(math.log((chosen[0][event] + 10) / (chosen[1][event] + 10))),
    )
    first, second = (counts[best] for counts in measured)
    return max(_bound(first, second, runs // 2), _bound(second, first, runs // 2))


def _bound(more: int, fewer: int, runs: int) -> float:
    if not more:
        return -math.inf
    low = beta.ppf(0.0005, more, runs - more + 1)
    high = beta.ppf(0.9995, fewer + 1, runs - fewer)
    return float(math.log(low / high))
