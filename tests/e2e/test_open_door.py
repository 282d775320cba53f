"""The command line for what is one's own, light installs, and what sites allow of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fed_dp
from fed_dp.cli.compare import experiment_names
from fed_dp.clients.site_file import SiteFile
from fed_dp.clients.trainer import Fit
from fed_dp.errors import SiteRefused
from fed_dp.experiment import build, shipped
from fed_dp.experiment.json_schema import json_schema
from fed_dp.experiment.source import profile, read_tables, variants
from tests.conftest import in_process
from tests.networks import Pooled
from tests.test_plugins import install

FAST: dict[str, Any] = {"engine": "in-process", "rounds": 1, "clients": 2, "model": "linear"}


def test_the_schema_accepts_every_shipped_experiment_and_refuses_what_is_wrong() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json_schema()
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    for name in shipped():
        tables = json.loads(json.dumps(read_tables(name)))
        assert [error.message for error in validator.iter_errors(tables)] == [], name
        for variant, table in variants(profile(read_tables(name))).items():
            assert validator.is_valid(json.loads(json.dumps(table))), (name, variant)
    for wrong in (
        {"round": 3},
        {"rounds": 0},
        {"trainer": {"name": "psgd", "clip": -1.0}},
        {"clients": {"cuont": 2}},
    ):
        assert not validator.is_valid(wrong), wrong


def test_the_schema_is_printed_or_written(tmp_path: Path) -> None:
    done = in_process(tmp_path, "schema", str(tmp_path / "schema.json"))
    assert done.returncode == 0
    assert json.loads((tmp_path / "schema.json").read_text())["title"] == "fed_dp experiment"
    assert in_process(tmp_path, "schema", str(tmp_path / "no" / "such" / "schema.json")).returncode == 2


def test_experiments_are_completed_by_name_and_variant() -> None:
    assert set(experiment_names("")) == set(shipped())
    assert "digits:psgd" in experiment_names("digits:")
    assert experiment_names("nothing") == []


def test_help_shows_what_arguments_are(tmp_path: Path) -> None:
    told = in_process(tmp_path, "predict", "--help").stdout
    assert "A finished run's folder, or the model.npz in it." in told
    assert "\\[" not in told


def test_a_section_for_a_folder_is_proposed(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", X=np.zeros((4, 2)), y=np.array([0, 1, 0, 1]))
    done = in_process(tmp_path, "data", "describe", str(tmp_path))
    assert "bounds = [LOW, HIGH]" in done.stdout
    assert in_process(tmp_path, "data", "describe", str(tmp_path / "absent")).returncode == 1


@pytest.mark.parametrize(
    ("option", "name"), [((), "model.pt"), (("--torch-export",), "model.pt2"), (("--onnx",), "model.onnx")]
)
def test_an_exported_model_says_what_the_run_scored(
    option: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    if name.endswith("onnx"):
        pytest.importorskip("onnx")
        pytest.importorskip("onnxscript")
    run = fed_dp.simulate(runs=tmp_path / "runs", **FAST)
    out = tmp_path / name
    done = in_process(tmp_path, "export", str(run.folder), str(out), *option)
    assert done.returncode == 0, done.stderr
    x = torch.randn(5, 1, 8, 8)
    expected = run.model(x).detach().numpy()
    if name == "model.pt":
        module = run.model
        torch.nn.init.zeros_(next(module.parameters()))
        module.load_state_dict(torch.load(out, weights_only=True))
        found = module(x).detach().numpy()
    elif name == "model.pt2":
        found = torch.export.load(out).module()(x).detach().numpy()
    else:
        reference = pytest.importorskip("onnx.reference")
        evaluator = reference.ReferenceEvaluator(str(out))
        [found] = evaluator.run(None, {evaluator.input_names[0]: x.numpy()})
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("export", "/nowhere", "x.pt"), "/nowhere: no such model"),
        (("export", "RUN", "/no/such/folder/x.pt"), "cannot be written"),
        (("export", "RUN", "x.pt", "--onnx", "--torch-export"), "expected one of them"),
        (("conformance", "nothing"), "trainer.name = 'nothing': expected one of"),
        (("conformance", "tests.networks:Flat"), "is not a class derived from Section"),
        (("simulate", "digits:psgd", "--track", "wandb"), "track = 'wandb'"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    if "RUN" in arguments:
        run = str(fed_dp.simulate(runs=tmp_path / "runs", **FAST).folder)
        arguments = tuple(run if each == "RUN" else each for each in arguments)
    done = in_process(tmp_path, *arguments)
    assert done.returncode in (1, 2)
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_trainer_that_does_not_conform_is_found(tmp_path: Path) -> None:
    done = in_process(tmp_path, "conformance", "tests.e2e.test_open_door:Careless", "--trials", "0", "--json")
    assert done.returncode == 1
    failed = {each["check"]: each["why"] for each in json.loads(done.stdout)["checks"] if not each["passed"]}
    assert "the same place gives the same bytes in a used and in a fresh trainer" in failed
    assert "neither the weights nor the records are touched" in failed


class Careless(fed_dp.TrainerOptions):
    """A trainer that forgets where it is, and changes what it is given."""

    name: str = "careless"

    def build(self, experiment: Any, net: Any, plan: Any) -> Any:
        return CarelessTrainer()


class CarelessTrainer:
    is_private = False

    def fit(self, weights: Any, data: Any, state: Any) -> Fit:
        weights += 1
        return Fit(np.random.default_rng().normal(size=weights.size).astype(np.float32))


def test_a_plug_in_that_raises_while_it_is_loaded_is_named_and_harms_no_other(tmp_path: Path) -> None:
    install(tmp_path, "broken_plugin", "[fed_dp.trainers]\nbroken = broken_plugin:Trainer\n", "1 / 0\n")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "fed_dp.cli", *arguments],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    listed = run("plugins")
    assert listed.returncode == 1
    assert "broken_plugin:Trainer cannot be imported (ZeroDivisionError" in listed.stderr
    named = run("simulate", "digits:psgd", "-s", "trainer.name=broken")
    assert named.returncode == 2
    assert (
        "trainer.name = 'broken': broken_plugin:Trainer cannot be imported (ZeroDivisionError" in named.stderr
    )
    assert len(named.stderr.splitlines()) == 1
    assert (
        run(
            "simulate",
            "digits:psgd",
            "-s",
            "rounds=1",
            "-s",
            "clients.count=2",
            "--quiet",
            "--engine",
            "in-process",
        ).returncode
        == 0
    )


WITHOUT = """
import sys
for name in ("ray", "matplotlib", "tensorboard", "mlflow"):
    sys.modules[name] = None
