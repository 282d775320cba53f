"""A network as one flat vector: what is sent, selected and added is a float32 array; and its scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from fed_dp import seeds
from fed_dp.errors import ModelError
from fed_dp.models import rounding
from fed_dp.models.encoders import Encoded
from fed_dp.models.layers import OnFrozen
from fed_dp.models.network import NetworkSpec, Shape
from fed_dp.tasks import Task

Vector = NDArray[np.float32]
ALL = slice(None)
MAX_FEATURE = 1e6  # of a frozen part: beyond, products might overflow
FEATURES_AT_ONCE = 500  # records whose frozen features are computed in one go
rounding.fix()  # before the first product


class TaskLoss(nn.Module):
    """A task's loss as torch and Opacus take one: of each record, or their plain mean."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task, self.reduction = task, "mean"

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean, or each record's loss where `reduction` is none."""
        each = self.task.loss(outputs, targets)
        return each.mean() if self.reduction == "mean" else each


class FlatNetwork:
    """A network whose parameters are views into one flat tensor.

    Loading and reading all weights is one copy; layers and optimizers see ordinary parameters.
    """

    def __init__(self, spec: NetworkSpec, device: torch.device | None = None) -> None:
        self.spec, self.task, self.loss = spec, spec.task, TaskLoss(spec.task)
        self.network = spec.build().to(device or torch.device("cpu"))
        self.parameters: list[Tensor] = list(self.network.parameters())
        self.flat = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        start = 0
        for p in self.parameters:
            p.data = self.flat[start : start + p.numel()].view_as(p)
            start += p.numel()

    @property
    def name(self) -> str:
        """The network's name."""
        return self.spec.name

    @property
    def shape(self) -> Shape:
        """Shape of one input."""
        return self.spec.shape

    @property
    def trained(self) -> nn.Module:
        """The part of the network that gradients train."""
        return self.network.trained if isinstance(self.network, OnFrozen | Encoded) else self.network

    @property
    def trained_part(self) -> slice:
        """Where the parameters of that part are among the flat weights; those before it are released."""
        return (
            self.network.segment(self.network.stages)
            if isinstance(self.network, Encoded)
            else slice(0, self.size)
        )

    @torch.no_grad()
    def features(self, x: Vector) -> Tensor:
        """Return what the part before that makes of records; they themselves, where there is none."""
        network = self.network
        if not isinstance(network, OnFrozen | Encoded):
            return torch.from_numpy(x).to(self.device)
        places = range(FEATURES_AT_ONCE, len(x), FEATURES_AT_ONCE)
        parts = (torch.from_numpy(part).to(self.device) for part in np.split(x, places))
        found = torch.cat([network.features(part) for part in parts])
        # Whatever stands in a record, and whatever a server sends, its gradient must be a number.
        return found.nan_to_num_(0.0).clamp_(-MAX_FEATURE, MAX_FEATURE)

    def inputs(self, x: Vector) -> Tensor:
        """Return records as the trained part takes them."""
        features = self.features(x)
        return self.network.scaled(features) if isinstance(self.network, Encoded) else features

    def outputs(self, features: Tensor) -> Tensor:
        """Return what the network makes of records of which these are the features."""
        network = self.network
        found: Tensor = (
            network.outputs(features) if isinstance(network, OnFrozen | Encoded) else network(features)
        )
        return found

    def targets(self, y: NDArray[Any]) -> Tensor:
        """Return records' targets."""
        return torch.from_numpy(y).to(self.device)

    @property
    def size(self) -> int:
        """Number of parameters."""
        return self.flat.numel()

    @property
    def device(self) -> torch.device:
        """Where the network lives."""
        return self.flat.device

    def load(self, weights: Vector) -> None:
        """Overwrite all parameters."""
        self.flat.copy_(torch.tensor(weights))

    def clamp(self, largest: float) -> None:
        """Hold all parameters within ±largest."""
        self.flat.clamp_(-largest, largest)

    def weights(self) -> Vector:
        """Return a copy of all parameters."""
        return self.flat.cpu().numpy().copy()


def divided(
    weights: Sequence[Vector], shapes: Sequence[tuple[int, ...]], device: torch.device
) -> list[Tensor]:
    """Return the parameters of several copies of a network: of each shape one tensor, copies first."""
    start = torch.from_numpy(np.stack(weights)).to(device)
    parts = torch.split(start, [math.prod(shape) for shape in shapes], 1)
    return [part.reshape(-1, *shape).clone() for part, shape in zip(parts, shapes, strict=True)]


def flat_rows(parameters: Sequence[Tensor]) -> Tensor:
    """Return the parameters of each copy as one row: what `divided` was given."""
    return torch.cat([each.flatten(1) for each in parameters], 1)


def use_one_thread() -> None:
    """Let this process compute on one thread; clients get their parallelism from processes."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
        threadpool_limits(1)  # NumPy's linear algebra has threads of its own


def initial_weights(
    spec: NetworkSpec, *, seed: int, public: tuple[Vector, NDArray[Any]] | None = None
) -> Vector:
    """Return freshly initialised weights; the same seed gives the same weights everywhere.

    With public records, the layers that can be are fitted to them.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.integer(seed, "initial weights"))
        net = FlatNetwork(spec)
        if public is not None:
            assert isinstance(net.network, Encoded)  # by schema
            net.network.fit(torch.from_numpy(public[0]), torch.from_numpy(public[1]))
        return net.weights()


class Evaluator:
    """The scores of given weights on fixed records."""

    def __init__(self, spec: NetworkSpec, x: Vector, y: NDArray[Any]) -> None:
        self._net = FlatNetwork(spec)
        self._net.network.eval()
        self._x, self._y = torch.from_numpy(x), torch.from_numpy(y)
        self._features: tuple[bytes, Tensor] | None = None  # of all records; the weights they are made with

    def scores(self, weights: Vector, rows: NDArray[np.bool_] | None = None) -> dict[str, float]:
        """Return the task's scores, of all records or of some."""
        chosen = ALL if rows is None else torch.from_numpy(rows)
        task = self._net.task
        scores = task.scores(self._output(weights, chosen), self._y[chosen])
        if not any(metric.name in scores for metric in task.metrics):
            raise ModelError(
                f"task.name = {task.name!r}: scores() returned {sorted(scores)}, expected some of "
                f"{[metric.name for metric in task.metrics]} (metrics)"
            )
        return scores

    def losses(self, weights: Vector) -> NDArray[np.float64]:
        """Return each record's loss."""
        output = self._output(weights).double()
        found: NDArray[np.float64] = self._net.task.loss(output, self._y).numpy()
        return found

    def predictions(self, weights: Vector) -> Vector:
        """Return what the task tells of every record: probabilities of classes or labels, or numbers."""
        found: Vector = self._net.task.predictions(self._output(weights)).numpy()
        return found

    @torch.no_grad()
    def _output(self, weights: Vector, chosen: slice | Tensor = ALL) -> Tensor:
        net = self._net
        net.load(weights)
        features = self._x
        if net.trained is not net.network:
            frozen = weights[: net.trained_part.start].tobytes()
            if self._features is None or self._features[0] != frozen:
                self._features = frozen, net.features(self._x.numpy())
            features = self._features[1]
        return torch.cat([net.outputs(part) for part in torch.split(features[chosen], 1000)])
