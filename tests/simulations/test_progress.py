from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fed_dp.server.app import PlainLines
from fed_dp.server.observers import Observer
from fed_dp.simulations.progress import ProgressBar
from tests.conftest import small


def line(turn: int, **changes: Any) -> dict[str, Any]:
    return {
        "round": turn,
        "accuracy": 0.5 + turn / 10,
        "epsilon": {"min": 1.0, "median": 1.0, "max": 1.25 * turn},
        "clients": {"asked": 4, "uploaded": 3, "failed": 1},
        "failures": {"2": "[no] answer"},
        "bytes": {"uploaded": 2_000_000, "downloaded": 4_000_000},
        "seconds": 0.5,
        **changes,
    }


def watch(observer: Observer) -> None:
    observer.started(small("psgd"), Path("here"), 0)
    observer.round_done(line(1))
    observer.round_done(line(2))
    observer.stop()


def test_the_bar_shows_round_accuracy_cost_and_traffic() -> None:
    out = io.StringIO()
    watch(ProgressBar(Console(file=out, force_terminal=True, width=150, color_system=None)))
    shown = out.getvalue()
    for text in (
        "round 2/2",
        "accuracy 0.7000",
        "ε min/median/max 1.000 / 1.000 / 2.500 of 4",
        "↑ 4.0 ↓ 8.0 MB",
        "client 2 failed: [no] answer",
    ):
        assert text in shown


@pytest.mark.parametrize(
    ("epsilon", "says"),
    [(None, "no privacy"), (dict.fromkeys(("min", "median", "max"), 1.25), "ε 1.250 of 4")],
)
def test_plain_lines_say_the_same(epsilon: dict[str, float] | None, says: str) -> None:
    out = io.StringIO()
    observer = PlainLines(out)
    observer.started(small("psgd" if epsilon else "sgd"), Path("here"), 3)
    observer.round_done(line(1, epsilon=epsilon))
    shown = out.getvalue().splitlines()
    assert "resumed after round 3; here" in shown[0]
    for text in ("round 1/2", "accuracy 0.6000", says, "3/4 clients", "1 failed (client 2: [no] answer)"):
        assert text in shown[1]
