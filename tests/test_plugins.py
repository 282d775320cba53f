"""Components of an installed package come in by the same door as the built-in ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

ENTRY_POINTS = """
[fed_dp.trainers]
one-step = outsider:OneStep
[fed_dp.strategies]
median = outsider:Median
[fed_dp.models]
wide = outsider:Wide
[fed_dp.datasets]
moons = outsider:Moons
"""
EXPERIMENT = """
name = "outside"
rounds = 5
data = { name = "moons", width = 0.2 }
model = { name = "wide", units = 8 }
clients = { count = 3 }
trainer = { name = "one-step", learning_rate = 2.0 }
strategy = { name = "median" }
privacy = { budget_epsilon = 8.0, delta = 1e-5, variant = "proved" }
"""
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def install(folder: Path, name: str, entry_points: str, module: str) -> None:
    """Put a package where Python finds it, as an installer would."""
    (folder / f"{name}.py").write_text(module)
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def python(tmp_path: Path) -> Run:
    site = tmp_path / "site"
    site.mkdir()
    shutil.copy(Path(__file__).with_name("outsider.py"), site / "outsider.py")
    install(site, "outsider", ENTRY_POINTS, (site / "outsider.py").read_text())
    (tmp_path / "outside.toml").write_text(EXPERIMENT)

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
        )

    return command


@pytest.fixture
def run(python: Run) -> Run:
    return partial(python, "-m", "fed_dp.cli")


def test_an_outsiders_data_network_trainer_and_strategy_run_and_are_accounted_for(
    run: Run, tmp_path: Path
) -> None:
    done = run("simulate", "outside.toml", "--engine", "in-process", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["data"]["name"], summary["model"]["name"]) == ("moons", "wide")
    assert (summary["trainer"], summary["strategy"]) == ("one-step", "median")
    assert summary["accuracy"]["final"] > 0.7
    cost = summary["privacy"]
    assert (cost["guarantee"], cost["neighbours"]) == ("claimed", "zero-out one")
    assert 7.5 < cost["epsilon_total"] <= 8.0
    assert "NOT PROVED" in done.stderr
    [ledger] = (tmp_path / "runs").glob("*/ledgers.sqlite")
    shown = run("ledger", "show", str(ledger.parent), "--site", "client-0002")
    assert "5: simulated, round 5, gaussian" in shown.stdout


def test_a_site_allows_an_outsiders_trainer_only_where_its_file_names_it(python: Run, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('client = 0\n[allow]\ntrainers = ["one-step"]\n')
    code = (
        "from pathlib import Path; from fed_dp.clients.site_file import Allow, SiteFile; "
        "print('one-step' in Allow().trainers, SiteFile.read(Path('site.toml')).allow.trainers)"
    )
    done = python("-c", code)
    assert done.stdout.split(maxsplit=1) == ["False", "('one-step',)\n"], done.stderr


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["model.units=x"], ["model.units = 'x'", "integer"]),
        (["model.layers=2"], ["unknown key model.layers = 2", "only 'auto-encoder'", "allowed: name, units"]),
        (["trainer.name=two-step"], ["trainer.name = 'two-step'", "'one-step'", "'psgd'"]),
        (["trainer.name=dpa"], ["model.name = 'wide'", "'psgd'", "'dpa' fits"]),
        (["privacy.variant=paper"], ["privacy.variant = 'paper'", "'one-step' has only 'proved'"]),
    ],
)
def test_a_mistake_with_them_is_one_line(run: Run, settings: list[str], parts: list[str]) -> None:
    done = run("experiments", "show", "outside.toml", *(part for s in settings for part in ("-s", s)))
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    for part in parts:
        assert part in line, line


def test_one_that_cannot_be_imported_is_named_and_harms_no_other(run: Run, tmp_path: Path) -> None:
    install(tmp_path / "site", "broken", "[fed_dp.models]\nbroken = broken:Net\n", "1 / 0")
    done = run("experiments", "show", "outside.toml", "-s", "model.name=broken")
    assert done.returncode == 2
    assert "model.name = 'broken': broken:Net cannot be imported (ZeroDivisionError" in done.stderr
    assert "Traceback" not in done.stderr
    assert run("experiments", "show", "outside.toml").returncode == 0


def test_two_of_one_name_are_refused(run: Run, tmp_path: Path) -> None:
    module = (tmp_path / "site" / "outsider.py").read_text()
    install(tmp_path / "site", "other", "[fed_dp.trainers]\none-step = other:OneStep\n", module)
    done = run("experiments", "show", "outside.toml")
    assert done.returncode == 2
    assert "trainer.name = 'one-step' is registered by other:OneStep and by outsider:OneStep" in done.stderr
