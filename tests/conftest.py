"""What all tests share: small experiments, the command line, and real data where it is at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fed_dp.data import SOURCES, folder_of
from fed_dp.experiment import Experiment, build

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


def small(kind: str = "sgd", **changes: Any) -> Experiment:
    """A run of a few seconds: digits, four clients, two rounds."""
    tables: dict[str, Any] = {
        "name": "small",
        "seed": 3,
        "rounds": 2,
        "clients": {"count": 4},
        "trainer": {"name": kind, "learning_rate": 0.2},
    }
    if kind == "psgd":
        tables["trainer"]["sample_rate"] = 0.25
        tables["privacy"] = {"budget_epsilon": 4.0, "delta": 1e-5}
    return build({**tables, **changes})


def private_selection(
    selection: str, *, variant: str = "proved", noise_source: str = "simulation", **changes: Any
) -> Experiment:
    """A small run whose selection is the private part: DSSGD of plain SGD."""
    strategy: dict[str, Any] = {"name": "dssgd", "selection": selection, "upload_fraction": 0.1}
    strategy |= {"bound": 0.01, "threshold": 0.001} if selection == "sparse_vector" else {"clip": 0.1}
    privacy = {"budget_epsilon": 4.0, "delta": 1e-5, "variant": variant, "noise_source": noise_source}
    return small(**{"strategy": strategy, "privacy": privacy, **changes})


@pytest.fixture
def needs() -> Callable[[str], None]:
    """Skip, saying what is missing, unless a data set's files are there."""

    def check(name: str) -> None:
        folder = folder_of(name)
        files = SOURCES[name].files(folder)
        if missing := [file.name for file in files if not (folder / file.name).is_file()]:
            pytest.skip(f"{name}: {folder / missing[0]} is not there; set FED_DP_DATA")

    return check


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run fed-dp as a user would, in an empty folder."""

    def run(*arguments: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "fed_dp.cli", *arguments],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "200", **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