import fed_dp, fed_dp.deploy.supernode, fed_dp.deploy.preload
run = fed_dp.simulate(clients=2, rounds=1)
print(run.report.is_file())
for options in ({"engine": "ray"}, {"track": ["tensorboard"]}, {"track": ["mlflow"]}):
    try:
        fed_dp.simulate(clients=2, rounds=1, **options)
    except fed_dp.errors.ConfigError as error:
        print(error)
try:
    fed_dp.compare("compare-digits")
except fed_dp.errors.ConfigError as error:
    print(error)
"""


@pytest.mark.e2e
def test_a_site_and_a_simulation_in_one_process_need_no_extra(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import fed_dp.errors\n" + WITHOUT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "True"
    extras = ("simulation", "tensorboard", "mlflow", "report")
    for line, extra in zip(lines[1:], extras, strict=True):
        assert f"needs the extra: pip install 'fed-dp[{extra}]'" in line


# --------------------------------------------------------------------------------------- sites


def site(**more: Any) -> SiteFile:
    return SiteFile(client=0, **more)


OWN = {"model": {"factory": "tests.networks:Flat"}}


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        (OWN, "model.factory = 'tests.networks:Flat' is not a part of fed_dp"),
        (
            {"trainer": {"name": "tests.e2e.test_open_door:Careless"}},
            "trainer.name = 'tests.e2e.test_open_door:Careless' is",
        ),
        ({"task": {"name": "tests.test_tasks:Focal"}}, "task.name = 'tests.test_tasks:Focal' is not a part"),
        ({"task": "tests.test_tasks:Focal"}, "task.name = 'tests.test_tasks:Focal' is not a part"),
        ({"data": {"loader": "os:getcwd"}}, "data.loader = 'os:getcwd' is not a part of fed_dp"),
        ({"model": {"name": ["linear"]}}, r"model.name = \['linear'\] is not a part"),
        (
            {"model": {"name": "frozen-linear", "weights": "/etc/passwd"}},
            "model.sha256 = None is no file that this site",
        ),
    ],
)
def test_a_site_runs_no_code_and_opens_no_file_that_its_own_file_does_not_name(
    tables: dict[str, Any], says: str
) -> None:
    with pytest.raises(SiteRefused, match=says):
        site().permit_code(tables)


def test_what_a_sites_file_names_is_that_alone() -> None:
    allowing = site(allow={"plugins": ["tests.networks:Flat", "pkg:load"]})
    for tables, says in (
        (
            {"model": {"name": "sgd"}},
            "model.name = 'sgd' is not a part",
        ),  # of another package, called as a trainer
        ({"data": {"loader": "pkg:load", "options": {"path": "/etc/hostname"}}}, "and never to read records"),
        ({"model": {"factory": "tests.networks:Flat", "options": {"path": "/etc/hostname"}}}, "numbers and"),
        ({"model": {"factory": "tests.networks:Flat", "options": "x"}}, "numbers and"),
    ):
        with pytest.raises(SiteRefused, match=says):
            allowing.permit_code(tables)


def test_messages_and_ledgers_import_no_other_package(tmp_path: Path) -> None:
    points = "[fed_dp.models]\nzzz = evil_plugin:Net\n[fed_dp.trainers]\nzzz = evil_plugin:T\n"
    install(tmp_path, "evil_plugin", points, "print('IMPORTED')\n")
    code = (
        "from fed_dp.experiment import build; from fed_dp.errors import ConfigError\n"
        "from fed_dp.accounting.events import event_of, Event; from fed_dp.accounting import Laplace\n"
        "event_of(Event(Laplace(1.0), 'sparse_vector', 1, 0, 'secure').tables())\n"
        "for tables in ({'trainer': {'name': 'dpa', 'perturb': False}}, {'task': 'regression', 'trainer': "
        "{'name': 'svm'}}, {'privacy': {'budget_epsilon': 1.0}}, {'strategy': {'name': 'statistics'}}):\n"
        "    try: build(tables)\n"
        "    except ConfigError: print('refused')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["refused"] * 4


def test_a_site_runs_what_its_own_file_names(tmp_path: Path) -> None:
    allowing = site(allow={"plugins": ["tests.networks:Flat", "tests.networks:Pooled", "pkg:Trainer"]})
    allowing.permit_code(build(OWN).tables())
    with pytest.raises(SiteRefused, match="registered under a name"):
        allowing.permit_code({"trainer": {"name": "pkg:Trainer"}})
    torch.save(Pooled().state_dict(), tmp_path / "encoder.pt")
    model = {
        "name": "frozen-linear",
        "weights": str(tmp_path / "encoder.pt"),
        "factory": "tests.networks:Pooled",
    }
    tables = build({"model": model}).tables()
    tables["model"]["weights"] = "/elsewhere/at/the/server.pt"
    with pytest.raises(SiteRefused, match="is no file that this site names"):
        allowing.permit_code(tables)
    there = allowing.model_copy(update={"encoders": (str(tmp_path / "encoder.pt"),)})
    there.permit_code(tables)
    assert build(tables).network((1, 8, 8), 10).build() is not None
