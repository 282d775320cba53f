"""Networks of the user's own: what comes in, and what is refused in one line that names what and where."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fed_dp
from fed_dp import plugins
from fed_dp.clients.building import make_trainer
from fed_dp.errors import ConfigError, FedDpError, ModelError
from fed_dp.experiment import Experiment, build
from fed_dp.experiment.federation import make_federation
from fed_dp.models import FlatNetwork
from fed_dp.models.networks.pretrained import _loaded
from tests.networks import Flat, Pooled

PRIVATE = {
    "trainer": {"name": "psgd", "sample_rate": 0.5},
    "privacy": {"budget_epsilon": 4.0, "delta": 1e-5},
}


class Two(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(64, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x.flatten(1)).relu())


class Changed(Two):
    """Two, with something wrong."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong = wrong
        self.norm = nn.BatchNorm1d(4) if wrong == "batch norm" else nn.Identity()
        if wrong == "unused":
            self.extra = nn.Linear(2, 2)
        if wrong == "double":
            self.double()
        if wrong == "outputs":
            self.out = nn.Linear(4, 7)
        if wrong == "frozen":
            self.requires_grad_(False)
        if wrong == "raises":
            raise RuntimeError("no such width")

    def forward(self, x: Tensor) -> Any:
        h = self.norm(self.layer(x.flatten(1)).relu())
        if self.wrong == "mixes":
            h = h - h.mean(0)
        outputs = self.out(h)
        if self.wrong == "dictionary":
            return {"logits": outputs}
        return outputs.sum() if self.wrong == "scalar" else outputs


def not_a_module() -> int:
    return 3


def experiment(model: dict[str, Any], **tables: Any) -> Experiment:
    return build({"clients": {"count": 2}, "model": model, **tables})


def trained(model: dict[str, Any], **tables: Any) -> FlatNetwork:
    given = experiment(model, **tables)
    return make_trainer(given, make_federation(given).dataset)[1]


HERE = "tests.models.test_own"


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"factory": "nowhere.nets:Two"}, "there is no module 'nowhere'"),
        ({"factory": f"{HERE}:Three"}, f"{HERE} has no 'Three'"),
        ({"factory": "Two"}, r"model.factory = 'Two': expected an import path, package.module:name"),
        ({"factory": f"{HERE}:not_a_module"}, "returned int: expected a torch nn.Module"),
        ({"factory": f"{HERE}:HERE"}, "expected a function or a class"),
        (
            {"factory": f"{HERE}:Two", "options": {"depth": 2}},
            "with model.options = {'depth': 2} failed: TypeErr",
        ),
        (
            {"factory": f"{HERE}:Changed", "options": {"wrong": "raises"}},
            "failed: RuntimeError: no such width",
        ),
        ({"factory": f"{HERE}:Changed", "options": {"wrong": "outputs"}}, "has 7 outputs: the data needs 10"),
        ({"factory": f"{HERE}:Changed", "options": {"wrong": "dictionary"}}, "returned dict for 2 records"),
        ({"factory": f"{HERE}:Changed", "options": {"wrong": "scalar"}}, r"returned \(\) for 2 records"),
        (
            {"factory": f"{HERE}:Changed", "options": {"wrong": "unused"}},
            "parameter 'extra.weight' has no grad",
        ),
        (
            {"factory": f"{HERE}:Changed", "options": {"wrong": "double"}},
            "is torch.float64, expected float32",
        ),
        ({"factory": f"{HERE}:Changed", "options": {"wrong": "frozen"}}, "has no parameters to train"),
        (
            {"factory": f"{HERE}:Changed", "options": {"wrong": "batch norm"}},
            "buffer 'norm.running_mean' changes",
        ),
        ({"factory": f"{HERE}:Two", "outputs": "log-probabilities"}, "no log-probabilities"),
        ({"factory": f"{HERE}:Two", "code": "sha256:0"}, "model.code = 'sha256:0': the code of"),
        ({"factory": f"{HERE}:Two", "outputs": "odds"}, "model.outputs = 'odds'"),
    ],
)
def test_what_is_no_network_of_this_data_is_refused_in_one_line(model: dict[str, Any], says: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=says) as raised:
        trained(model)
    assert "\n" not in str(raised.value)


def test_a_module_that_raises_while_it_is_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_nets.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"broken_nets cannot be imported \(ZeroDivisionError"):
        experiment({"factory": "broken_nets:Net"})


def test_a_network_that_mixes_records_is_trained_without_privacy_and_refused_with_it() -> None:
    model = {"factory": f"{HERE}:Changed", "options": {"wrong": "mixes"}}
    trained(model)
    with pytest.raises(ModelError, match="depends on the other records of its batch: no guarantee"):
        trained(model, **PRIVATE)


