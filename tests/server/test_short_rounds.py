"""Rounds that are not scored share a checkpoint: a run that was stopped between two ends as it would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fed_dp.accounting import Ledger
from fed_dp.runs.folder import LEDGERS, RunFolder
from fed_dp.server import rounds
from fed_dp.server.observers import Silent
from fed_dp.simulations.runner import simulate
from tests.conftest import small


class Stopped(Exception):
    """What stops the run."""


class StopsAfter(Silent):
    def __init__(self, last: int) -> None:
        self._last = last

    def round_done(self, line: dict[str, Any]) -> None:
        if line["round"] == self._last:
            raise Stopped


def test_a_run_stopped_between_checkpoints_ends_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "CHECKPOINT_SECONDS", 1e9)  # only where a round is scored
    experiment = small("psgd", rounds=8, evaluate_every=3, strategy={"name": "averaging", "momentum": 0.5})
    whole, expected = simulate(experiment, observer=Silent(), engine="in-process", folder=tmp_path / "whole")
    path = tmp_path / "stopped"
    with pytest.raises(Stopped):
        simulate(experiment, observer=StopsAfter(5), engine="in-process", folder=path)
    assert RunFolder(path).done == 3
    assert [line["epsilon"] is not None for line in RunFolder(path).lines()] == [
        False,
        False,
        True,
        False,
        False,
    ]
    _, found = simulate(experiment, observer=Silent(), engine="in-process", folder=path)
    assert found["scores"] == expected["scores"]
    assert found["privacy"]["epsilon_total"] == expected["privacy"]["epsilon_total"]
    assert found["epsilon_by_round"] == expected["epsilon_by_round"]
    assert (path / "model.npz").read_bytes() == (whole / "model.npz").read_bytes()
    for folder in (whole, path):
        account, entries = Ledger(folder / LEDGERS, "client-0000").read()
        assert [entry.event.round for entry in entries] == list(range(1, 9))
        assert account.spent == pytest.approx(expected["privacy"]["epsilon_total"])


def test_epsilon_of_a_round_that_was_not_added_up_is_at_most_that_of_the_next_that_was(
    tmp_path: Path,
) -> None:
    experiment = small("psgd", rounds=5, evaluate_every=2)
    _, summary = simulate(experiment, observer=Silent(), engine="in-process", root=tmp_path)
    _, each = simulate(small("psgd", rounds=5), observer=Silent(), engine="in-process", root=tmp_path)
    told, exact = summary["epsilon_by_round"], each["epsilon_by_round"]
    assert len(told) == len(exact) == 5
    assert told == [exact[1], exact[1], exact[3], exact[3], exact[4]]


def test_checkpoints_are_written_for_every_round_that_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "CHECKPOINT_SECONDS", 0.0)
    experiment = small("psgd", rounds=3, evaluate_every=3)
    with pytest.raises(Stopped):
        simulate(experiment, observer=StopsAfter(2), engine="in-process", folder=tmp_path / "run")
    assert RunFolder(tmp_path / "run").done == 2
