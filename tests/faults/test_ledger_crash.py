"""A site killed at every step of charge, noise, keep and send: nothing leaves that was not charged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clock import HANG

Found = dict[str, dict[str, Any]]
NEVER = (
    "more left than was charged",
    "noise was drawn before the charge",
    "a retry sent other bytes",
    "a retry was charged though it had been sent",
    "no answer",
)
REACHED = (
    "killed before the charge",
    "killed after the charge, before anything was kept",
    "killed when it was kept, before it was sent",
    "sent before it was killed",
)


def crash(folder: Path, kills: int) -> Found:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.crash", str(folder), str(kills)],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return crash(tmp_path_factory.mktemp("crash"), 48)


def check(found: dict[str, Any]) -> None:
    assert found["charge"] > 100  # lines between the charge and the kept answer
    assert found["sqlite"] > 100  # instructions of SQLite's
    assert {never: found[never] for never in NEVER} == dict.fromkeys(NEVER, 0)
    for reached in REACHED:
        assert found[reached] > 0, found


def test_killed_at_every_step_the_ledger_never_shows_less_than_what_left(found: Found) -> None:
    check(found[""])


@pytest.mark.exhaustive
def test_killed_four_hundred_times_the_ledger_never_shows_less_than_what_left(tmp_path: Path) -> None:
    check(crash(tmp_path, 400)[""])


@pytest.mark.parametrize(
    ("mutant", "seen"),
    [
        ("late", "noise was drawn before the charge"),
        ("never", "more left than was charged"),
        ("forgetful", "a retry sent other bytes"),
    ],
)
def test_books_that_charge_late_or_never_or_forget_what_they_sent_are_found(
    found: Found, mutant: str, seen: str
) -> None:
    assert found[mutant][seen] > 0
