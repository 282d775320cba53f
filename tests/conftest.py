"""What all tests share: small experiments, the command line, and real data where it is at hand."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from fed_dp import plugins
from fed_dp.data.options import Published
from fed_dp.experiment import Experiment, build
from fed_dp.models import use_one_thread

# The same examples in every run of `make test`; fresh ones, and more of them, in `make test-all`.
settings.register_profile("steady", deadline=None, derandomize=True, database=None)
settings.register_profile("thorough", deadline=None, max_examples=300, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))
use_one_thread()  # as every client does: test processes share the cores
# Ray and Flower's simulation on it would join whatever cluster they find: another test's, or a dying one.
os.environ["RAY_ADDRESS"] = "local"
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


# Modules whose tests share a cluster, a federation or a comparison: one process runs all of a module.
SHARING = (
    "tests/e2e/test_deploy.py",
    "tests/e2e/test_report_page.py",
    "tests/faults/test_ledger_crash.py",
    "tests/simulations/test_cluster.py",
    "tests/simulations/test_ray.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out tests one by one, but those that share something together, and these first."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            return module if module in SHARING else nodeid

    return Scheduler(config, log)


def some(values: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
    """Cases of a test: those kept are run by `make test`, all by `make test-all`."""
    rest = [v for v in values if v not in kept]
    marked = [
        pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.exhaustive) for v in rest
    ]
    return [*kept, *marked]


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
        section = plugins.find("data", name)
        if not issubclass(section, Published):
            return
        folder = section.folder()
        files = section.files(folder)
        if missing := [file.name for file in files if not (folder / file.name).is_file()]:
            pytest.skip(f"{name}: {folder / missing[0]} is not there; set FED_DP_DATA")

    return check


def in_process(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run fed-dp in a folder, in this process: nothing is imported again."""
    from fed_dp.cli.main import main
    from fed_dp.experiment.federation import forget

    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as for a user
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["fed-dp", *arguments])
        for name, value in {"COLUMNS": "200", **environment}.items():
            patch.setenv(name, value)
        forget()  # as a new process would
        with redirect_stdout(out), redirect_stderr(err):
            try:
                main()
            except SystemExit as end:
                code = int(end.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run fed-dp in an empty folder."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return in_process(tmp_path, *arguments, **environment)

    return run
