"""A study: the variants of one experiment file, run one after the other, told in one report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fed_dp.errors import FedDpError, ResumeError, RunError
from fed_dp.experiment import Experiment, build, group_of
from fed_dp.extras import need
from fed_dp.runs.folder import REPORT, RunFolder, new_path, write_atomically
from fed_dp.runs.groups import grouped, spread_of
from fed_dp.runs.report import write_report
from fed_dp.server.observers import Observer
from fed_dp.simulations.runner import Engine, check, session, simulate

Variants = Mapping[str, Experiment]
STUDY = "study.json"


def identity(variants: Variants) -> str:
    """Identify a run by its digest, a study by its variants' names and digests."""
    if len(variants) == 1:
        return next(iter(variants.values())).digest
    text = json.dumps({name: experiment.digest for name, experiment in variants.items()})
    return hashlib.sha256(text.encode()).hexdigest()


def run_study(
    name: str,
    variants: Variants,
    *,
    observe: Callable[[], Observer],
    engine: Engine = "auto",
    root: Path = Path("runs"),
    folder: Path | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Run every variant in a folder of its own; return the study's folder and summary.

    A file with one variant is an ordinary run: its folder is the run folder itself.
    With `folder`, finished variants are kept and unfinished ones resumed.
    """
    if any(group_of(variant) != variant for variant in variants):
        need("matplotlib", extra="report", what="the report of repeated runs")
    for experiment in variants.values():
        check(experiment)
    path = folder or new_path(root, name)
    alone = len(variants) == 1
    if not alone:
        _begin(path, name, variants)
    results: dict[str, dict[str, Any]] = {}
    with session(engine, *variants.values()):
        for variant, experiment in variants.items():
            own = path if alone else path / variant
            _, results[variant] = simulate(experiment, observer=observe(), engine=engine, folder=own)
    if alone:
        summary = next(iter(results.values()))
    else:
        summary = {"experiment": name, "digest": identity(variants), "runs": results}
        if (groups := grouped(results)).keys() != results.keys():
            summary["groups"] = {group: spread_of(runs) for group, runs in groups.items()}
        RunFolder(path).finish(summary)
    lines = {v: RunFolder(path if alone else path / v).lines() for v in variants}
    write_report(path / REPORT, name, results, lines)
    return path, summary


def to_resume(root: Path, variants: Variants) -> Path:
    """Return the newest unfinished folder under `root` that these variants made."""
    folders = [p for p in root.iterdir() if p.is_dir()] if root.is_dir() else []
    for path in sorted(folders, key=lambda p: p.stat().st_mtime, reverse=True):
        try:
            _, found = variants_of(path)
        except FedDpError:
            continue  # not one of ours
        if not RunFolder(path).finished and identity(found) == identity(variants):
            return path
    raise ResumeError(f"{root} holds no unfinished run of this experiment with these settings")


def variants_of(folder: Path) -> tuple[str, dict[str, Experiment]]:
    """Read back what a folder is about: the name and all variants of a study, or its one run."""
    try:
        study = json.loads((folder / STUDY).read_text())
        return str(study["name"]), {name: build(tables) for name, tables in study["variants"].items()}
    except FileNotFoundError:
        experiment = RunFolder(folder).experiment()
        return experiment.name, {experiment.name: experiment}
    except (ValueError, KeyError, TypeError) as error:
        raise ResumeError(f"{folder / STUDY} is damaged: {error}") from None


def _begin(path: Path, name: str, variants: Variants) -> None:
    """Note all variants, so that a resumed study runs those that had not begun, too."""
    if not (path / STUDY).is_file():
        content = {"name": name, "variants": {key: e.tables() for key, e in variants.items()}}
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_atomically(path / STUDY, json.dumps(content, indent=2).encode())
        except OSError as error:
            raise RunError(f"run folder {path} cannot be written: {error.strerror}") from None
