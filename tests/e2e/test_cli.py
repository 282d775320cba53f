"""The command line as a user types it: results, one-line errors, exit codes, kill and resume."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest

from fed_dp.accounting import Budget, Event, Ledger, SparseVector, Unprotected
from tests.clock import HANG
from tests.conftest import Cli, some

pytestmark = pytest.mark.e2e

SMALL = """
description = "a test"
rounds = 3
seed = 5

[clients]
count = 4

[trainer]
name = "psgd"
sample_rate = 0.25

[privacy]
budget_epsilon = 3.0
delta = 1e-5
"""


@pytest.fixture
def experiment(tmp_path: Path) -> str:
    (tmp_path / "mine.toml").write_text(SMALL)
    return "mine.toml"


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line a mistake gets."""
    assert done.returncode != 0
    assert "Traceback" not in done.stderr + done.stdout
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_the_installed_program_prints_results_and_one_line_for_a_mistake(tmp_path: Path) -> None:
    """Everything else runs in the tests' own process."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / "fed-dp"), *arguments]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG, check=False
        )

    assert run("--version").stdout.startswith("fed-dp ")
    done = run("simulate", "nothing")
    assert done.returncode == 2
    assert "nothing" in error_line(done)


def test_help_helps(cli: Cli) -> None:
    for arguments in (["--help"], ["simulate", "-h"], ["data", "--help"], ["experiments", "--help"]):
        done = cli(*arguments)
        assert done.returncode == 0
        assert "Usage:" in done.stdout
    text = cli("simulate", "--help").stdout
    for word in ("--set", "--resume", "--engine", "--json", "--runs"):
        assert word in text
    assert cli("--version").stdout.startswith("fed-dp 0.")


def test_json_prints_the_summary_and_nothing_else(cli: Cli, experiment: str, tmp_path: Path) -> None:
    done = cli("simulate", experiment, "--engine", "in-process", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["experiment"] == "mine"
    assert summary["privacy"]["epsilon_total"] <= 3.0
    folder = next((tmp_path / "runs").iterdir())
    assert summary == json.loads((folder / "summary.json").read_text())
    assert "round 3/3" in done.stderr


def test_a_run_tells_what_it_cost(cli: Cli, experiment: str) -> None:
    done = cli("simulate", experiment, "--engine", "in-process")
    assert "total ε = " in done.stdout
    assert "proved" in done.stdout
    assert "not secure: for simulation only" in done.stdout
    public = cli("simulate", "digits:sgd", "-s", "rounds=1", "--engine", "in-process")
    assert "sgd: no privacy" in public.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (["simulate", "nothing"], 2, ["'nothing'", "shipped:"]),
        (["simulate", "digits:none"], 2, ["no variant 'none'"]),
        (["simulate", "dssgd-fig9", "-p", "huge"], 2, ["no profile 'huge'; has: quick, claims, full"]),
        (["simulate", "digits", "--profile", "full"], 2, ["no profile 'full'; has none"]),
        (["simulate", "mine.toml", "-s", "clients.cont=4"], 2, ["unknown key clients.cont", "did you mean"]),
        (["simulate", "mine.toml", "-s", "clients.count=0"], 2, ["clients.count = 0"]),
        (["simulate", "mine.toml", "-s", "oops"], 2, ["--set 'oops'", "KEY=VALUE"]),
        (["simulate", "mine.toml", "--engine", "magic"], 2, ["--engine = 'magic'", "ray"]),
        (
            ["simulate", "mine.toml", "-s", "data.name=mnist", "-s", "data.path=nowhere"],
            1,
            ["nowhere", "missing"],
        ),
        (
            ["simulate", "mine.toml", "-s", "model.name=dssgd-cnn-mnist", "--engine=in-process"],
            1,
            ["dssgd-cnn-mnist", "(1, 8, 8)"],
        ),
        (["simulate", "mine.toml", "--resume"], 2, ["no unfinished run"]),
        (["simulate", "."], 2, ["--resume"]),
        (["simulate", ".", "--resume"], 2, ["not a run folder"]),
        (["data", "check", "imagenet"], 2, ["'imagenet'", "known:"]),
        (["data", "check", "mnist", "--path", "nowhere"], 1, ["train-images-idx3-ubyte.gz is missing"]),
        (["data", "fetch", "lifesnaps"], 1, ["put it at"]),
        (["experiments", "show", "none"], 2, ["'none'"]),
        (["ledger", "show", "nowhere.ledger"], 1, ["ledger nowhere.ledger is missing"]),
        (["ledger", "verify", "mine.toml"], 1, ["mine.toml is damaged", "not a database"]),
        (["ledger", "create", "x", "--site", "a", "--epsilon", "0"], 1, ["budget epsilon = 0.0"]),
    ],
)
def test_a_mistake_gets_one_line_and_a_code(
    cli: Cli, experiment: str, tmp_path: Path, arguments: list[str], code: int, parts: list[str]
) -> None:
    done = cli(*arguments, FED_DP_DATA=str(tmp_path / "data"))
    line = error_line(done)
    assert done.returncode == code
    assert line.startswith("error: ")
    for part in parts:
        assert part in line


def test_a_ledger_is_made_shown_and_verified(cli: Cli, tmp_path: Path) -> None:
    done = cli("ledger", "create", "w.ledger", "--site", "ward 7", "--epsilon", "2", "--delta", "1e-6")
    assert "may spend ε = 2, δ = 1e-06 in all, and has spent nothing" in done.stdout
    ledger = Ledger(tmp_path / "w.ledger")
    head = ledger.charge(Event(SparseVector(0.5, 100), "sparse_vector", 3, 0, "secure")).ledger_head
    shown = cli("ledger", "show", "w.ledger").stdout
    assert re.search(r"ward 7 +│ 0.5 +│ 2 +│ 1e-06 +│ proved +│ 1", shown)
    assert "round 3, sparse_vector (epsilon 0.5, count 100), proved per participant, noise: secure" in shown
    assert "ward 7: good; 1 charges, spent ε = 0.5 of 2" in cli("ledger", "verify", "w.ledger").stdout
    assert f"ledger head: {head}" in shown
    bare = Ledger.create(tmp_path / "bare.ledger", site="b", budget=Budget(2.0))
    bare.charge(Event(SparseVector(0.5, 100), "sparse_vector", 1, 0, "secure"))
    bare.charge(Event(Unprotected("upload"), "none", 2, 0, "none"))
    assert re.search(r"0.5\) +│ 2 +│ 0 +│ none", cli("ledger", "show", "bare.ledger").stdout)
    assert cli("ledger", "verify", "w.ledger", "--head", head).returncode == 0
    assert "has no ledgers" in error_line(cli("ledger", "show", "."))
    line = error_line(cli("ledger", "verify", "w.ledger", "--head", "2:" + "0" * 64))
    assert "it was rolled back to an older copy" in line
    assert "exists already" in error_line(
        cli("ledger", "create", "w.ledger", "--site", "a", "--epsilon", "9")
    )


def test_the_ledgers_of_a_simulation_are_shown_by_its_folder(
    cli: Cli, experiment: str, tmp_path: Path
) -> None:
    cli("simulate", experiment, "--engine", "in-process")
    folder = next((tmp_path / "runs").iterdir())
    shown = cli("ledger", "show", str(folder)).stdout
    assert "client-0000" in shown
    assert "client-0001" in shown
    one = cli("ledger", "show", str(folder), "--site", "client-0001").stdout
    assert "3: simulated, round 3, sampled_gaussian" in one
    assert "not the one that was asked for" in error_line(cli("ledger", "show", str(folder), "--site", "x"))


def test_a_truncated_file_is_refused_by_name(cli: Cli, experiment: str, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "mnist"
    folder.mkdir(parents=True)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"\x1f\x8b half a file")
    line = error_line(
        cli("simulate", experiment, "-s", "data.name=mnist", FED_DP_DATA=str(tmp_path / "data"))
    )
    assert "train-images-idx3-ubyte.gz is not the published file" in line


def test_experiments_and_data_are_listed(cli: Cli, tmp_path: Path) -> None:
    listed = cli("experiments", "list").stdout
    assert "digits" in listed
    assert "psgd" in listed
    shown = cli("experiments", "show", "digits:psgd", "-s", "rounds=7").stdout
    assert "# digest " in shown
    assert "rounds = 7" in shown
    data = cli("data", "list", FED_DP_DATA=str(tmp_path)).stdout
    assert "mnist-writers" in data
    assert str(tmp_path) in data
    assert "1,438 training and 359 test records" in cli("data", "check", "digits").stdout
    assert "nothing to fetch" in cli("data", "fetch", "digits").stdout


def wait_for_round(folder: Path, turn: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline and process.poll() is None:
        for path in folder.glob("*/metrics.jsonl"):
            if path.read_text().count("\n") >= turn:
                return
        time.sleep(0.02)
    raise AssertionError(f"no round {turn}: {process.communicate()}")


def heed_interrupts() -> None:
    """Undo what a shell does to the children of its background jobs: they ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ray_processes(mark: str) -> list[str]:
    """Ray's processes that inherited `mark`, by the program they run.

    Its two small agents are left out: they notice a killed parent only after a minute. Their arguments name
    the raylet, too.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text().split("\0")
            inherited = mark in (folder / "environ").read_text(errors="replace")
        except OSError:
            continue
        program = Path(command[0]).name
        if inherited and (program in ("raylet", "gcs_server") or program.startswith("ray::Worker")):
            found.append(" ".join(command)[:200])
    return found


@pytest.mark.ray
@pytest.mark.parametrize(
    "how", some([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], [signal.SIGINT, signal.SIGKILL])
)
def test_a_stopped_run_resumes_to_the_same_result_and_leaves_no_process(
    how: signal.Signals, cli: Cli, experiment: str, tmp_path: Path
) -> None:
    settings = ["-s", "rounds=25", "-s", "trainer.local_epochs=3"]
    engine = "ray" if how == signal.SIGKILL else "in-process"
    more = [*settings, "--runs", "cut", "--engine", engine]
    expected = json.loads(cli("simulate", experiment, *settings, "--engine", "in-process", "--json").stdout)
    mark = f"FED_DP_TEST={uuid4()}"
    process = subprocess.Popen(
        [sys.executable, "-m", "fed_dp.cli", "simulate", experiment, *more],
        cwd=tmp_path,
        env={**os.environ, **dict([mark.split("=")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    wait_for_round(tmp_path / "cut", 2, process)
    assert bool(ray_processes(mark)) == (engine == "ray")
    os.killpg(process.pid, how) if how == signal.SIGINT else process.send_signal(how)
    output, _ = process.communicate(timeout=HANG)
    if how != signal.SIGKILL:
        assert process.returncode == 130, output
        assert "--resume" in output
    assert "Traceback" not in output
    deadline = time.monotonic() + HANG
    while ray_processes(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert ray_processes(mark) == []
    done = len(next((tmp_path / "cut").glob("*/metrics.jsonl")).read_text().splitlines())
    assert done < 25
    resumed = cli(
        "simulate", experiment, *settings, "--runs", "cut", "--resume", "--json", "--engine", "in-process"
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed after round" in resumed.stderr
    summary = json.loads(resumed.stdout)
    assert summary["accuracy"] == expected["accuracy"]
    assert summary["privacy"] == expected["privacy"]
    assert len(list((tmp_path / "cut").iterdir())) == 1
