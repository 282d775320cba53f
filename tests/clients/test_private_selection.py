"""A private selection after any trainer without noise: no record decides whether, or when, a site answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fed_dp.accounting import Budget, Ledger
from fed_dp.clients.svm import trainer as svm
from fed_dp.experiment import build
from fed_dp.sharing import message as names
from tests.clients.deployed import Deployed
from tests.experiment.test_grid import combined
from tests.simulations.test_simulate import run

INPUTS = 30


def site(folder: Path, last: int) -> Deployed:
    """A site of ten records, the last of which is `last` in every column, asked to take giant steps."""
    data = folder / "data"
    data.mkdir(parents=True)
    header = ",".join([*(f"c{k}" for k in range(INPUTS)), "y"])
    rows = [",".join(["0"] * INPUTS + ["1"])] * 9 + [",".join([str(last)] * INPUTS + ["1"])]
    (data / "train.csv").write_text("\n".join([header, *rows]) + "\n")
    experiment = build(
        {
            "rounds": 3,
            "clients": {"count": 3},
            "model": {"name": "linear"},
            "trainer": {"name": "sgd", "learning_rate": 3.3e38, "local_epochs": 2, "batch_size": 100},
            "data": {"name": "folder", "path": "x", "label": "y", "classes": 2, "bounds": [-1, 1]},
            "strategy": {
                "name": "dssgd",
                "selection": "sparse_vector",
                "bound": 0.01,
                "download_fraction": 0.5,
            },
            "privacy": {"budget_epsilon": 0.1, "noise_source": "secure"},
        }
    )
    deployed = Deployed(experiment, None)
    Ledger.create(folder / "ledger.sqlite", site="a", budget=Budget(1.0))
    (folder / "site.toml").write_text("client = 0\nmemory = 'memory'\n[data]\npath = 'data'\n")
    deployed.node = {names.SITE: str(folder / "site.toml")}
    return deployed


@pytest.mark.parametrize("last", [0, 1])
def test_a_training_that_diverges_for_some_records_ends_no_answers(last: int, tmp_path: Path) -> None:
    asked = site(tmp_path / "a", last)
    for server_round in (1, 2, 3):
        reply = asked.answer(server_round, part=True)
        assert reply.content.metric_records[names.METRICS][names.RECORDS] == 0
    kept = list((tmp_path / "a" / "memory").glob("*.npz"))
    assert all(np.isfinite(np.load(path)["local"]).all() for path in kept)


@pytest.mark.parametrize(("column", "calls"), [("dssgd, random_mask", False), ("dssgd, parallel", True)])
def test_the_svm_takes_as_many_steps_for_all_records_where_a_selection_hides_them(
    column: str, calls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long liblinear takes depends on the records; without privacy it is what solves."""
    called = []
    liblinear = svm.liblinear
    monkeypatch.setattr(svm, "liblinear", lambda *a, **k: (called.append(1), liblinear(*a, **k))[1])
    _, summary = run(combined("svm, private, no noise", column), tmp_path)
    assert summary["failures"] == 0
    assert bool(called) == calls
