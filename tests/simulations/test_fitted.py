"""Whole runs of AdLM, ILM and the SVMs: federated forms, repeats, scores by owner, saved models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fed_dp.accounting import Ledger
from fed_dp.clients.building import make_trainer
from fed_dp.clients.svm.trainer import SvmTrainer
from fed_dp.clients.trainer import ClientData
from fed_dp.errors import ConfigError, DataCorrupt, DataMissing
from fed_dp.experiment import Experiment, build, variants
from fed_dp.experiment.federation import make_federation
from fed_dp.experiment.start import starting_weights
from fed_dp.runs.folder import LEDGERS, RunFolder
from fed_dp.runs.report import decided_lines
from fed_dp.runs.saved_model import SavedModel
from fed_dp.server.observers import Silent
from fed_dp.simulations.study import run_study
from tests.clients.test_adlm import EPOCHS
from tests.clients.test_statistics import experiment as statistics
from tests.clients.test_svm import experiment as svm
from tests.conftest import Cli
from tests.simulations.test_simulate import run

PLAIN: dict[str, Any] = {"trainer": {"name": "svm", "cost": 50.0, "perturb": False}, "privacy": {}}
EXCHANGES = ("round_robin", "random_order", "parallel", "asynchronous")


def final(path: Path) -> np.ndarray:
    latest = RunFolder(path).latest()
    assert latest is not None
    found: np.ndarray = latest[1]["weights"]
    return found


def own_machines(given: Experiment) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every site's w, their counts, and the frequencies they share."""
    members = make_federation(given)
    trainer, _ = make_trainer(given, members.dataset)
    assert isinstance(trainer, SvmTrainer)
    start = starting_weights(given, members)
    sites = [ClientData(*members.client(k), k, 1, given.seed) for k in range(given.clients.count)]
    machines = np.stack([trainer.release(start, site, 1, None) for site in sites])
    return machines, np.array([len(site.y) for site in sites]), trainer.frozen(start, 1)


def test_the_model_is_the_mean_of_the_sites_machines_by_their_counts(tmp_path: Path) -> None:
    given = svm(**PLAIN, data={"public_records": 30, "partition": {"name": "dirichlet", "alpha": 1.0}})
    machines, counts, frequencies = own_machines(given)
    assert len(set(counts)) > 1
    path, summary = run(given, tmp_path)
    assert final(path)[-400:] == pytest.approx(np.average(machines, axis=0, weights=counts), abs=1e-5)
    assert final(path)[:-400].tobytes() == frequencies.tobytes()
    assert summary["accuracy"]["final"] > 0.7


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_under_dssgd_sites_move_the_model_by_their_part(exchange: str, tmp_path: Path) -> None:
    strategy = {"name": "dssgd", "exchange": exchange, "upload_fraction": 1.0}
    _, summary = run(svm(strategy=strategy), tmp_path)
    assert summary["privacy"]["epsilon_total"] == pytest.approx(4.0)
    assert summary["privacy"]["guarantee"] == "proved"
    assert summary["epsilon_by_round"] == pytest.approx([4.0] * 3)  # rounds after the first are free
    if exchange == "parallel":
        again, _ = run(svm(strategy=strategy, rounds=1), tmp_path / "one")
        plain = svm(strategy={"name": "averaging"}, rounds=1)
        same, _ = run(plain, tmp_path / "averaged")
        assert final(again)[-400:] == pytest.approx(final(same)[-400:], rel=0.1, abs=0.05)


def test_a_private_machine_is_charged_once_and_kept(tmp_path: Path) -> None:
    health = {"name": "health-weekly", "public_records": 30}
    privacy = {"budget_epsilon": 4.0, "delta": 1e-5}
    given = svm(data=health, privacy=privacy, trainer={"name": "svm"}, clients={"count": 3})
    path, summary = run(given, tmp_path)
    account, entries = Ledger(path / LEDGERS, "client-0000").read()
    assert (account.number, len(entries)) == (1, 1)
    assert (summary["privacy"]["neighbours"], summary["privacy"]["unit"]) == ("replace one", "record")
    assert summary["auc"]["final"] > 0.65
    assert "30 training records are set aside" in " ".join(summary["data"]["notes"])


def test_public_records_alone_are_worse_than_all(tmp_path: Path) -> None:
    _, alone = run(svm(**PLAIN, strategy={"name": "public"}), tmp_path / "public")
    _, together = run(svm(**PLAIN), tmp_path / "all")
    assert alone["clients"] == 1
    assert alone["privacy"] is None
    assert alone["accuracy"]["final"] < together["accuracy"]["final"]


