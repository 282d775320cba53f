"""Tasks: what a network's outputs mean, the loss of each record, and the scores that a model is told by.

A task is the key `task` of an experiment: a name, or a table with a name and options. Its class is registered
under the entry point `fed_dp.tasks`, or named by its import path. One of somebody's own derives from `Task`
and writes out `loss` and `scores`:

    class Focal(fed_dp.tasks.Classification):
        def loss(self, outputs, targets):
            chosen = outputs.gather(1, targets[:, None])[:, 0]
            return -((1 - chosen.exp()) ** 2) * chosen

A record's loss must not depend on any other record: a guarantee for one record rests on that, and it is
checked before anything private is trained.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fed_dp.errors import ConfigError
from fed_dp.options import Positive, Section

if TYPE_CHECKING:
    from torch import Tensor

# What stands beside each record: one class of several; labels of which each holds or not; numbers.
Targets = Literal["class", "labels", "numbers"]
TARGET_WORDS: Mapping[Targets, str] = {
    "class": "one class for each record",
    "labels": "a row of zeros and ones for each record",
    "numbers": "one or several numbers for each record",
}
MAX_TARGET = 1e30  # beyond it, losses could overflow for some records and not for others


@dataclass(frozen=True, slots=True)
class Metric:
    """A score: its key in metrics.jsonl and summary.json, its name for people, and how it is read."""

    name: str
    label: str
    higher_is_better: bool = True
    within_one: bool = True  # whether it lies within 0..1

    def best(self, values: Sequence[float]) -> float:
        """Return the best of several values."""
        return max(values) if self.higher_is_better else min(values)


ACCURACY = Metric("accuracy", "accuracy")
AUC = Metric("auc", "AUC")
AVERAGE_PRECISION = Metric("average_precision", "average precision")


def metric_tables(metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """Return metrics as plain tables, for summaries."""
    return [asdict(metric) for metric in metrics]


class Task(Section):
    """What outputs mean. Subclasses say which targets they take, the loss and the scores."""

    name: str = ""
    targets: ClassVar[Targets] = "class"
    # Whether networks end in log-probabilities of the classes; else in whatever `loss` takes.
    log_probabilities: ClassVar[bool] = True
    metrics: ClassVar[tuple[Metric, ...]] = (ACCURACY, AUC)  # the first that is there is the one to compare

    @property
    def has_standard_loss(self) -> bool:
        """Whether the loss is the targets' usual one: trainers that minimise another can stand for it."""
        return False

    @property
    def is_cross_entropy(self) -> bool:
        """Whether the loss is −log p of the class and nothing else: some code is faster for that."""
        return self.targets == "class" and self.has_standard_loss

    @property
    def bounded(self) -> bool:
        """Whether targets lie within public bounds, as sums over records need."""
        return self.targets != "numbers"

    def check_outputs(self, outputs: int) -> None:
        """Refuse a number of outputs (classes, labels or numbers) that the task cannot have."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each record's loss, from that record's outputs and target alone."""

    @abstractmethod
    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the scores of all records together: those of `metrics` that can be computed, and `loss`."""

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return what users are told of each record: probabilities of classes, by default."""
        return outputs.exp()

    def unit_targets(self, targets: NDArray[Any]) -> NDArray[Any]:
        """Return targets as sums over records take them: classes as they are, others within the unit ball."""
        return targets

    def target_scale(self, outputs: int) -> float:
        """Return how much larger outputs are than such targets."""
        return 1.0


