"""The programs of examples/ run as they are written."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fed_dp.flower import simulate
from tests.conftest import some

EXAMPLES = Path(__file__).parent.parent / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
CONFIG = {"num-server-rounds": 5, "local-epochs": 2, "lr": 0.3}

pytestmark = pytest.mark.e2e


def output(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, env={**ENVIRONMENT, **environment}
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


TOLD = {
    "own_network.py": ("privacy: total ε = 3.997", "(norm): GroupNorm"),
    "budget_for_any_app.py": ("the ledger: 1 charges, ε = 3.921 of 4",),
    "frozen_encoder.py": ("frozen-encoder", "ε = 2.000"),
    "export_model.py": ("False",),
}


@pytest.mark.parametrize("name", some(PROGRAMS, ["own_network.py", "budget_for_any_app.py"]))
def test_a_program_runs_as_it_is_written(name: str, tmp_path: Path) -> None:
    told = output(sys.executable, str(EXAMPLES / name), cwd=tmp_path)
    assert [words for words in TOLD[name] if words not in told] == []


def test_the_notebook_runs(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(EXAMPLES / "own_network.ipynb", as_version=4)
    done = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    text = str([cell.get("outputs") for cell in done.cells])
    assert "privacy: total ε = 3.997" in text
    assert "GroupNorm" in text
    assert all(
        not cell.get("outputs") for cell in nbformat.read(EXAMPLES / "own_network.ipynb", as_version=4).cells
    )


def test_a_trainer_of_another_package_is_installed_listed_conforms_and_runs(tmp_path: Path) -> None:
    site = tmp_path / "site"
    source = shutil.copytree(EXAMPLES / "plugin_trainer", tmp_path / "source")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps")
    output(*pip, "--no-build-isolation", "--no-index", "--target", str(site), str(source), cwd=tmp_path)
    fed_dp = (sys.executable, "-m", "fed_dp.cli")
    assert "dp-adam" in output(*fed_dp, "plugins", cwd=tmp_path, PYTHONPATH=str(site))
    told = output(*fed_dp, "conformance", "dp-adam", "--trials", "50", cwd=tmp_path, PYTHONPATH=str(site))
    assert "7 of 7 passed" in told
    assert "claimed" in told
    run = ("simulate", "digits:psgd", "-s", "trainer.name=dp-adam", "-s", "trainer.learning_rate=0.02")
    run += ("-s", "rounds=2", "-s", "clients.count=3", "--engine", "in-process")
    told = output(*fed_dp, *run, cwd=tmp_path, PYTHONPATH=str(site))
    assert "NOT PROVED: trainer.name = 'dp-adam' is claimed" in told
    assert "; claimed" in told


@pytest.fixture
def quickstart(tmp_path: Path) -> Path:
    return shutil.copytree(EXAMPLES / "quickstart", tmp_path / "quickstart")


def accuracy(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, nodes: int
) -> float:
    for name in [name for name in sys.modules if name.partition(".")[0] == "fedavg_app"]:
        del sys.modules[name]
    monkeypatch.syspath_prepend(home)
    server: Any = importlib.import_module("fedavg_app.server_app")
    client: Any = importlib.import_module("fedavg_app.client_app")
    simulate(server.app, client.app, nodes=nodes, run_config=CONFIG)
    return float(capsys.readouterr().out.split()[-1])


def test_a_quickstart_app_becomes_dssgd_with_a_budget_by_at_most_five_lines(
    quickstart: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (quickstart / "dssgd.diff").read_text().splitlines()
    added = [line for line in lines if line.startswith("+") and not line.startswith("+++")]
    removed = [line for line in lines if line.startswith("-") and not line.startswith("---")]
    assert len(removed) <= len(added) <= 5
    assert accuracy(quickstart, capsys, monkeypatch, 10) > 0.8  # FedAvg
    subprocess.run(["patch", "-p1", "-i", "dssgd.diff"], cwd=quickstart, check=True, capture_output=True)
    assert accuracy(quickstart, capsys, monkeypatch, 100) > 0.4  # with noise from the operating system
