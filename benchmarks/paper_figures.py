"""Draw docs/results/*.json: accuracy by ε where variants end in it (NAME-e05), else by rounds.

    python benchmarks/paper_figures.py [NAME …]

Figures are written beside the other figures of the documentation, as docs/figures/paper-NAME.svg.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from fed_dp.runs.chart import Chart, Point, Series, save

ROOT = Path(__file__).parent.parent
RESULTS, FIGURES = ROOT / "docs" / "results", ROOT / "docs" / "figures"
BUDGET = re.compile(r"(?P<series>.+)-e(?P<epsilon>\d+)")


def by_epsilon(runs: dict[str, Any], metric: str) -> tuple[Series, ...]:
    """Return accuracy by the ε in the variants' names; what has none is a level."""
    lines: dict[str, list[Point]] = defaultdict(list)
    levels = []
    for name, run in runs.items():
        score = run["scores"][metric]["final"]
        if found := BUDGET.fullmatch(name):
            text = found["epsilon"]
            epsilon = float(f"0.{text[1:]}") if text.startswith("0") else float(text)
            lines[found["series"]].append(Point(epsilon, score))
        else:
            levels.append(Series(name, (Point(0, score),), reference=True))
    return (
        *(Series(name, tuple(sorted(points, key=lambda p: p.x))) for name, points in lines.items()),
        *levels,
    )


def by_round(runs: dict[str, Any], metric: str) -> tuple[Series, ...]:
    """Return the curve of each run."""
    return tuple(
        Series(name, tuple(Point(at, score) for at, score in run[metric])) for name, run in runs.items()
    )


def chart(path: Path) -> Chart:
    """Return the figure of a file of results."""
    content = json.loads(path.read_text())
    runs: dict[str, Any] = content["runs"]
    metric = next(iter(next(iter(runs.values()))["scores"]))
    budgets = any(BUDGET.fullmatch(name) for name in runs)
    return Chart(
        f"paper-{path.stem}",
        path.stem,
        "ε (for the papers' own forms, their own axis)" if budgets else "round",
        f"test {metric}",
        by_epsilon(runs, metric) if budgets else by_round(runs, metric),
        log_x=budgets,
        share=True,
    )


def main() -> int:
    wanted = sys.argv[1:] or sorted(path.stem for path in RESULTS.glob("*.json"))
    for name in wanted:
        path = RESULTS / f"{name}.json"
        if not path.is_file():
            print(f"error: {path} is not there; python benchmarks/paper_results.py makes it", file=sys.stderr)
            return 1
        for written in save(chart(path), FIGURES):
            if written.suffix == ".png":
                written.unlink()
            else:
                print(written.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
