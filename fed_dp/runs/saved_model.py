"""A trained model in one file: what its network is, the shape of its inputs, its weights."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fed_dp.data.dataset import Floats
from fed_dp.errors import ConfigError, DataCorrupt, DataMissing
from fed_dp.experiment.schema import Experiment
from fed_dp.experiment.source import build
from fed_dp.models import Evaluator, FlatNetwork, Vector

if TYPE_CHECKING:
    from torch import nn

NAME = "model.npz"


@dataclass(frozen=True, slots=True)
class SavedModel:
    """What predicts. It holds nothing but what the run released; reading it costs no privacy.

    The run's seed, from which simulated noise could be drawn again, and where its data lay are left out:
    `experiment` has a seed of 0.
    """

    experiment: Experiment
    shape: tuple[int, ...]
    classes: int
    weights: Vector

    def to_bytes(self) -> bytes:
        """Write it."""
        out = io.BytesIO()
        tables = self.experiment.tables() | {"seed": 0}
        if self.experiment.data.path is not None:
            tables["data"] = tables["data"] | {"path": "."}
        about = {"experiment": tables, "shape": self.shape, "classes": self.classes}
        np.savez(out, weights=self.weights, about=np.array(json.dumps(about)))
        return out.getvalue()

    @classmethod
    def load(cls, path: Path) -> SavedModel:
        """Read it from a file, or from the run folder that holds it."""
        path = path / NAME if path.is_dir() else path
        try:
            with path.open("rb") as handle, np.load(handle, allow_pickle=False) as archive:
                about, weights = json.loads(str(archive["about"])), archive["weights"].astype(np.float32)
            about["experiment"].get("model", {}).pop("code", None)  # weights of the right shape will do
            experiment = build(about["experiment"], where=str(path))
            shape, classes = tuple(int(n) for n in about["shape"]), int(about["classes"])
            wanted = FlatNetwork(experiment.network(shape, classes)).size
            if weights.shape != (wanted,):
                raise ValueError(f"its weights have shape {weights.shape}, its network takes ({wanted},)")
            return cls(experiment, shape, classes, weights)
        except FileNotFoundError:
            raise DataMissing(f"{path}: no such model; a finished run has one in its folder") from None
        except (ValueError, KeyError, TypeError, OSError, zipfile.BadZipFile, EOFError) as error:
            raise DataCorrupt(f"{path} is not a saved model: {error}") from None

    def predict(self, x: Floats) -> Floats:
        """Return what the task tells of every record: probabilities of classes or labels, or numbers.

        `x` are inputs of the network.
        """
        return self._evaluator(x, np.zeros(np.shape(x)[:1], np.int64)).predictions(self.weights)

    def scores(self, x: Floats, y: NDArray[Any]) -> dict[str, float]:
        """Return the task's scores."""
        return self._evaluator(x, y).scores(self.weights)

    def module(self) -> nn.Module:
        """Return the network with its weights; of a network of the user's own, the module that it gave."""
        net = FlatNetwork(self.experiment.network(self.shape, self.classes))
        net.load(self.weights)
        for parameter in net.parameters:  # each in a memory of its own, and not in the flat vector's
            parameter.data = parameter.data.clone()
        return self.experiment.model.own_module(net.network.eval())

    def _evaluator(self, x: Floats, y: NDArray[Any]) -> Evaluator:
        if x.shape[1:] != self.shape or not x.shape:
            raise ConfigError(f"inputs of shape {x.shape[1:]}: the model takes {self.shape}")
        if not np.issubdtype(x.dtype, np.number) or not np.isfinite(x).all():
            raise ConfigError(f"inputs must be finite numbers, found {x.dtype} with NaN, infinity or text")
        network = self.experiment.network(self.shape, self.classes)
        return Evaluator(network, np.ascontiguousarray(x, np.float32), y)
