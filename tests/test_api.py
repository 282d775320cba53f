"""fed_dp from Python: simulate, compare, load_model, and what a run came to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fed_dp
from fed_dp.errors import ConfigError, DataMissing, EmptyRound, FedDpError, ResumeError
from fed_dp.experiment import load_experiment
from fed_dp.server.observers import Silent
from fed_dp.simulations.runner import simulate

SMALL: dict[str, Any] = {"engine": "in-process", "rounds": 2, "clients": 3}


def test_the_defaults_of_an_experiment_are_those_of_a_file(tmp_path: Path) -> None:
    run = fed_dp.simulate(runs=tmp_path, **SMALL)
    assert run.experiment.trainer.name == "sgd"
    assert run.privacy is None
    assert run.epsilon is None
    assert "no privacy" in str(run)


def test_a_run_is_the_same_as_by_the_command_line(tmp_path: Path) -> None:
    run = fed_dp.simulate(
        "digits:psgd", settings=["clients.count=3"], rounds=2, engine="in-process", runs=tmp_path
    )
    experiment = load_experiment("digits:psgd", ["clients.count=3", "rounds=2"])
    assert run.experiment.digest == experiment.digest
    path, summary = simulate(experiment, observer=Silent(), engine="in-process", folder=tmp_path / "other")
    assert summary["accuracy"] == run.summary["accuracy"]
    assert np.array_equal(fed_dp.load_model(path).weights, run.saved_model.weights)


def test_what_a_run_came_to_can_be_read(tmp_path: Path) -> None:
    run = fed_dp.simulate(
        trainer=fed_dp.Psgd(sample_rate=0.25),
        privacy=fed_dp.Budget(epsilon=3, delta=1e-5),
        runs=tmp_path,
        **SMALL,
    )
    assert run.privacy is not None
    assert run.epsilon == run.privacy.epsilon_total
    assert 0 < run.privacy.epsilon_total <= 3
    assert str(run.privacy).startswith("privacy: total ε = ")
    assert list(run.history["round"]) == [1, 2]
    assert run.history["epsilon"].is_monotonic_increasing
    assert {"accuracy", "loss", "seconds", "clients_uploaded", "bytes_uploaded"} <= set(run.history.columns)
    assert run.report.is_file()
    assert isinstance(run.model, torch.nn.Module)
    assert run.scores["accuracy"] == run.summary["accuracy"]["final"]
    with pytest.raises(DataMissing):
        fed_dp.load_model(tmp_path / "absent")


def test_a_finished_folder_is_returned_and_that_of_another_experiment_refused(tmp_path: Path) -> None:
    first = fed_dp.simulate(folder=tmp_path / "run", **SMALL)
    again = fed_dp.simulate(folder=tmp_path / "run", **SMALL)
    assert again.summary == first.summary
    with pytest.raises(ResumeError, match="another experiment"):
        fed_dp.simulate(folder=tmp_path / "run", seed=9, **SMALL)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": 3}, "model = 3: expected a torch module, a factory of them, or a name"),
        ({"model": "resnet"}, "model.name = 'resnet': expected one of"),
        ({"trainer": object()}, "trainer = <object .*: expected a name, a table, or options"),
        ({"trainer": fed_dp.Psgd()}, "privacy.budget_epsilon is missing"),
        ({"privacy": fed_dp.Budget(3, 1e-5)}, "trainer.name = 'sgd' adds no noise"),
        ({"settings": ["round=3"]}, "round"),
        ({"track": ["wandb"]}, "track = 'wandb': expected 'tensorboard' or 'mlflow'"),
        ({"data": "imagenet"}, "data.name = 'imagenet'"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(
    options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(FedDpError, match=says) as raised:
        fed_dp.simulate(**{**SMALL, **options}, runs=tmp_path)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


class Failing(torch.nn.Module):
    """It works on the two records that it is tried on, and on no batch of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 5:
            raise ArithmeticError("of somebody's own")
        return self.layer(x.flatten(1))


@pytest.mark.parametrize("engine", ["in-process", pytest.param("ray", marks=pytest.mark.ray)])
def test_the_exception_of_a_client_is_shown_with_its_traceback(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(EmptyRound, match="ArithmeticError: of somebody's own") as raised:
        fed_dp.simulate(model=Failing, runs=tmp_path, **{**SMALL, "engine": engine})
    [note] = raised.value.__notes__
    assert 'raise ArithmeticError("of somebody' in note
    [folder] = tmp_path.iterdir()
    assert "test_api.py" in (folder / "failures.log").read_text()


def test_a_comparison_is_a_table(tmp_path: Path) -> None:
    found = fed_dp.compare(
        "compare-digits", epsilon=[8], seeds=1, only=["psgd"], settings=["rounds=3", "clients.count=2"],
        jobs=1, audit=False, runs=tmp_path,
    )  # fmt: skip
    assert found.report.is_file()
    assert "psgd" in set(found.table["mechanism"])


SCRIPT = """
import numpy as np
from torch import nn
import fed_dp

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
    def forward(self, x):
        return self.layer(x)

class Halved(fed_dp.Classification):
    name: str = "halved"
    def loss(self, outputs, targets):
        return super().loss(outputs, targets) / 2

if __name__ == "__main__":
    x = np.random.default_rng(0).normal(size=(120, 3))
    run = fed_dp.simulate(
        model=Net, task=Halved, data=fed_dp.Data.from_arrays(x, (x.sum(1) > 0).astype(int)),
        trainer=fed_dp.Psgd(sample_rate=0.5), privacy=fed_dp.Budget(8, 1e-5),
        clients=4, rounds=2, engine=ENGINE,
    )
    print(type(run.model).__name__, run.scores["accuracy"], run.experiment.digest)
"""


@pytest.mark.e2e
def test_classes_of_a_script_work_in_one_process_on_ray_and_typed_in(tmp_path: Path) -> None:
    """The same bits everywhere; typed in, there is no source to identify the classes by."""
    told = []
    for engine, typed_in in (("in-process", False), ("ray", False), ("in-process", True)):
        code = SCRIPT.replace("ENGINE", repr(engine))
        (tmp_path / "script.py").write_text(code)
        done = subprocess.run(
            [sys.executable, "-" if typed_in else "script.py"],
            input=code if typed_in else None,
            cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        told.append(done.stdout.split())
    assert told[0] == told[1]
    assert told[0][:2] == told[2][:2]
    assert told[0][0] == "Net"


def test_tensorboard_and_mlflow_get_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    run = fed_dp.simulate(runs=tmp_path / "runs", track=["tensorboard", "mlflow"], **SMALL)
    events = event_accumulator.EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [point.step for point in events.Scalars("accuracy")] == [1, 2]
    assert events.Scalars("accuracy")[-1].value == pytest.approx(run.scores["accuracy"])
    client = mlflow.MlflowClient()
    [kept] = client.search_runs([client.get_experiment_by_name("fed_dp").experiment_id])
    assert kept.data.metrics["accuracy"] == pytest.approx(run.scores["accuracy"])
    assert kept.data.params["trainer.name"] == "sgd"
    assert kept.info.status == "FINISHED"


def test_importing_it_imports_nothing_heavy() -> None:
    heavy = ("numpy", "torch", "flwr", "ray", "pandas", "pydantic")
    code = f"import fed_dp, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Sarah'"):
        fed_dp.Sarah  # noqa: B018
    with pytest.raises(ConfigError):
        fed_dp.simulate("nothing-of-this-name")
