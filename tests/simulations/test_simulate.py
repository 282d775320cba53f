"""Whole runs in one process: what they leave behind, what they refuse, how they resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import ray

from fed_dp.clients import app as client_app
from fed_dp.errors import EmptyRound, PartitionError, ResumeError, RunError
from fed_dp.experiment import Experiment, build
from fed_dp.experiment.federation import forget
from fed_dp.runs.folder import Line, RunFolder
from fed_dp.server.app import _UnderFlower
from fed_dp.server.observers import Silent
from fed_dp.simulations.runner import engine_for, simulate
from fed_dp.simulations.study import run_study, to_resume, variants_of
from tests.conftest import small

SUMMARY_KEYS = {
    "experiment",
    "digest",
    "data",
    "clients",
    "rounds",
    "accuracy",
    "seconds",
    "bytes",
    "privacy",
}
PRIVACY_KEYS = {
    "epsilon_total", "epsilon_per_round", "delta", "unit", "neighbours", "scope", "guarantee",
    "noise_source", "reason",
}  # fmt: skip


def run(experiment: Experiment, root: Path, **options: Any) -> tuple[Path, dict[str, Any]]:
    return simulate(experiment, observer=Silent(), engine="in-process", root=root, **options)


def weights(path: Path) -> bytes:
    found = RunFolder(path).latest()
    assert found is not None
    return found[1]["weights"].tobytes()


@pytest.mark.parametrize("kind", ["sgd", "psgd"])
def test_a_run_folder_holds_what_the_design_says(kind: str, tmp_path: Path) -> None:
    experiment = small(kind)
    path, summary = run(experiment, tmp_path)
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["digest"] == experiment.digest
    assert summary == json.loads((path / "summary.json").read_text())
    lines = [json.loads(text) for text in (path / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2]
    assert summary["accuracy"]["final"] == lines[-1]["accuracy"]
    assert summary["bytes"]["dense"] == 4 * summary["model"]["parameters"] * 4 * 2
    assert summary["bytes"]["uploaded"] == pytest.approx(summary["bytes"]["dense"], rel=0.05)
    if kind == "sgd":
        assert summary["privacy"] is None
    else:
        assert summary["privacy"].keys() >= PRIVACY_KEYS
        assert 3.9 < summary["privacy"]["epsilon_total"] <= 4.0
        assert summary["privacy"]["guarantee"] == "proved"
        assert lines[0]["epsilon"]["max"] < lines[1]["epsilon"]["max"] == summary["privacy"]["epsilon_total"]


@pytest.mark.parametrize(
    ("strategy", "clients", "expected"),
    [
        ({"name": "averaging"}, {}, "ray"),
        ({"name": "centralised"}, {}, "in-process"),
        ({"name": "standalone"}, {}, "ray"),
        ({"name": "dssgd"}, {}, "in-process"),
        ({"name": "dssgd", "exchange": "parallel"}, {}, "ray"),
        ({"name": "dssgd", "exchange": "free_running"}, {}, "ray"),
        ({"name": "dssgd"}, {"gpus": 1.0}, "ray"),
        ({"name": "averaging"}, {"count": 1}, "in-process"),
    ],
)
def test_where_a_run_goes_by_itself(strategy: dict[str, Any], clients: dict[str, Any], expected: str) -> None:
    experiment = small(strategy=strategy, clients={"count": 4, **clients})
    assert engine_for("auto", experiment) == expected
    assert engine_for("ray", experiment) == "ray"
    assert engine_for("in-process", experiment) == "in-process"


def test_the_same_seed_gives_the_same_result_and_another_does_not(tmp_path: Path) -> None:
    one, again, other = (weights(run(small("psgd", seed=s), tmp_path)[0]) for s in (3, 3, 4))
    assert one == again != other


def test_records_held_by_many_sites_pay_at_each(tmp_path: Path) -> None:
    disjoint = run(small("psgd"), tmp_path)[1]["privacy"]
    shared = small("psgd", data={"partition": {"name": "fraction", "fraction": 0.5}})
    overlapping = run(shared, tmp_path)[1]["privacy"]
    assert disjoint["sites_per_record"] == 1
    assert overlapping["sites_per_record"] == 4
    assert overlapping["epsilon_total"] > 1.5 * overlapping["epsilon_by_site"]["max"]
    assert "pays at each" in overlapping["scope"]


def test_a_fraction_of_the_clients_spends_only_where_it_trains(tmp_path: Path) -> None:
    experiment = small("psgd", clients={"count": 4, "fraction": 0.5}, rounds=3)
    path, summary = run(experiment, tmp_path)
    assert [line["clients"]["asked"] for line in RunFolder(path).lines()] == [2, 2, 2]
    assert summary["privacy"]["epsilon_by_site"]["min"] < summary["privacy"]["epsilon_by_site"]["max"] <= 4.0


@pytest.mark.parametrize("strategy", ["centralised", "standalone"])
def test_the_baselines_run(strategy: str, tmp_path: Path) -> None:
    path, summary = run(small(strategy={"name": strategy}, rounds=4), tmp_path)
    assert summary["clients"] == (1 if strategy == "centralised" else 4)
    assert summary["bytes"]["uploaded"] == 0
    lines = RunFolder(path).lines()
    assert lines[-1]["accuracy"] > lines[0]["accuracy"]


def test_sharing_a_tenth_in_turn_is_near_pooling_and_far_above_training_alone(tmp_path: Path) -> None:
    trainer = {"name": "sgd", "learning_rate": 0.2, "batch_size": 16}
    best = {}
    for name in ("centralised", "dssgd", "standalone"):
        experiment = small(rounds=25, clients={"count": 30}, trainer=trainer, strategy={"name": name})
        best[name] = run(experiment, tmp_path / name)[1]["accuracy"]["best"]
    assert best["dssgd"] > best["centralised"] - 0.02
    assert best["dssgd"] > best["standalone"] + 0.08


class StopAfter(Silent):
    """Die in round `last`, before or after its checkpoint."""

    def __init__(self, last: int, *, before: bool) -> None:
        self._last, self._before = last, before

    def checkpoint(self, folder: Path, done: int) -> None:
        if done == self._last and self._before:
            raise KeyboardInterrupt

    def round_done(self, line: Line) -> None:
        if line["round"] == self._last and not self._before:
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["sgd", "psgd"])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("last", "strategy"),
    [
        (1, {"name": "averaging"}),
        (2, {"name": "standalone"}),
        (1, {"name": "dssgd", "download_fraction": 0.3}),
        (2, {"name": "dssgd", "exchange": "asynchronous"}),
    ],
)
def test_an_interrupted_run_resumes_to_the_same_result(
    kind: str, before: bool, last: int, strategy: dict[str, Any], tmp_path: Path
) -> None:
    experiment = small(kind, rounds=3, strategy=strategy)
    whole, expected = run(experiment, tmp_path / "whole")
    folder = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        simulate(experiment, observer=StopAfter(last, before=before), engine="in-process", folder=folder)
    assert not (folder / "summary.json").exists()
    _, summary = run(experiment, tmp_path, folder=folder)
    assert weights(folder) == weights(whole)
    assert summary["accuracy"] == expected["accuracy"]
    assert summary["privacy"] == expected["privacy"]
    assert [line["round"] for line in RunFolder(folder).lines()] == [1, 2, 3]


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    folder, summary = run(small(), tmp_path)
    before = (folder / "metrics.jsonl").stat().st_mtime_ns
    assert run(small(), tmp_path, folder=folder)[1] == summary
    assert (folder / "metrics.jsonl").stat().st_mtime_ns == before
    (folder / "summary.json").write_text("{half")
    with pytest.raises(ResumeError, match=r"summary.json cannot be read"):
        run(small(), tmp_path, folder=folder)


def test_a_folder_of_another_experiment_is_not_resumed(tmp_path: Path) -> None:
    folder, _ = run(small(), tmp_path)
    with pytest.raises(ResumeError, match="another experiment"):
        run(small(rounds=9), tmp_path, folder=folder)


@pytest.mark.parametrize("harm", ["missing", "first line gone", "half a line", "no events", "no line"])
def test_a_run_whose_costs_are_lost_is_not_resumed(harm: str, tmp_path: Path) -> None:
    experiment, folder = small("psgd", rounds=3), tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        simulate(experiment, observer=StopAfter(2, before=False), engine="in-process", folder=folder)
    path = folder / "metrics.jsonl"
    first, second = path.read_text().splitlines(keepends=True)
    harmed = {
        "missing": "",
        "first line gone": second,
        "half a line": first[:50] + second,
        "no events": first + '{"round": 2}\n',
        "no line": first + "7\n",
    }
    path.write_text(harmed[harm])
    with pytest.raises(ResumeError, match="does not hold rounds 1 to 2"):
        run(experiment, tmp_path, folder=folder)


def test_a_run_is_not_resumed_on_other_records(tmp_path: Path) -> None:
    data, folder = tmp_path / "mine", tmp_path / "cut"
    data.mkdir()
    section = {"name": "folder", "path": str(data), "bounds": [0.0, 1.0], "classes": 2}
    experiment = small(data=section, model={"name": "linear"})
    x = np.random.default_rng(0).random((40, 3))
    np.savez(data / "train.npz", X=x, y=np.arange(40) % 2)
    with pytest.raises(KeyboardInterrupt):
        simulate(experiment, observer=StopAfter(1, before=False), engine="in-process", folder=folder)
    np.savez(data / "train.npz", X=x[::-1], y=np.arange(40) % 2)
    forget()
    with pytest.raises(ResumeError, match="data set has changed"):
        run(experiment, tmp_path, folder=folder)


def test_the_app_under_flower_does_not_resume_without_its_clients_state(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match="kept no state of its clients"):
        _UnderFlower().restore(tmp_path, 1)


def test_a_failing_client_is_counted_and_the_round_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = client_app.ClientData

    def fail(x: Any, y: Any, client: int, *rest: int) -> Any:
        if client == 2:
            raise ValueError("broken disk")
        return original(x, y, client, *rest)

    monkeypatch.setattr(client_app, "ClientData", fail)
    path, summary = run(small(), tmp_path)
    assert summary["failures"] == 2
    assert RunFolder(path).lines()[0]["failures"] == {"2": "ValueError: broken disk"}


def test_when_every_client_fails_the_run_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("no")

    monkeypatch.setattr(client_app, "ClientData", fail)
    with pytest.raises(EmptyRound, match="round 1: none of 4 clients uploaded; client 0: ValueError: no"):
        run(small(), tmp_path)


def test_what_cannot_be_divided_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(PartitionError, match="too few"):
        run(small(clients={"count": 5000}), tmp_path)
    with pytest.raises(PartitionError, match="no natural owner"):
        run(small(data={"partition": {"name": "natural"}}), tmp_path)
    broken = {"good": small(), "bad": small(clients={"count": 5000})}
    with pytest.raises(PartitionError, match="too few"):
        run_study("both", broken, observe=Silent, engine="ray", root=tmp_path)
    assert not ray.is_initialized()
    assert list(tmp_path.iterdir()) == []


def test_a_users_own_table_runs_with_its_natural_clients(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 10, (300, 2))
    table = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "ill": x.sum(1) > 10, "ward": rng.integers(0, 3, 300)})
    data = tmp_path / "mine"
    data.mkdir()
    table.to_csv(data / "train.csv", index=False)
    experiment = build(
        {
            "name": "mine",
            "rounds": 20,
            "data": {
                "name": "folder",
                "path": str(data),
                "label": "ill",
                "client": "ward",
                "bounds": [0.0, 10.0],
                "classes": ["False", "True"],
                "partition": "natural",
            },
            "model": {"name": "linear"},
            "clients": {"count": 3},
            "trainer": {"name": "sgd", "learning_rate": 0.5},
        }
    )
    _, summary = run(experiment, tmp_path / "runs")
    assert summary["accuracy"]["final"] > 0.9
    assert summary["auc"]["final"] > 0.95
    assert "held out" in summary["data"]["notes"][0]


def test_a_study_runs_its_variants_and_resumes_what_is_left(tmp_path: Path) -> None:
    variants = {"sgd": small(), "psgd": small("psgd"), "late": small(seed=8)}
    root = tmp_path / "runs"

    def stop() -> Silent:
        stops.append(StopAfter(1, before=False) if len(stops) == 1 else Silent())
        return stops[-1]

    stops: list[Silent] = []
    with pytest.raises(KeyboardInterrupt):
        run_study("both", variants, observe=stop, engine="in-process", root=root)
    folder = to_resume(root, variants)
    assert variants_of(folder) == ("both", variants)
    assert not (folder / "late").exists()  # it had not begun, but it is not forgotten
    with pytest.raises(ResumeError, match="no unfinished run"):
        to_resume(root, {"sgd": variants["sgd"]})  # a study is not a run of one of its variants
    path, summary = run_study(*variants_of(folder), observe=Silent, engine="in-process", folder=folder)
    assert set(summary["runs"]) == set(variants)
    assert path == folder
    assert summary["runs"]["psgd"]["privacy"]["guarantee"] == "proved"
    with pytest.raises(ResumeError, match="no unfinished run"):
        to_resume(root, variants)
    with pytest.raises(RunError, match="not a run folder"):
        variants_of(root)
    page = (path / "report.html").read_text()
    assert page.count('role="img"') == 2  # accuracy and ε by round
    for outside in ("src=", "http://", "https://"):
        assert outside not in page
    for text in ("no privacy", "proved", "total over the whole run", "seeded, not secure"):
        assert text in page