class Classification(Task):
    """One class of several, by cross-entropy; with `class_weights`, each record's loss times its class's."""

    name: Literal["classification"] = "classification"
    class_weights: Annotated[tuple[Positive, ...], Field(strict=False)] | None = None

    @property
    def has_standard_loss(self) -> bool:
        """Whether no class weighs more than another."""
        return self.class_weights is None and type(self).loss is Classification.loss

    def check_outputs(self, outputs: int) -> None:
        """Refuse weights of other classes."""
        if self.class_weights is not None and len(self.class_weights) != outputs:
            raise ConfigError(
                f"task.class_weights = {list(self.class_weights)}: expected one for each of {outputs} classes"
            )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return −log p of each record's class, times the class's weight."""
        from torch.nn.functional import nll_loss

        weights = None if self.class_weights is None else outputs.new_tensor(self.class_weights)
        return nll_loss(outputs, targets, weight=weights, reduction="none")

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Return accuracy, mean loss and, for two classes, the AUC."""
        scores = {
            "accuracy": float((outputs.argmax(1) == targets).double().mean()),
            "loss": float(self.loss(outputs.double(), targets).mean()),
        }
        if outputs.shape[1] == 2 and 0 < targets.sum() < len(targets):
            from sklearn.metrics import roc_auc_score

            scores["auc"] = float(roc_auc_score(targets.numpy(), _difference(outputs)))
        return scores


class Binary(Classification):
    """Two classes, told by ranking: AUC, average precision, sensitivity at a specificity."""

    name: Literal["binary"] = "binary"  # type: ignore[assignment]
    specificity: Annotated[float, Field(gt=0, lt=1)] = 0.9  # at which sensitivity is told
    metrics = (
        AUC,
        AVERAGE_PRECISION,
        Metric("sensitivity", "sensitivity at the specificity"),
        ACCURACY,
    )

    def check_outputs(self, outputs: int) -> None:
        """Refuse more or less than two classes."""
        super().check_outputs(outputs)
        if outputs != 2:
            raise ConfigError(
                f"task.name = 'binary': the data has {outputs} classes; expected 2 (or task.name = "
                "'classification')"
            )

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Return accuracy and loss and, where both classes are there, the ranking scores."""
        from sklearn.metrics import average_precision_score, roc_curve

        scores = super().scores(outputs, targets)
        if "auc" in scores:
            truth, ranks = targets.numpy(), _difference(outputs)
            scores["average_precision"] = float(average_precision_score(truth, ranks))
            false_positives, sensitivity, _ = roc_curve(truth, ranks)
            allowed = sensitivity[false_positives <= 1 - self.specificity + 1e-12]
            scores["sensitivity"] = float(allowed.max(initial=0.0))
        return scores


class MultiLabel(Task):
    """Several labels, each of which holds or not: one logit each, and the mean of their cross-entropies."""

    name: Literal["multilabel"] = "multilabel"
    label_weights: Annotated[tuple[Positive, ...], Field(strict=False)] | None = None  # of those that hold
    targets = "labels"
    log_probabilities = False
    metrics = (
        Metric("auc", "mean AUC of the labels"),
        AVERAGE_PRECISION,
        Metric("accuracy", "accuracy of the labels"),
        Metric("exact", "records with all labels right"),
    )

    @property
    def has_standard_loss(self) -> bool:
        """Whether labels that hold weigh no more than others."""
        return self.label_weights is None and type(self).loss is MultiLabel.loss

    def check_outputs(self, outputs: int) -> None:
        """Refuse weights of other labels."""
        if self.label_weights is not None and len(self.label_weights) != outputs:
            raise ConfigError(
                f"task.label_weights = {list(self.label_weights)}: expected one for each of {outputs} labels"
            )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over its labels of each record's cross-entropies."""
        from torch.nn.functional import binary_cross_entropy_with_logits

        weights = None if self.label_weights is None else outputs.new_tensor(self.label_weights)
        each = binary_cross_entropy_with_logits(
            outputs, targets.to(outputs.dtype), pos_weight=weights, reduction="none"
        )
        return each.mean(1)

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Return mean AUC and average precision over labels that some records have and some have not."""
        from sklearn.metrics import average_precision_score, roc_auc_score

        right = (outputs > 0) == (targets > 0.5)
        scores = {
            "accuracy": float(right.double().mean()),
            "exact": float(right.all(1).double().mean()),
            "loss": float(self.loss(outputs.double(), targets).mean()),
        }
        truth, logits = targets.numpy() > 0.5, outputs.numpy()
        both = [k for k in range(truth.shape[1]) if 0 < truth[:, k].sum() < len(truth)]
        if both:
            scores["auc"] = float(np.mean([roc_auc_score(truth[:, k], logits[:, k]) for k in both]))
            precisions = [average_precision_score(truth[:, k], logits[:, k]) for k in both]
            scores["average_precision"] = float(np.mean(precisions))
        return scores

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return the probability of each label."""
        return outputs.sigmoid()

    def unit_targets(self, targets: NDArray[Any]) -> NDArray[Any]:
        """Return ±1/√k for labels that hold or not."""
        found: NDArray[Any] = (2.0 * targets - 1.0) / np.sqrt(targets.shape[1])
        return found

    def target_scale(self, outputs: int) -> float:
        """Return 2√k: the logit of a probability p is about 2(2p − 1)."""
        return 2 * float(np.sqrt(outputs))


