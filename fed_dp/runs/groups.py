"""Repetitions of a variant, over seeds and folds, told together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from scipy.stats import t as student

from fed_dp.experiment import group_of
from fed_dp.runs.scores import final, metrics_of, scores_of

T = TypeVar("T")
Summary = Mapping[str, Any]


def grouped(results: Mapping[str, Summary]) -> dict[str, list[Summary]]:
    """Return each variant's repetitions; a variant that was run once is a group of its own."""
    groups: dict[str, list[Summary]] = {}
    for name, summary in results.items():
        groups.setdefault(group_of(name), []).append(summary)
    return groups


def firsts(of_runs: Mapping[str, T]) -> dict[str, T]:
    """Return, of what there is of every run, that of each variant's first repetition."""
    found: dict[str, T] = {}
    for name, value in of_runs.items():
        found.setdefault(group_of(name), value)
    return found


def spread_of(runs: Sequence[Summary]) -> dict[str, Any]:
    """Return mean, standard deviation, 95 % interval of the mean (of one run: none), least and most.

    Repetitions on folds of the same records are not independent; their interval is a little too narrow.
    """
    found: dict[str, Any] = {"runs": len(runs)}
    for metric in metrics_of(runs[0]):
        if all(metric.name in scores_of(run) for run in runs):
            values = np.array([final(run, metric) for run in runs])
            mean = float(values.mean())
            deviation = float(values.std(ddof=1)) if len(values) > 1 else None
            interval = None
            if deviation is not None:
                half = float(student.ppf(0.975, len(values) - 1)) * deviation / len(values) ** 0.5
                interval = [mean - half, mean + half]
            found[metric.name] = {
                "mean": mean,
                "deviation": deviation,
                "interval": interval,
                "least": float(values.min()),
                "most": float(values.max()),
            }
    found["seconds"] = float(np.mean([run["seconds"]["total"] for run in runs]))
    return found
