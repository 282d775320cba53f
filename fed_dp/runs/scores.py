"""Which scores a run is told by: read from its summary, in which its task's metrics are data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fed_dp.runs.folder import Line
from fed_dp.tasks import ACCURACY, AUC, Metric

Summary = Mapping[str, Any]
EARLIER = (ACCURACY, AUC)  # those of earlier versions, which did not write which they had


def metrics_of(summary: Summary) -> list[Metric]:
    """Return the metrics that a run has scores in; the first is the one to compare."""
    if "metrics" in summary:
        return [Metric(**table) for table in summary["metrics"]]
    return [metric for metric in EARLIER if metric.name in summary]


def scores_of(summary: Summary) -> Mapping[str, Mapping[str, float]]:
    """Return the final and best score by metric."""
    found: Mapping[str, Mapping[str, float]] = summary.get("scores", summary)
    return found


def final(summary: Summary, metric: Metric | None = None) -> float:
    """Return a run's final score, by default in its first metric."""
    return scores_of(summary)[(metric or metrics_of(summary)[0]).name]["final"]


def scored(lines: Sequence[Line], metrics: Sequence[Metric]) -> list[Line]:
    """Return the lines of rounds after which the model was scored."""
    return [line for line in lines if any(metric.name in line for metric in metrics)]


def common(summaries: Iterable[Summary]) -> list[Metric]:
    """Return the metrics that all runs have scores in, in the first's order; where there is none, its own."""
    each = [metrics_of(summary) for summary in summaries]
    if not each:
        return [ACCURACY]
    return [metric for metric in each[0] if all(metric in other for other in each)] or each[0]


def leading(summaries: Sequence[Summary]) -> Metric:
    """Return the metric to compare runs by: the AUC where all have it, else the first that they share.

    Runs of plain classification tell their accuracy first; where there are two classes, the AUC says more.
    """
    there = common(summaries)
    return next((metric for metric in there if metric == AUC), there[0])


def text(scores: Mapping[str, float], metrics: Sequence[Metric]) -> str:
    """Return one line of scores in a few characters: the leading one, and the second in brackets."""
    values = [f"{scores[metric.name]:.3f}" for metric in metrics if metric.name in scores]
    return values[0] + (f" ({values[1]})" if len(values) > 1 else "")
