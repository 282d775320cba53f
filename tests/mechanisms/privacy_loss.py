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

from fed_dp.audit import exact
from fed_dp.audit.bounds import from_rates


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


class Spy(exact.Spy):
    """The audit's spy: a noise source that adds nothing and notes what it was asked for."""

    @property
    def calls(self) -> list[tuple[np.ndarray, float]]:
        return [(call.values, call.scale) for call in self.noted]


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
    options = {"delta": 0.0, "doubt": 0.001}
    return max(from_rates(*pair, runs // 2, **options) for pair in ((first, second), (second, first)))
