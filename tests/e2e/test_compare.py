"""fed-dp compare, audit and demo, as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.clock import HANG
from tests.comparison.test_comparing import FILE
from tests.conftest import Cli
from tests.e2e.test_cli import error_line, heed_interrupts

pytestmark = pytest.mark.e2e

DEFAULT = {"psgd", "dssgd-svt", "dssgd-psgd", "dpa", "pcdbn", "adlm", "ilm", "svm"}


def test_the_quick_comparison_has_all_mechanisms_at_two_epsilon(cli: Cli, tmp_path: Path) -> None:
    done = cli("compare", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["epsilons"] == [1.0, 8.0]
    private = [row for row in found["rows"] if row["privacy"] is not None]
    assert {(row["variant"], row["epsilon"]) for row in private} == {
        (v, e) for v in DEFAULT for e in (1.0, 8.0)
    }
    assert {row["variant"] for row in found["rows"]} - DEFAULT == {"centralised", "standalone", "no-privacy"}
    for row in private:
        assert row["privacy"]["guarantee"] == "proved"
        assert row["privacy"]["epsilon_total"] <= row["epsilon"] * 1.0001
        audit = row["audit"]
        assert audit["bound"] <= audit["claim"] * (1 + 1e-6)
        assert audit["bound"] > 0.9 * audit["claim"]
        assert len(row["accuracy"]["by_seed"]) == 2
    psgd = {row["epsilon"]: row["accuracy"]["mean"] for row in private if row["variant"] == "psgd"}
    assert psgd[8.0] > psgd[1.0]
    assert "38/38" in done.stderr
    again = cli("compare", "--quick")
    assert again.returncode == 0
    assert again.stdout.count("(kept)") == 38
    assert "one participant, replace one, δ = 1e-05: dssgd-svt" in again.stdout


def test_a_stopped_comparison_goes_on_and_leaves_no_process(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(FILE.replace("rounds = 2", "rounds = 12", 1))
    command = [sys.executable, "-m", "fed_dp.cli", "compare", "mine.toml", "--jobs", "2"]
    mark = f"mark-{os.getpid()}-{time.time_ns()}"
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "FED_DP_TEST": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("2/"):
            break
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=HANG)
    assert process.returncode == 130, output
    assert "the same command goes on where it was" in output
    assert "Traceback" not in output
    deadline = time.monotonic() + HANG
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
    done = cli("compare", "mine.toml")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(kept)") >= 2
    assert "report:" in done.stdout


def _marked(mark: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_text(errors="replace"):
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def test_mistakes_get_one_line(cli: Cli) -> None:
    assert "neither a file nor a shipped" in error_line(cli("compare", "nothing"))
    assert "--epsilon 'a,b': expected numbers" in error_line(cli("compare", "--epsilon", "a,b"))
    assert "expected one of them" in error_line(cli("compare", "--quick", "--profile", "full"))
    assert "known: laplace" in error_line(cli("audit", "mechanism", "x"))
    assert "known: adlm" in error_line(cli("audit", "trainer", "x"))
    assert "--data = 'x'" in error_line(cli("demo", "inversion", "--data", "x"))
    assert "cannot be written" in error_line(cli("demo", "inversion", "--out", "no/where.html"))


def test_audits_print_what_is_stated_then_what_is_lost(cli: Cli) -> None:
    printed = cli("audit", "mechanism", "sparse_vector_as_printed").stdout
    assert printed.index("stated ε = 1.000") < printed.index("refuted in this configuration")
    found = json.loads(cli("audit", "mechanism", "all", "--epsilon", "2", "--json").stdout)
    assert {each["subject"].partition(",")[0] for each in found if each["verdict"].startswith("refuted")} == {
        "sparse_vector_as_printed",
        "svm_as_printed (paper)",
    }
    assert {each["subject"] for each in found} >= {"psgd (hooks)", "psgd (secure)", "laplace, secure noise"}
    [one] = json.loads(cli("audit", "trainer", "adlm", "--trials", "40", "--json").stdout)
    assert one["trials"] == 80
    assert one["seed"] == 1
    text = cli("audit", "run", "digits:psgd", "-s", "rounds=2", "--canaries", "50").stdout
    assert "50 mislabelled canaries" in text
    assert "verified" not in text + printed
