"""Runs in TensorBoard and MLflow: observers of any run, each an extra that is installed by itself.

Both get the scores and the total ε after every round; MLflow also the experiment's keys.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fed_dp.errors import ConfigError
from fed_dp.experiment import Experiment
from fed_dp.extras import need
from fed_dp.runs.event_file import EventFile, check_tensorboard
from fed_dp.runs.folder import Line
from fed_dp.server.observers import Observer, Several, Silent

MAX_PARAMETER = 500  # characters of a value that MLflow takes


class Tracker(Silent):
    """Passes on the numbers of every round."""

    def round_done(self, line: Line) -> None:
        """Write a round's scores, its ε so far, and its bytes."""
        numbers = {
            key: value for key, value in line.items() if type(value) in (int, float) and key != "round"
        }
        if line["epsilon"]:
            numbers["epsilon"] = line["epsilon"]["max"]
        numbers |= {f"bytes_{key}": line["bytes"][key] for key in ("uploaded", "downloaded")}
        numbers["clients"] = line["clients"]["uploaded"]
        finite = {key: float(value) for key, value in numbers.items() if math.isfinite(value)}
        self.write(line["round"], finite)

    @abstractmethod
    def write(self, server_round: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a round."""


class TensorBoard(Tracker):
    """Event files in the run folder: `tensorboard --logdir runs`."""

    def __init__(self) -> None:
        check_tensorboard("track = 'tensorboard'")
        self._file: EventFile | None = None

    def started(self, experiment: Experiment, folder: Path, done: int) -> None:
        """Open the event file."""
        self._file = EventFile(folder / "tensorboard")

    def write(self, server_round: int, numbers: Mapping[str, float]) -> None:
        """Write a point of every curve."""
        assert self._file is not None  # by started
        self._file.write(server_round, numbers)

    def stop(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class MLflow(Tracker):
    """A run of MLflow, wherever MLFLOW_TRACKING_URI says; one that is resumed is gone on with."""

    def __init__(self) -> None:
        need("mlflow", extra="mlflow", what="track = 'mlflow'")
        self._client: Any = None
        self._run = ""

    def started(self, experiment: Experiment, folder: Path, done: int) -> None:
        """Create the run, with the experiment's keys as its parameters."""
        from mlflow import MlflowClient

        self._client, kept = MlflowClient(), folder / "mlflow-run"
        if kept.is_file():
            self._run = kept.read_text()
            return
        found = self._client.get_experiment_by_name("fed_dp")
        identity = self._client.create_experiment("fed_dp") if found is None else found.experiment_id
        self._run = self._client.create_run(identity, run_name=experiment.name).info.run_id
        kept.write_text(self._run)
        for key, value in flat(experiment.tables()).items():
            self._client.log_param(self._run, key, str(value)[:MAX_PARAMETER])
        self._client.set_tag(self._run, "fed_dp.digest", experiment.digest)
        self._client.set_tag(self._run, "fed_dp.folder", str(folder))

    def write(self, server_round: int, numbers: Mapping[str, float]) -> None:
        """Write a point of every curve."""
        for key, value in numbers.items():
            self._client.log_metric(self._run, key, value, step=server_round)

    def stop(self) -> None:
        """End the run."""
        if self._client is not None:
            self._client.set_terminated(self._run)
            self._client = None


TRACKERS: Mapping[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def tracked(observer: Observer, names: Sequence[str]) -> Observer:
    """Return an observer that also tells trackers, by their names.

    Raises
    ------
    ConfigError
        When there is no such tracker, or its extra is not installed.
    """
    if unknown := [name for name in names if name not in TRACKERS]:
        raise ConfigError(f"track = {unknown[0]!r}: expected {' or '.join(map(repr, TRACKERS))}")
    return Several(observer, *(TRACKERS[name]() for name in names)) if names else observer


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, with keys as the command line has them."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found
