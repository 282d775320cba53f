"""The whole of `fed-dp compare`: run what is planned, audit it, tell what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fed_dp.accounting import from_json
from fed_dp.audit.releases import audit_releases
from fed_dp.comparison.outcome import outcome
from fed_dp.comparison.report import write_all
from fed_dp.comparison.run_cache import Done, run_cells
from fed_dp.experiment.comparing import Plan
from fed_dp.experiment.federation import load
from fed_dp.extras import need
from fed_dp.runs.folder import new_path


def compare(
    plan: Plan,
    *,
    root: Path,
    command: str,
    jobs: int | None = None,
    fresh: bool = False,
    audit: bool = True,
    observe: Callable[[Done], None] = lambda _: None,
) -> tuple[Path, dict[str, Any]]:
    """Run a comparison; return its folder, with report.html, and what came of it."""
    need("matplotlib", extra="report", what="a comparison")
    done = run_cells(plan.cells, root=root, jobs=jobs, fresh=fresh, observe=observe)
    found = outcome(plan, done, command=command)
    if audit:
        _audit(found["rows"], done)
    folder = new_path(root, plan.name)
    write_all(folder, found)
    return folder, found


def _audit(rows: Sequence[dict[str, Any]], done: Sequence[Done]) -> None:
    """Add the lower bound of each private row, where it can be computed exactly."""
    cells = {(each.cell.variant, each.cell.epsilon): each for each in done if each.summary}
    for row in rows:
        if row.get("privacy") is None:
            continue
        each = cells[row["variant"], row["epsilon"]]
        experiment, size = each.cell.experiment, each.summary["model"]["parameters"]
        data = load(experiment.data)
        events = [event for line in each.lines for event in from_json(line["events"])]
        found = audit_releases(experiment, each.summary["privacy"], events, size=size, data=data)
        row["audit"] = None if found is None else found.tables()
