"""Whole private runs: what ledgers hold, what a refused site does, what a resume repeats."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from flwr.app import RecordDict

from fed_dp.accounting import Account, Budget, Event, Ledger, SparseVector
from fed_dp.clients import app as client_app
from fed_dp.clients.ledger_session import VirtualLedgerSession
from fed_dp.errors import PrivacyError, ResumeError, RunError
from fed_dp.experiment import Experiment, to_run_config
from fed_dp.runs.folder import LEDGERS, RunFolder
from fed_dp.server.ledger_heads import FILE
from fed_dp.server.observers import Silent
from fed_dp.server.rounds import run_rounds
from fed_dp.sharing.message import LEDGER
from fed_dp.simulations.grid import InProcessGrid
from fed_dp.simulations.runner import simulate
from fed_dp.simulations.study import run_study
from tests.conftest import private_selection, small
from tests.simulations.test_simulate import StopAfter, run, weights

KINDS: dict[str, Experiment] = {
    "psgd": small("psgd"),
    "psgd, selected": small("psgd", strategy={"name": "dssgd"}),
    "sparse vector": private_selection("sparse_vector"),
    "sparse vector, paper": private_selection("sparse_vector", variant="paper"),
    "sparse vector, as printed": private_selection("sparse_vector", variant="paper_as_printed"),
    "random mask": private_selection("random_mask"),
    "random mask, secure": private_selection("random_mask", noise_source="secure"),
}


def ledger_heads(path: Path) -> dict[str, str]:
    file = path / LEDGERS
    return {site: Ledger(file, site).read()[0].ledger_head for site in Ledger(file).sites()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_statement_the_lines_and_every_ledger_agree(kind: str, tmp_path: Path) -> None:
    experiment = KINDS[kind]
    path, summary = run(experiment, tmp_path)
    cost = summary["privacy"]
    assert 3.9 < cost["epsilon_total"] <= 4.0 + 1e-6
    assert cost["guarantee"] == ("refuted" if "printed" in kind else "proved")
    assert cost["unit"] == ("record" if "psgd" in kind else "participant")
    assert cost["noise_source"] == experiment.privacy.noise_source
    assert RunFolder(path).lines()[-1]["epsilon"]["max"] == pytest.approx(cost["epsilon_total"])
    assert Ledger(path / LEDGERS).sites() == [f"client-{k:04d}" for k in range(4)]
    for site in Ledger(path / LEDGERS).sites():
        account, entries = Ledger(path / LEDGERS, site).read()
        assert account.spent == pytest.approx(cost["epsilon_total"])
        assert account.budget == Budget(4.0, 1e-5)
        assert [entry.event.round for entry in entries] == [1, 2]
    latest = RunFolder(path).latest()
    assert latest is not None
    assert latest[1]["marks"].tolist() == list(ledger_heads(path).values())


def test_a_run_without_noise_has_no_ledger(tmp_path: Path) -> None:
    path, _ = run(small(), tmp_path)
    assert not (path / LEDGERS).exists()


def test_pure_releases_need_no_delta_and_then_sum(tmp_path: Path) -> None:
    experiment = private_selection("sparse_vector", privacy={"budget_epsilon": 3.0})
    _, summary = run(experiment, tmp_path)
    cost = summary["privacy"]
    assert (cost["epsilon_total"], cost["epsilon_pure"], cost["delta"]) == (3.0, 3.0, 0.0)
    assert cost["epsilon_per_round"] == 1.5
    parameters = int(0.1 * summary["model"]["parameters"])
    assert cost["epsilon_per_parameter"] == pytest.approx(1.5 / parameters)


@pytest.mark.parametrize("kind", ["psgd, selected", "sparse vector", "random mask"])
@pytest.mark.parametrize("before", [True, False])
def test_a_resumed_run_repeats_its_last_round_and_its_ledgers_show_it_once(
    kind: str, before: bool, tmp_path: Path
) -> None:
    experiment = KINDS[kind]
    whole, expected = run(experiment, tmp_path / "whole")
    folder = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        simulate(experiment, observer=StopAfter(1, before=before), engine="in-process", folder=folder)
    _, summary = run(experiment, tmp_path, folder=folder)
    assert weights(folder) == weights(whole)
    assert ledger_heads(folder) == ledger_heads(whole)
    assert summary["privacy"] == expected["privacy"]


def test_noise_that_cannot_be_repeated_is_not_resumed(tmp_path: Path) -> None:
    experiment, folder = KINDS["random mask, secure"], tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        simulate(experiment, observer=StopAfter(1, before=False), engine="in-process", folder=folder)
    with pytest.raises(ResumeError, match=r"noise_source = 'secure' cannot repeat.*released twice"):
        run(experiment, tmp_path, folder=folder)


def test_secure_noise_that_is_not_installed_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opendp.prelude", None)
    with pytest.raises(PrivacyError, match=r"pip install 'fed-dp\[secure\]'"):
        run(KINDS["random mask, secure"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def with_account(grid: InProcessGrid, node: int, account: Account) -> None:
    VirtualLedgerSession(account, context=grid.contexts[node]).store()


def test_a_site_over_budget_sends_nothing_and_the_run_goes_on_and_says_so(tmp_path: Path) -> None:
    experiment = private_selection("sparse_vector", privacy={"budget_epsilon": 4.0})
    grid = InProcessGrid(4, dict(to_run_config(experiment)), client_app.app)
    earlier = Event(SparseVector(1.0, 5), "sparse_vector", 9, 1, "simulation")
    account, _ = Account.open("client-0001", experiment.digest, Budget(4.0)).charge(earlier)
    with_account(grid, 2, account)
    folder = RunFolder.create(tmp_path / "run", experiment)
    summary = run_rounds(experiment, grid, folder, Silent())
    lines = folder.lines()
    assert [line["clients"]["uploaded"] for line in lines] == [4, 3]
    assert "over the budget of 4" in lines[1]["failures"]["1"]
    cost = summary["privacy"]
    assert cost["epsilon_by_site"] == {"min": 2.0, "median": 4.0, "max": 4.0}
    assert (
        "1 client-rounds went on without a site whose budget, ledger or own file refused"
        in cost["warnings"][-1]
    )
    books = VirtualLedgerSession.of(grid.contexts[2])
    assert books is not None
    assert books.account.number == 2


def test_a_report_shows_accuracy_by_epsilon_per_parameter_and_in_all(tmp_path: Path) -> None:
    variants = {
        f"e{budget}": private_selection("sparse_vector", privacy={"budget_epsilon": float(budget)})
        for budget in (10, 1_000_000)
    }
    path, _ = run_study("study", variants, observe=Silent, engine="in-process", root=tmp_path)
    page = (path / "report.html").read_text()
    assert "<h2>Test accuracy by ε</h2>" in page
    assert page.index("ε/c: of one parameter in one round") < page.index("ε: of the whole run")
    assert "sparse_vector, θ_u = 0.1" in page
    assert "ε = 1,000,000, δ = 0, proved" in page
    alone, _ = run_study(
        "alone", {"alone": variants["e10"]}, observe=Silent, engine="in-process", root=tmp_path
    )
    assert "Test accuracy by ε" not in (alone / "report.html").read_text()


def test_the_server_remembers_real_sites_ledgers_from_run_to_run(tmp_path: Path) -> None:
    experiment = private_selection("random_mask", noise_source="secure", rounds=1, clients={"count": 2})

    def whole_run(name: str) -> list[dict[str, Any]]:
        grid = InProcessGrid(2, dict(to_run_config(experiment)), client_app.app)
        for node in (1, 2):
            grid.contexts[node].node_config[LEDGER] = str(tmp_path / f"{node}.ledger")
        folder = RunFolder.create(tmp_path / "runs" / name, experiment)
        run_rounds(experiment, grid, folder, Silent())
        return folder.lines()

    for node in (1, 2):
        Ledger.create(tmp_path / f"{node}.ledger", site=f"s{node}", budget=Budget(100.0, 1e-5))
    shutil.copy(tmp_path / "2.ledger", tmp_path / "older")
    assert whole_run("first")[0]["clients"]["uploaded"] == 2
    assert len(json.loads((tmp_path / "runs" / FILE).read_text())) == 2
    shutil.copy(tmp_path / "older", tmp_path / "2.ledger")
    lines = whole_run("second")
    assert lines[0]["clients"]["uploaded"] == 1
    assert "rolled back" in lines[0]["failures"]["1"]
    (tmp_path / "runs" / FILE).write_text("{")
    with pytest.raises(RunError, match="put it back, or delete it to forget"):
        whole_run("third")


class RollBack(Silent):
    """After the first round, give client 0 the state it had before."""

    def __init__(self, grid: InProcessGrid) -> None:
        self._grid = grid

    def round_done(self, line: dict[str, Any]) -> None:
        if line["round"] == 1:
            self._grid.contexts[1].state = RecordDict()


def test_a_client_whose_account_was_rolled_back_is_refused_by_itself(tmp_path: Path) -> None:
    experiment = private_selection("sparse_vector")
    grid = InProcessGrid(4, dict(to_run_config(experiment)), client_app.app)
    folder = RunFolder.create(tmp_path / "run", experiment)
    run_rounds(experiment, grid, folder, RollBack(grid))
    [why] = folder.lines()[1]["failures"].values()
    assert "entry 1 of the ledger of client-0000, which ends at 0: it was rolled back" in why


def test_with_no_noise_to_speak_of_a_sparse_vector_is_a_random_selection_above_the_threshold(
    tmp_path: Path,
) -> None:
    """ε without end: accuracy as without privacy, and clearly above what ε = 1 leaves."""
    common: dict[str, Any] = {"rounds": 12, "clients": {"count": 10}}
    strategy = {"name": "dssgd", "upload_fraction": 0.3, "bound": 0.05, "threshold": 0.001}
    best = {}
    for name, selection, privacy in (
        ("none", "random_with_threshold", {}),
        ("huge", "sparse_vector", {"budget_epsilon": 1e9}),
        ("paper", "sparse_vector", {"budget_epsilon": 1e9, "variant": "paper"}),
        ("one", "sparse_vector", {"budget_epsilon": 1.0}),
    ):
        experiment = small(strategy={**strategy, "selection": selection}, privacy=privacy, **common)
        best[name] = run(experiment, tmp_path / name)[1]["accuracy"]["best"]
    assert best["huge"] == pytest.approx(best["none"], abs=0.05)
    assert best["paper"] == pytest.approx(best["none"], abs=0.05)
    assert best["one"] < best["none"] - 0.2
    assert math.isfinite(best["one"])
