"""Tasks: losses, scores, and which trainers learn what."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn
from torch import Tensor, nn
from torch.nn import functional

import fed_dp
from fed_dp import plugins, tasks
from fed_dp.clients.building import make_trainer
from fed_dp.errors import ConfigError, ModelError
from fed_dp.experiment import build
from fed_dp.experiment.federation import make_federation
from fed_dp.models.independence import BATCHES, check_independent, check_independent_loss

RNG = np.random.default_rng(0)
N, K = 400, 3
LOGITS = torch.from_numpy(RNG.normal(size=(N, K)).astype(np.float32))
LABELS = torch.from_numpy((RNG.random((N, K)) < LOGITS.sigmoid().numpy()).astype(np.float32))
PRIVACY = {"budget_epsilon": 8.0, "delta": 1e-5}
TARGETS = {
    "classification": lambda x: x.sum(1).round().clip(0, 3).astype(int),
    "binary": lambda x: (x.sum(1) > 0).astype(int),
    "multilabel": lambda x: (x[:, :3] > 0).astype(int),
    "regression": lambda x: np.tanh(x[:, :2]) * 20,
}


def test_class_weights_multiply_each_records_loss() -> None:
    y = torch.arange(N) % K
    outputs = LOGITS.log_softmax(1)
    weighted = tasks.Classification(class_weights=(1.0, 2.0, 5.0)).loss(outputs, y)
    plain = tasks.Classification().loss(outputs, y)
    assert torch.allclose(weighted, plain * torch.tensor([1.0, 2.0, 5.0])[y])
    assert torch.allclose(plain.mean(), functional.nll_loss(outputs, y))


def test_binary_scores_are_scikit_learns() -> None:
    outputs, y = LOGITS[:, :2].log_softmax(1), LABELS[:, 0].long()
    found = tasks.Binary(specificity=0.8).scores(outputs, y)
    ranks = (outputs[:, 1] - outputs[:, 0]).numpy()
    assert found["auc"] == pytest.approx(sklearn.roc_auc_score(y, ranks))
    assert found["average_precision"] == pytest.approx(sklearn.average_precision_score(y, ranks))
    # The threshold of a specificity of at least .8 with the most sensitivity, by trying all.
    best = max(
        float((ranks[y == 1] >= t).mean())
        for t in [*ranks, np.inf]
        if float((ranks[y == 0] < t).mean()) >= 0.8
    )
    assert found["sensitivity"] == pytest.approx(best)


def test_multilabel_loss_and_scores() -> None:
    task = tasks.MultiLabel()
    expected = functional.binary_cross_entropy_with_logits(LOGITS, LABELS, reduction="none").mean(1)
    assert torch.allclose(task.loss(LOGITS, LABELS), expected)
    found = task.scores(LOGITS, LABELS)
    assert found["auc"] == pytest.approx(sklearn.roc_auc_score(LABELS, LOGITS, average="macro"))
    assert found["exact"] == pytest.approx(float(((LOGITS > 0) == (LABELS > 0)).all(1).double().mean()))
    constant = LABELS.clone()
    constant[:, 0] = 1  # a label that all have is not ranked
    ranked = [sklearn.roc_auc_score(LABELS[:, k], LOGITS[:, k]) for k in (1, 2)]
    assert task.scores(LOGITS, constant)["auc"] == pytest.approx(np.mean(ranked))


def test_regression_is_on_the_targets_own_scale() -> None:
    task, y = tasks.Regression(bounds=(10.0, 30.0)), torch.tensor([[10.0], [20.0], [45.0]])
    outputs = torch.tensor([[-1.0], [0.5], [1.0]])
    assert task.predictions(outputs).ravel().tolist() == [10, 25, 30]
    assert task.loss(outputs, y).tolist() == pytest.approx([0, 0.125, 0])  # 45 is cut to 30
    found = task.scores(outputs, y)
    assert found["rmse"] == pytest.approx(np.sqrt((25 + 225) / 3))
    assert found["r2"] == pytest.approx(sklearn.r2_score(y, task.predictions(outputs)))
    assert np.abs(task.unit_targets(np.array([[5.0, 30.0]]))).tolist() == [pytest.approx([2**-0.5] * 2)]


@pytest.mark.parametrize("name", [name for name in plugins.names("task") if name != "classification"])
@pytest.mark.parametrize(
    ("model", "trainer", "strategy"),
    [
        ("linear", fed_dp.Sgd(learning_rate=0.5), fed_dp.Averaging()),
        ("linear", fed_dp.Sgd(learning_rate=0.5), fed_dp.Dssgd(upload_fraction=0.5)),
        ("linear", fed_dp.Psgd(sample_rate=0.25, learning_rate=0.5), fed_dp.Averaging()),
        ("linear", fed_dp.Psgd(sample_rate=0.25, learning_rate=0.05, optimizer="adam"), fed_dp.Averaging()),
        ({"name": "random-features", "features": 60, "gamma": 0.5}, fed_dp.Dpa(), fed_dp.Statistics()),
        ({"name": "random-features", "features": 60, "gamma": 0.5}, fed_dp.Dpa(), fed_dp.Averaging()),
    ],
    ids=["sgd", "dssgd", "psgd", "psgd adam", "statistics", "dpa averaged"],
)
def test_every_task_is_learnt_better_than_by_chance(
    name: str, model: Any, trainer: Any, strategy: Any, tmp_path: Path
) -> None:
    x = np.random.default_rng(1).normal(size=(1200, 4)).astype(np.float32)
    task: Any = fed_dp.Regression(bounds=(-20.0, 20.0)) if name == "regression" else name
    run = fed_dp.simulate(
        data=fed_dp.Data.from_arrays(x, TARGETS[name](x)),
        task=task,
        model=model,
        trainer=trainer,
        strategy=strategy,
        privacy=None if isinstance(trainer, fed_dp.Sgd) else fed_dp.Privacy(**PRIVACY),
        clients=3,
        rounds=4,
        engine="in-process",
        runs=tmp_path,
    )
    leading = next(iter(run.scores))
    assert leading == ("rmse" if name == "regression" else "auc")
    if name == "regression":
        assert run.scores["r2"] > 0.3
        assert run.summary["scores"]["rmse"]["best"] == min(run.history["rmse"])
    else:
        assert run.scores["auc"] > 0.8
    label = next(metric.label for metric in run.experiment.task.metrics if metric.name == leading)
    assert label in run.report.read_text()


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"task": "ranking"}, "task.name = 'ranking': expected one of 'binary', 'classification'"),
        ({"task": {"name": "classification", "class_weights": [1.0, 0.0]}}, "task.class_weights"),
        (
            {"task": {"name": "regression", "bounds": [3.0, 1.0]}},
            r"task.bounds = \[3.0, 1.0\]: expected low < high",
        ),
        (
            {"task": "regression", "trainer": {"name": "svm", "perturb": False}, "model": {"name": "rbf"}},
            "'regression': trainer.name = 'svm' learns no .*; allowed with trainer.name = 'dpa', 'pcdbn'",
        ),
        (
            {
                "task": {"name": "classification", "class_weights": [1.0, 2.0]},
                "trainer": {"name": "dpa", "perturb": False},
                "model": {"name": "unit-linear"},
            },
            "does not minimise a loss of the task's own",
        ),
        (
            {
                "task": "regression",
                "trainer": {"name": "dpa", "perturb": False},
                "model": {"name": "unit-linear"},
            },
            "task.bounds is missing: trainer.name = 'dpa' adds up targets",
        ),
        (
            {
                "task": "multilabel",
                "trainer": {"name": "dpa", "perturb": False},
                "model": {"name": "auto-encoder"},
            },
            "as in its paper, which learns classes",
        ),
        (
            {"trainer": {"name": "sgd", "optimizer": "adam", "momentum": 0.5}},
            "trainer.momentum = 0.5: trainer.optim",
        ),
        (
            {"trainer": {"name": "sgd", "optimizer": "adamw", "update_fraction": 0.5}},
            "selective SGD takes SGD's own",
        ),
        ({"trainer": {"name": "sgd", "optimizer": "lion"}}, "trainer.optimizer = 'lion'"),
    ],
)
def test_a_task_that_a_trainer_cannot_learn_is_refused_by_name(tables: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(tables)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("regression", "task.name = 'regression' takes one or several numbers .*; digits has one class"),
        ("binary", "task.name = 'binary': the data has 10 classes; expected 2"),
        ({"name": "classification", "class_weights": [1.0, 2.0]}, "expected one for each of 10 classes"),
    ],
)
def test_targets_of_another_task_are_refused(task: Any, says: str) -> None:
    experiment = build({"task": task, "model": {"name": "linear"}})
    with pytest.raises(ConfigError, match=says):
        make_trainer(experiment, make_federation(experiment).dataset)


class Focal(tasks.Classification):
    """A loss of somebody's own, and a metric."""

    name: str = "focal"  # type: ignore[assignment]
    metrics: ClassVar[tuple[tasks.Metric, ...]] = (
        tasks.Metric("mistakes", "share of mistakes", higher_is_better=False),
    )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        chosen = outputs.gather(1, targets[:, None])[:, 0]
        return -((1 - chosen.exp()) ** 2) * chosen

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        return {"mistakes": float((outputs.argmax(1) != targets).double().mean())}


