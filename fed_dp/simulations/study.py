"""A study: the variants of one experiment file, run one after the other, told in one report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fed_dp.errors import ResumeError
from fed_dp.experiment import Experiment
from fed_dp.simulations.report import write_report
from fed_dp.simulations.runner import Engine, session, simulate
from fed_dp.strategies.rounds import Observer
from fed_dp.strategies.run_folder import RunFolder, new_path, write_atomically

Variants = Mapping[str, Experiment]


def study_digest(variants: Variants) -> str:
    """Identify a study by its variants' names and digests."""
    text = json.dumps({name: experiment.digest for name, experiment in variants.items()})
    return hashlib.sha256(text.encode()).hexdigest()


def run_study(
    name: str,
    variants: Variants,
    *,
    observe: Callable[[], Observer],
    engine: Engine = "ray",
    root: Path = Path("runs"),
    folder: Path | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Run every variant in a folder of its own; return the study's folder and summary.

    A file with one variant is an ordinary run: its folder is the run folder itself.
    With `folder`, finished variants are kept and unfinished ones resumed.
    """
    path = folder or new_path(root, name)
    alone = len(variants) == 1
    results: dict[str, dict[str, Any]] = {}
    with session(engine, next(iter(variants.values()))):
        for variant, experiment in variants.items():
            own = path if alone else path / variant
            _, results[variant] = simulate(experiment, observer=observe(), engine=engine, folder=own)
    if alone:
        summary = next(iter(results.values()))
    else:
        summary = {"experiment": name, "digest": study_digest(variants), "runs": results}
        write_atomically(path / "summary.json", json.dumps(summary, indent=2).encode() + b"\n")
    lines = {v: RunFolder(path if alone else path / v).lines() for v in variants}
    write_report(path / "report.html", name, results, lines)
    return path, summary


def to_resume(root: Path, variants: Variants) -> Path:
    """Return the newest unfinished folder under `root` that these variants made."""
    for path in sorted(_folders(root), key=lambda p: p.stat().st_mtime, reverse=True):
        if not (path / "summary.json").is_file() and _made_by(path, variants):
            return path
    raise ResumeError(f"{root} holds no unfinished run of this experiment with these settings")


def variants_of(folder: Path) -> dict[str, Experiment]:
    """Read back what was run in a folder: one run, or the variants of a study that have begun."""
    if (folder / "experiment.toml").is_file():
        experiment = RunFolder(folder).experiment()
        return {experiment.name: experiment}
    begun = sorted(folder.glob("*/experiment.toml"), key=lambda p: p.stat().st_mtime)
    if not begun:
        raise ResumeError(f"{folder} is not a run folder: it has no experiment.toml")
    return {p.parent.name: RunFolder(p.parent).experiment() for p in begun}


def _folders(root: Path) -> list[Path]:
    return [p for p in root.iterdir() if p.is_dir()] if root.is_dir() else []


def _made_by(path: Path, variants: Variants) -> bool:
    try:
        found = variants_of(path)
    except ResumeError:
        return False
    if len(variants) == 1:
        return [e.digest for e in found.values()] == [e.digest for e in variants.values()]
    return all(name in variants and variants[name].digest == e.digest for name, e in found.items())