def test_the_kernel_on_public_records_is_evaluated_and_saved_like_any_model(tmp_path: Path) -> None:
    trainer = {"name": "svm", "perturb": False}
    given = svm(
        strategy={"name": "public"}, model={"name": "rbf-exact"}, trainer=trainer, privacy={}, rounds=2
    )
    path, summary = run(given, tmp_path)
    assert summary["decided"] == {"trainer.cost": {"min": 1920.0, "max": 1920.0}}  # of 30 public records
    model, data = SavedModel.load(path), make_federation(given).dataset
    assert model.weights.size == 30 * (64 + 10) + 10
    assert model.scores(data.inputs(data.test), data.test.y)["accuracy"] == summary["accuracy"]["final"]
    assert decided_lines(summary) == ["trainer.cost = 1920, which public numbers decide ('auto')"]


@pytest.mark.parametrize("strategy", ["averaging", "dssgd"])
@pytest.mark.parametrize("model", ["class-sums", "relevant-pixels"])
def test_adaptive_statistics_work_under_every_strategy(strategy: str, model: str, tmp_path: Path) -> None:
    privacy = {"budget_epsilon": 20.0, "delta": 1e-5}
    _, summary = run(statistics(model, strategy=strategy, privacy=privacy, rounds=6), tmp_path)
    assert summary["accuracy"]["final"] > 0.5
    assert summary["privacy"]["epsilon_total"] == pytest.approx(20.0)
    assert summary["privacy"]["rounds_free"] == 5


@pytest.mark.parametrize(("variant", "status"), [("paper", "claimed"), ("paper_as_released", "refuted")])
@pytest.mark.parametrize("trainer", ["adlm", "ilm"])
def test_the_papers_form_runs_as_printed_and_says_what_it_is(
    trainer: str, variant: str, status: str, tmp_path: Path
) -> None:
    given = build(
        {
            "rounds": 2,
            "clients": {"count": 2},
            "model": {"name": "adlm-cnn", "filters": 2},
            "trainer": {"name": trainer, **EPOCHS[trainer], "batch_size": 100},
            "privacy": {"budget_epsilon": 2.0, "variant": variant},
        }
    )
    _, summary = run(given, tmp_path)
    assert summary["privacy"]["guarantee"] == status
    assert summary["privacy"]["epsilon_total"] == pytest.approx(2.0)
    assert summary["epsilon_by_round"] == pytest.approx([2.0, 2.0])


# ---------------------------------------------------------------------- repeats, owners, models


def test_repeats_are_told_together(tmp_path: Path) -> None:
    tables = {
        "name": "folded",
        "rounds": 1,
        "clients": {"count": 2},
        "repeats": {"seeds": 2, "folds": 2},
        "variants": {"sgd": {}, "slow": {"trainer": {"learning_rate": 0.001}}},
    }
    found = {name: build(each) for name, each in variants(tables).items()}
    path, summary = run_study("folded", found, observe=Silent, engine="in-process", root=tmp_path)
    assert len(summary["runs"]) == 8
    told = summary["groups"]["sgd"]
    values = [each["accuracy"]["final"] for name, each in summary["runs"].items() if name.startswith("sgd~")]
    assert told["runs"] == 4
    assert told["accuracy"]["mean"] == pytest.approx(np.mean(values))
    assert told["accuracy"]["deviation"] == pytest.approx(np.std(values, ddof=1))
    low, high = told["accuracy"]["interval"]
    assert low < told["accuracy"]["mean"] < high
    page = (path / "report.html").read_text()
    assert "Over repetitions: accuracy" in page
    assert page.count('<figure class="plain"') == 1  # box plots
    assert page.count('role="img"') == 1
    assert json.loads((path / "summary.json").read_text())["groups"] == summary["groups"]


def test_what_is_repeated_is_listed_once_and_keeps_its_own_seeds(cli: Cli) -> None:
    listed = cli("experiments", "list")
    assert listed.returncode == 0
    assert "heart-hospitals" in listed.stdout
    assert "~" not in listed.stdout
    refused = cli("simulate", "heart-hospitals:svm-e1", "-s", "seed=3")
    assert refused.returncode != 0
    assert "the experiment has seeds and folds of its own" in refused.stderr


@pytest.fixture
def wards(tmp_path: Path) -> dict[str, Any]:
    """A user's own table of two wards, one of which is easy."""
    rng = np.random.default_rng(0)
    lines = ["age,dose,ward,ill"]
    for k in range(400):
        ward, age, dose = ("a", "b")[k % 2], rng.uniform(0, 100), rng.uniform(0, 1)
        ill = (age > 50) if ward == "a" else rng.random() < 0.5
        lines.append(f"{age:.2f},{dose:.3f},{ward},{'yes' if ill else 'no'}")
    folder = tmp_path / "wards"
    folder.mkdir()
    (folder / "train.csv").write_text("\n".join(lines))
    return {
        "name": "folder",
        "path": str(folder),
        "label": "ill",
        "client": "ward",
        "classes": ["no", "yes"],
        "partition": "natural",
        "bounds": {"age": [0, 100], "dose": [0, 1]},
    }


