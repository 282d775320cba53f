"""A network as one flat vector: what is sent, selected and added is a float32 array."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from fed_dp import seeds
from fed_dp.models import rounding
from fed_dp.models.encoders import Encoded
from fed_dp.models.layers import OnFrozen
from fed_dp.models.network import NetworkSpec, Shape

Vector = NDArray[np.float32]
rounding.fix()  # before the first product


class FlatNetwork:
    """A network whose parameters are views into one flat tensor.

    Loading and reading all weights is one copy; layers and optimizers see ordinary parameters.
    """

    def __init__(self, spec: NetworkSpec, device: torch.device | None = None) -> None:
        self.spec = spec
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
        """The part of the network that has parameters."""
        return self.network.trained if isinstance(self.network, OnFrozen) else self.network

    def inputs(self, x: Vector) -> Tensor:
        """Return records as that part takes them."""
        records = torch.from_numpy(x).to(self.device)
        return self.network.features(records) if isinstance(self.network, OnFrozen) else records

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
    spec: NetworkSpec, *, seed: int, public: tuple[Vector, NDArray[np.int64]] | None = None
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
    """Accuracy and loss of given weights on fixed records."""

    def __init__(self, spec: NetworkSpec, x: Vector, y: NDArray[np.int64]) -> None:
        self._net = FlatNetwork(spec)
        self._net.network.eval()
        self._x, self._y = torch.from_numpy(x), torch.from_numpy(y)

    def scores(self, weights: Vector, rows: NDArray[np.bool_] | None = None) -> dict[str, float]:
        """Return accuracy, mean negative log-likelihood and, for two classes, the AUC; of some records."""
        chosen = slice(None) if rows is None else torch.from_numpy(rows)
        output, y = self._output(weights, self._x[chosen]), self._y[chosen]
        scores = {
            "accuracy": float((output.argmax(1) == y).double().mean()),
            "loss": float(nn.functional.nll_loss(output.double(), y)),
        }
        if output.shape[1] == 2 and 0 < y.sum() < len(y):
            difference = output[:, 1] - output[:, 0]  # a probability near 1 would tie with others
            scores["auc"] = float(roc_auc_score(y.numpy(), difference.numpy()))
        return scores

    def losses(self, weights: Vector) -> NDArray[np.float64]:
        """Return each record's negative log-likelihood."""
        output = self._output(weights, self._x).double()
        found: NDArray[np.float64] = nn.functional.nll_loss(output, self._y, reduction="none").numpy()
        return found

    def probabilities(self, weights: Vector) -> Vector:
        """Return each class' probability for every record."""
        found: Vector = self._output(weights, self._x).exp().numpy()
        return found

    @torch.no_grad()
    def _output(self, weights: Vector, x: Tensor) -> Tensor:
        self._net.load(weights)
        return torch.cat([self._net.network(part) for part in torch.split(x, 1000)])