class Regression(Task):
    """Numbers. With `bounds` (public, and the same for all), targets are cut to them and scaled to ±1.

    Outputs then are on that scale, and predictions and scores on the targets' own. Without bounds, targets
    are taken as they are.
    """

    name: Literal["regression"] = "regression"
    bounds: Annotated[tuple[float, float], Field(strict=False)] | None = None
    error: Literal["squared", "huber"] = "squared"  # huber: linear from 1 on, on the outputs' scale
    targets = "numbers"
    log_probabilities = False
    metrics = (
        Metric("rmse", "root mean square error", higher_is_better=False, within_one=False),
        Metric("mae", "mean absolute error", higher_is_better=False, within_one=False),
        Metric("r2", "R²", within_one=False),
    )

    @model_validator(mode="after")
    def _possible_bounds(self) -> Regression:
        if self.bounds is not None and not -MAX_TARGET <= self.bounds[0] < self.bounds[1] <= MAX_TARGET:
            raise ValueError(
                f"task.bounds = {list(self.bounds)}: expected low < high, within ±{MAX_TARGET:g}"
            )
        return self

    @property
    def bounded(self) -> bool:
        """Whether there are bounds."""
        return self.bounds is not None

    @property
    def has_standard_loss(self) -> bool:
        """Whether errors are squared."""
        return self.error == "squared" and type(self).loss is Regression.loss

    @property
    def _scale(self) -> tuple[float, float]:
        """Middle and half width of the bounds."""
        low, high = self.bounds or (-1.0, 1.0)
        return (low + high) / 2, (high - low) / 2

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return half the squared error, or Huber's, summed over a record's numbers."""
        from torch.nn.functional import huber_loss, mse_loss

        middle, half = self._scale
        wanted = (targets.to(outputs.dtype) - middle) / half
        if self.bounds is not None:
            wanted = wanted.clamp(-1, 1)
        if self.error == "huber":
            return huber_loss(outputs, wanted, reduction="none").sum(1)
        return mse_loss(outputs, wanted, reduction="none").sum(1) / 2

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Return root mean square error, mean absolute error and R², over all numbers together."""
        truth = targets.double()
        apart = self.predictions(outputs.double()) - truth
        scores = {
            "rmse": float(apart.square().mean().sqrt()),
            "mae": float(apart.abs().mean()),
            "loss": float(self.loss(outputs.double(), targets).mean()),
        }
        spread = float((truth - truth.mean(0)).square().mean())
        if spread > 0:
            scores["r2"] = 1 - scores["rmse"] ** 2 / spread
        return scores

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return outputs on the targets' own scale."""
        middle, half = self._scale
        return outputs * half + middle

    def unit_targets(self, targets: NDArray[Any]) -> NDArray[Any]:
        """Return targets scaled to ±1/√k each."""
        middle, half = self._scale
        scaled = ((targets - middle) / half).clip(-1, 1)
        found: NDArray[Any] = scaled / np.sqrt(targets.shape[1])
        return found

    def target_scale(self, outputs: int) -> float:
        """Return √k: outputs lie within ±1."""
        return float(np.sqrt(outputs))


def _difference(outputs: Tensor) -> NDArray[Any]:
    """Return by how much the second class is likelier; a probability near 1 would tie with others."""
    found: NDArray[Any] = (outputs[:, 1] - outputs[:, 0]).numpy()
    return found