@pytest.mark.parametrize("strategy", ["averaging", "standalone"])
def test_every_owner_is_scored_on_its_own_records(
    strategy: str, wards: dict[str, Any], tmp_path: Path
) -> None:
    given = build(
        {
            "rounds": 5,
            "data": wards,
            "clients": {"count": 2},
            "model": {"name": "linear"},
            "trainer": {"learning_rate": 0.5},
            "strategy": {"name": strategy},
        }
    )
    path, summary = run(given, tmp_path / "run")
    scores = summary["by_owner"]
    assert list(scores) == ["a", "b"]
    assert scores["a"]["auc"] > 0.9 > 0.7 > scores["b"]["auc"]
    assert scores["a"]["test"] + scores["b"]["test"] == summary["data"]["test"]
    assert (path / "model.npz").is_file() == (strategy == "averaging")


def test_a_saved_model_predicts_what_the_run_scored(tmp_path: Path) -> None:
    given = svm(**PLAIN)
    path, summary = run(given, tmp_path)
    model = SavedModel.load(path)
    assert (given.seed, model.experiment.seed) == (3, 0)  # from which the noise could be drawn again
    assert model.experiment.network((14,), 2) == given.network((14,), 2)
    data = make_federation(given).dataset
    x, y = data.inputs(data.test), data.test.y
    assert model.scores(x, y)["accuracy"] == summary["accuracy"]["final"]
    found = model.predict(x)
    assert found.shape == (len(y), 10)
    assert found.sum(1) == pytest.approx(np.ones(len(y)), abs=1e-5)
    assert (found.argmax(1) == y).mean() == pytest.approx(summary["accuracy"]["final"])
    with pytest.raises(ConfigError, match=r"inputs of shape \(3,\): the model takes \(1, 8, 8\)"):
        model.predict(np.zeros((2, 3), np.float32))
    for wrong in (np.full((1, 1, 8, 8), np.nan, np.float32), np.full((1, 1, 8, 8), "a")):
        with pytest.raises(ConfigError, match="inputs must be finite numbers"):
            model.predict(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the model takes"):
        model.predict(np.float32(3))  # type: ignore[arg-type]
    archive = dict(np.load(path / "model.npz"))
    for weights in (model.weights[:5], np.array(["x"] * 3)):
        np.savez(path / "model.npz", **{**archive, "weights": weights})  # type: ignore[arg-type]
        with pytest.raises(DataCorrupt, match="is not a saved model"):
            SavedModel.load(path)


def test_a_model_saved_from_a_users_folder_does_not_tell_where_it_lies(
    wards: dict[str, Any], tmp_path: Path
) -> None:
    given = build({"rounds": 1, "data": wards, "clients": {"count": 2}, "model": {"name": "linear"}})
    path, _ = run(given, tmp_path / "run")
    assert str(tmp_path).encode() not in (path / "model.npz").read_bytes()
    assert SavedModel.load(path).shape == (2,)


def test_a_damaged_or_missing_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match="no such model"):
        SavedModel.load(tmp_path)
    (tmp_path / "model.npz").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(DataCorrupt, match="is not a saved model"):
        SavedModel.load(tmp_path)


def test_predict_reads_a_users_table(wards: dict[str, Any], tmp_path: Path, cli: Cli) -> None:
    given = build(
        {"rounds": 3, "data": wards, "clients": {"count": 2}, "model": {"name": "linear"}, "trainer": {}}
    )
    path, summary = run(given, tmp_path / "run")
    scored = cli("predict", str(path))
    assert f"accuracy {summary['accuracy']['final']:.4f}" in scored.stdout
    (tmp_path / "new.csv").write_text("age,dose,ward\n90,0.5,a\n10,0.5,a\n")
    told = cli("predict", str(path), "new.csv")
    assert told.returncode == 0, told.stderr
    head, old, young = told.stdout.splitlines()
    assert head == "no,yes"
    assert float(old.split(",")[1]) > float(young.split(",")[1])
    cli("predict", str(path), "new.csv", "--out", "p.csv")
    assert (tmp_path / "p.csv").read_text() == told.stdout
    alone = cli("predict", str(path / "model.npz"))
    assert alone.returncode != 0
    assert "only a run folder tells" in alone.stderr
    lost = cli("predict", str(path), "new.csv", "--out", "no/such/folder.csv")
    assert lost.returncode != 0
    assert "--out 'no/such/folder.csv' cannot be written" in lost.stderr
    assert "Traceback" not in lost.stderr
    wrong = cli("predict", str(path), "nothing.csv")
    assert wrong.returncode != 0
    assert "nothing.csv" in wrong.stderr
    assert "Traceback" not in wrong.stderr