class Centred(Focal):
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().loss(outputs - outputs.mean(0), targets)


class Mined(Focal):
    """Hard examples alone, of batches that are large."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        each = super().loss(outputs, targets)
        return each * (each >= each.topk(min(64, len(each))).values.min())


class Detached(Focal):
    """The values are each record's own, the gradients are not."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        each = super().loss(outputs, targets)
        return each - each.mean() + each.mean().detach()


class Summed(Focal):
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().loss(outputs, targets).sum()


class Scoreless(Focal):
    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        return {"other": 1.0}


@pytest.mark.parametrize("engine", ["in-process"])
def test_an_own_loss_and_metric_are_trained_and_told_everywhere(engine: Any, tmp_path: Path) -> None:
    run = fed_dp.simulate(
        task=Focal,
        trainer=fed_dp.Psgd(sample_rate=0.25, learning_rate=2.0),
        privacy=fed_dp.Budget(8, 1e-5),
        model="linear",
        clients=2,
        rounds=3,
        engine=engine,
        runs=tmp_path,
    )
    assert run.scores.keys() == {"mistakes"}
    assert run.summary["scores"]["mistakes"]["best"] == min(run.history["mistakes"])
    assert "share of mistakes" in run.report.read_text()
    assert "share of mistakes" in str(run)
    assert not isinstance(run.experiment.task, type)
    assert run.experiment.task.name == "tests.test_tasks:Focal"


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (Centred, "depends on the other records"),
        (Mined, "depends on the other records"),
        (Detached, "depends on the other records"),
        (Summed, r"returned \(\)"),
    ],
)
def test_a_loss_that_mixes_records_is_refused_before_anything_private_is_trained(
    task: Any, says: str
) -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(dim=1))
    check_independent_loss(Focal(), network, (4,), 3)
    with pytest.raises(ModelError, match=says):
        check_independent_loss(task(), network, (4,), 3)
    assert max(BATCHES) > 2
    with pytest.raises(ModelError, match=says):
        fed_dp.simulate(
            task=task,
            trainer=fed_dp.Psgd(sample_rate=0.25),
            privacy=fed_dp.Budget(8, 1e-5),
            model="linear",
            clients=2,
            rounds=1,
            engine="in-process",
        )


def test_a_loss_is_tried_beside_a_head_of_zeros() -> None:
    head = nn.Linear(4, 3)
    nn.init.zeros_(head.weight), nn.init.zeros_(head.bias)
    with pytest.raises(ModelError, match="depends on the other records"):
        check_independent_loss(Centred(), nn.Sequential(head, nn.LogSoftmax(dim=1)), (4,), 3)


class Gated(nn.Module):
    """Nothing of the branch that mixes records is seen before its gate has been learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Parameter(torch.zeros(1)), nn.Linear(4, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.gate * (x - x.mean(0))).log_softmax(1)


def test_a_branch_that_mixes_records_behind_a_gate_is_found() -> None:
    with pytest.raises(ModelError, match="depends on the other records"):
        check_independent(Gated(), (4,), name="gated")


def test_scores_that_are_none_of_the_metrics_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"scores\(\) returned \['other'\], expected some of \['mistakes'\]"):
        fed_dp.simulate(task=Scoreless, clients=2, rounds=1, engine="in-process", runs=tmp_path)
