"""A site killed at every step of charge, noise, keep and send: nothing leaves that was not charged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def crash(folder: Path, kills: int, *mutant: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.crash", str(folder), str(kills), *mutant],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_killed_two_hundred_times_the_ledger_never_shows_less_than_what_left(tmp_path: Path) -> None:
    found = crash(tmp_path, 200)
    assert found["lines"] > 200
    for never in (
        "more left than was charged",
        "noise was drawn before the charge",
        "a retry sent other bytes",
        "a retry was charged though it had been sent",
        "no answer",
    ):
        assert found[never] == 0
    for reached in (
        "killed before the charge",
        "killed after the charge, before anything was kept",
        "killed when it was kept, before it was sent",
        "sent before it was killed",
    ):
        assert found[reached] > 0, found


@pytest.mark.parametrize(
    ("mutant", "seen"),
    [
        ("late", "noise was drawn before the charge"),
        ("never", "more left than was charged"),
        ("forgetful", "a retry sent other bytes"),
    ],
)
def test_books_that_charge_late_or_never_or_forget_what_they_sent_are_found(
    mutant: str, seen: str, tmp_path: Path
) -> None:
    assert crash(tmp_path, 12, mutant)[seen] > 0
