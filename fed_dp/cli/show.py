"""A finished run in a terminal: its table, what must be known about it, and what it cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from fed_dp.experiment import Experiment


def show_summary(console: Console, summary: dict[str, Any], variants: dict[str, Experiment]) -> None:
    """Show a run, or all runs of a study."""
    from fed_dp.accounting import Statement
    from fed_dp.runs.groups import firsts
    from fed_dp.runs.report import cost_text, few_owners, owner_score, traffic_lines

    results = summary.get("runs") or {next(iter(variants)): summary}
    if groups := summary.get("groups"):
        _show_groups(console, summary["experiment"], groups)
        results = firsts(results)
        variants = firsts(variants)
        console.print("of every run, its first repetition:")
    table = Table(title=summary["experiment"])
    table.add_column("run")
    for heading in ("clients", "accuracy", "best", "MB sent", "seconds"):
        table.add_column(heading, justify="right")
    table.add_column("privacy, whole run")
    for name, result in results.items():
        table.add_row(
            name,
            str(result["clients"]),
            f"{result['accuracy']['final']:.4f}",
            f"{result['accuracy']['best']:.4f}",
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
        for line in traffic_lines(result):
            console.print(f"{name}: {line}", soft_wrap=True, markup=False)
        if owners := few_owners(result):
            each = ", ".join(f"{owner} {owner_score(scores)}" for owner, scores in owners.items())
            console.print(f"{name}: AUC (accuracy) on own test records: {each}", soft_wrap=True)
        if result["privacy"] is None:
            console.print(f"{name}: no privacy")
        else:
            for line in Statement(**result["privacy"]).lines():
                console.print(f"{name}: {line}", soft_wrap=True, markup=False)


def _show_groups(console: Console, title: str, groups: dict[str, Any]) -> None:
    table = Table(title=f"{title}: mean (standard deviation) over repetitions")
    table.add_column("run")
    for heading in ("repetitions", "accuracy", "AUC", "seconds"):
        table.add_column(heading, justify="right")
    for name, told in groups.items():
        cells = []
        for score in (told.get("accuracy"), told.get("auc")):
            apart = "" if not score or score["deviation"] is None else f" ({score['deviation']:.4f})"
            cells.append(f"{score['mean']:.4f}{apart}" if score else "")
        table.add_row(name, str(told["runs"]), *cells, f"{told['seconds']:.1f}")
    console.print(table)
