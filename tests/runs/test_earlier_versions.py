"""What was written before components declared themselves is still read; `earlier/` is from that program."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from fed_dp.accounting import Ledger
from fed_dp.experiment import build
from fed_dp.runs.folder import LEDGERS, RunFolder
from fed_dp.runs.saved_model import SavedModel
from fed_dp.server.observers import Silent
from fed_dp.simulations.runner import simulate
from fed_dp.simulations.study import to_resume

EARLIER = Path(__file__).parent / "earlier"


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    return shutil.copytree(EARLIER, tmp_path / "runs")


def weights(path: Path) -> np.ndarray:
    return SavedModel.load(path).weights


def test_an_unfinished_run_ends_where_a_new_one_does(earlier: Path, tmp_path: Path) -> None:
    given = RunFolder(earlier / "unfinished").experiment()
    assert to_resume(earlier, {given.name: given}) == earlier / "unfinished"
    path, summary = simulate(given, observer=Silent(), engine="in-process", folder=earlier / "unfinished")
    new, expected = simulate(given, observer=Silent(), engine="in-process", folder=tmp_path / "new")
    # The first rounds were trained on another processor, whose products round differently.
    np.testing.assert_allclose(weights(path), weights(new), rtol=1e-4, atol=1e-6)
    assert summary["accuracy"]["final"] == pytest.approx(expected["accuracy"]["final"], abs=0.01)
    for key in ("privacy", "failures", "late"):
        assert summary[key] == expected[key]
    charges = [
        [Ledger(each / LEDGERS, site).read()[0].number for site in Ledger(each / LEDGERS).sites()]
        for each in (path, new)
    ]
    assert charges == [[3, 3], [3, 3]]


def test_a_finished_run_and_its_model_are_read(earlier: Path) -> None:
    folder = RunFolder(earlier / "finished")
    assert folder.finished
    assert folder.summary()["privacy"]["epsilon_total"] <= 2.0
    assert folder.experiment().trainer.name == "dpa"
    model = SavedModel.load(earlier / "finished")
    assert model.scores(np.zeros((3, 1, 8, 8), np.float32), np.arange(3))["accuracy"] >= 0


def test_a_sites_ledger_is_read_and_charged_on(earlier: Path) -> None:
    ledger = Ledger(earlier / "site.sqlite")
    account, entries = ledger.read(known="3:a553c8f33151492fc896009af734d50c8e1c357a3b886bb155a09819da178a44")
    assert (account.spent_text, len(entries)) == ("1.476", 3)
    assert [entry.event.stated.status for entry in entries] == ["proved", "proved", "none"]
    assert ledger.kept(experiment="e" * 64, request="q" * 64, known=None) == b"what was sent"
    assert ledger.charge(entries[1].event, known=None).number == 4


def test_keys_that_every_data_set_had_are_dropped_and_no_others() -> None:
    assert build({"data": {"name": "digits", "influence": True}}).data.name == "digits"
    assert build({"data": {"name": "health-weekly", "influence": True}}).data.name == "health-weekly"