def test_the_code_of_a_factory_is_a_part_of_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    (tmp_path / "changing_nets.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    first = experiment({"factory": "changing_nets:net"})
    assert build(first.tables()).digest == first.digest
    (tmp_path / "changing_nets.py").write_text(source + "# another line\n")
    sys.modules.pop("changing_nets")
    assert experiment({"factory": "changing_nets:net"}).digest != first.digest
    with pytest.raises(ConfigError, match=r"model.code = .* the code of 'changing_nets:net' is"):
        build(first.tables())


@pytest.mark.parametrize(
    "model", [Two, Two(3), lambda classes: nn.Sequential(nn.Flatten(), nn.Linear(64, classes))]
)
def test_a_class_a_module_or_a_function_from_python_is_trained_and_given_back(
    model: Any, tmp_path: Path
) -> None:
    run = fed_dp.simulate(model=model, clients=2, rounds=2, engine="in-process", runs=tmp_path)
    found = run.model
    expected = model if isinstance(model, nn.Module) else model() if model is Two else model(10)
    assert type(found) is type(expected)
    assert found.state_dict().keys() == expected.state_dict().keys()
    data = make_federation(run.experiment).dataset
    with torch.no_grad():
        classes = found(torch.from_numpy(data.inputs(data.test))).argmax(1).numpy()
    assert (classes == data.test.y).mean() == pytest.approx(run.scores["accuracy"])


def test_one_logit_stands_for_two_classes(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(200, 3))
    data = fed_dp.Data.from_arrays(x, (x.sum(1) > 0).astype(int))
    run = fed_dp.simulate(
        model=lambda: nn.Linear(3, 1),
        data=data,
        task="binary",
        clients=2,
        rounds=5,
        engine="in-process",
        runs=tmp_path,
    )
    assert run.scores["auc"] > 0.9


def test_what_is_frozen_is_made_anew_and_does_not_travel() -> None:
    def partly() -> nn.Module:
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10))
        module[1].requires_grad_(False)
        return module

    plugins.share("shared:partly", partly)
    one, two = (trained({"factory": "shared:partly"}) for _ in range(2))
    assert one.size == 8 * 10 + 10
    assert torch.equal(*(dict(net.network.named_buffers())["0.1.weight"] for net in (one, two)))


# --------------------------------------------------------------------------------- pre-trained


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    torch.save(Pooled().state_dict(), tmp_path / "encoder.pt")
    return tmp_path / "encoder.pt"


def pretrained(weights: Path, **more: Any) -> dict[str, Any]:
    return {"name": "frozen-linear", "weights": str(weights), "factory": "tests.networks:Pooled", **more}


def test_frozen_weights_are_pinned_by_their_hash_and_no_part_of_the_model(weights: Path) -> None:
    given = experiment(pretrained(weights), **PRIVATE)
    assert len(given.tables()["model"]["sha256"]) == 64
    assert trained(pretrained(weights), **PRIVATE).size == 36 * 10 + 10
    torch.save(Pooled().state_dict(), weights)  # others
    _loaded.cache_clear()  # as in another process
    with pytest.raises(ModelError, match=r"has the SHA-256 .* the experiment says"):
        given.network((1, 8, 8), 10).build()


def test_torchscript_needs_no_code(weights: Path, tmp_path: Path) -> None:
    path = tmp_path / "scripted.pt"
    with warnings.catch_warnings():  # torch advises to export in another way
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(Pooled().eval(), torch.zeros(2, 1, 8, 8)).save(path)
    assert trained({"name": "frozen-linear", "weights": str(path)}, **PRIVATE).size == 370


@pytest.mark.parametrize("name", ["frozen-linear", "frozen-encoder"])
def test_running_statistics_of_a_frozen_encoder_do_not_mix_records(name: str, weights: Path) -> None:
    statistics = {
        "trainer": {"name": "dpa"},
        "strategy": {"name": "statistics"},
        "privacy": PRIVATE["privacy"],
    }
    trained({**pretrained(weights), "name": name}, **(PRIVATE if name == "frozen-linear" else statistics))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weights": "/nowhere.pt"}, "model.weights = '/nowhere.pt' cannot be read: No such file"),
        ({"factory": None}, r"is not a TorchScript file"),
        (
            {"factory": "tests.networks:Flat"},
            "is not a state_dict of tests.networks:Flat: Error.* in loading",
        ),
        ({"factory": "tests.networks:options_of"}, "is not a state_dict of"),
        ({"sha256": "0" * 64}, "the experiment says 000"),
        ({"sha256": "short"}, "model.sha256 = 'short'"),
        ({"options": {"channels": 3}}, "is not a state_dict of"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(change: dict[str, Any], says: str, weights: Path) -> None:
    table = {key: value for key, value in {**pretrained(weights), **change}.items() if value is not None}
    with pytest.raises(FedDpError, match=says) as raised:
        trained(table)
    assert "\n" not in str(raised.value)
    assert re.search(r"model\.\w+", str(raised.value))


def test_an_own_network_has_the_shape_and_the_classes_it_asks_for() -> None:
    assert trained({"factory": "tests.networks:Flat"}).size == 650
    assert isinstance(Flat(), nn.Module)
