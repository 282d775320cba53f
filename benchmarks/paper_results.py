"""Run the experiments of a paper's figure, and keep what came of each in docs/results/NAME.json.

    python benchmarks/paper_results.py dssgd-fig9 --profile full --only 'round-robin*' --hours 2

Run folders are kept under runs/papers, so that the same command goes on where it was stopped, and runs what
has not been run. The file is written anew after each variant, with the command, the versions and the seconds.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

from fed_dp.errors import FedDpError
from fed_dp.experiment import Experiment, build
from fed_dp.experiment.source import select
from fed_dp.runs.folder import RunFolder, write_atomically
from fed_dp.server.app import PlainLines
from fed_dp.simulations.runner import session, simulate

ROOT = Path(__file__).parent.parent
RESULTS, RUNS = ROOT / "docs" / "results", Path("runs") / "papers"
PRIVACY = ("epsilon_total", "delta", "guarantee", "unit", "neighbours")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="a shipped experiment, as in fed-dp experiments list")
    parser.add_argument("--profile", help="how large, where it has several; default: the first")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="variants to run, as in 'dssgd-*'")
    parser.add_argument("--hours", type=float, default=float("inf"), help="begin no variant after so long")
    parser.add_argument("--engine", default="auto", choices=("auto", "ray", "in-process"))
    return parser.parse_args()


def result(experiment: Experiment, folder: RunFolder) -> dict[str, Any]:
    """Return what is kept of a finished run."""
    summary = folder.summary()
    metric = experiment.task.metrics[0].name
    privacy = summary["privacy"] or {}
    return {
        "digest": summary["digest"],
        "seed": experiment.seed,
        "rounds": summary["rounds"],
        "clients": summary["clients"],
        "train": summary["data"]["train"],
        "scores": summary["scores"],
        "privacy": {key: privacy[key] for key in PRIVACY} if privacy else None,
        "seconds": round(summary["seconds"]["total"], 1),
        "bytes_uploaded": summary["bytes"]["uploaded"],
        metric: [[line["round"], line[metric]] for line in folder.lines() if metric in line],
        "versions": summary["versions"],
    }


def main() -> int:
    given = arguments()
    name, listed = select(given.name, given.profile)
    chosen = {
        key: build(tables, where=key) for key, tables in listed.items() if fnmatch.fnmatch(key, given.only)
    }
    if not chosen:
        raise FedDpError(f"--only = {given.only!r}: the variants are {', '.join(listed)}")
    path, begun = RESULTS / f"{name}.json", time.monotonic()
    kept: dict[str, Any] = json.loads(path.read_text())["runs"] if path.is_file() else {}
    words = [f"--{key} {value}" for key in ("profile",) if (value := getattr(given, key))]
    with session(given.engine, *chosen.values()):
        for variant, experiment in chosen.items():
            if kept.get(variant, {}).get("digest") == experiment.digest:
                continue
            if time.monotonic() - begun > given.hours * 3600:
                print(f"not begun within {given.hours:g} hours: {variant}", file=sys.stderr)
                continue
            folder, _ = simulate(
                experiment, observer=PlainLines(sys.stderr), engine=given.engine, folder=RUNS / name / variant
            )
            kept[variant] = result(experiment, RunFolder(folder))
            content = {
                "command": " ".join(["python benchmarks/paper_results.py", given.name, *words]),
                "machine": f"{platform.machine()}, Python {platform.python_version()}",
                "runs": kept,
            }
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FedDpError as error:
        sys.exit(f"error: {error}")
