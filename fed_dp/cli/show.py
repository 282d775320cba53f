"""A finished run in a terminal: its table, what must be known about it, and what it cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fed_dp.experiment import Experiment
    from fed_dp.tasks import Metric


def show_summary(console: Console, summary: dict[str, Any], variants: dict[str, Experiment]) -> None:
    """Show a run, or all runs of a study."""
    from fed_dp.accounting import Statement
    from fed_dp.runs.groups import firsts
    from fed_dp.runs.report import (
        cost_text,
        decided_lines,
        few_owners,
        metric_words,
        owner_metrics,
        traffic_lines,
    )
    from fed_dp.runs.scores import common, scores_of, text

    results = summary.get("runs") or {next(iter(variants)): summary}
    if groups := summary.get("groups"):
        _show_groups(console, summary["experiment"], groups, owner_metrics(results.values()))
        results = firsts(results)
        variants = firsts(variants)
        console.print("of every run, its first repetition:")
    metric = common(results.values())[0]
    table = Table(title=summary["experiment"])
    table.add_column("run")
    for heading in ("clients", metric.label, "best", "MB sent", "seconds"):
        table.add_column(heading, justify="right")
    table.add_column("privacy, whole run")
    for name, result in results.items():
        table.add_row(
            name,
            str(result["clients"]),
            *(f"{scores_of(result)[metric.name][which]:.4f}" for which in ("final", "best")),
            f"{(result['bytes']['uploaded'] + result['bytes']['downloaded']) / 1e6:.1f}",
            f"{result['seconds']['total']:.1f}",
            cost_text(result),
        )
    console.print(table)
    for name, result in results.items():
        for note in result["data"]["notes"]:
            console.print(f"{name}: {note}", soft_wrap=True)
        if variants[name].clients.gpus and "cuda" not in result["devices"]:
            console.print(f"{name}: clients.gpus was set, but torch saw no GPU: trained on the processor")
        for line in decided_lines(result):
            console.print(f"{name}: {line}", soft_wrap=True, markup=False)
        for line in traffic_lines(result):
            console.print(f"{name}: {line}", soft_wrap=True, markup=False)
        if owners := few_owners(result):
            metrics = owner_metrics(results.values())
            each = ", ".join(f"{owner} {text(scores, metrics)}" for owner, scores in owners.items())
            console.print(f"{name}: {metric_words(metrics)} on own test records: {each}", soft_wrap=True)
        if result["privacy"] is None:
            console.print(f"{name}: no privacy")
        else:
            for line in Statement(**result["privacy"]).lines():
                console.print(f"{name}: {line}", soft_wrap=True, markup=False)


def _show_groups(console: Console, title: str, groups: dict[str, Any], metrics: Sequence[Metric]) -> None:
    table = Table(title=f"{title}: mean (standard deviation) over repetitions")
    table.add_column("run")
    for heading in ("repetitions", *(metric.label for metric in metrics), "seconds"):
        table.add_column(heading, justify="right")
    for name, told in groups.items():
        cells = []
        for score in (told.get(metric.name) for metric in metrics):
            apart = "" if not score or score["deviation"] is None else f" ({score['deviation']:.4f})"
            cells.append(f"{score['mean']:.4f}{apart}" if score else "")
        table.add_row(name, str(told["runs"]), *cells, f"{told['seconds']:.1f}")
    console.print(table)
