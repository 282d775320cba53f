"""Who watches a run."""

from __future__ import annotations

from pathlib import Path

from fed_dp.experiment import Experiment
from fed_dp.runs.folder import Line
from fed_dp.strategies.failures import Failure


class Observer:
    """Who watches a run: a progress bar, a log, a checkpoint of the clients. By default it does nothing."""

    def started(self, experiment: Experiment, folder: Path, done: int) -> None:
        """Note that the run begins (done = 0) or resumes after round `done`."""

    def client_failed(self, client: int, failure: Failure) -> None:
        """Note that a simulated client raised an exception: the first of its kind, with its traceback."""

    def round_done(self, line: Line) -> None:
        """Note that a round is over; its line is in metrics.jsonl."""

    def checkpoint(self, folder: Path, done: int) -> None:
        """Round `done` is about to be checkpointed: write now what must be as old as it."""

    def restore(self, folder: Path, done: int) -> None:
        """Read back what `checkpoint` wrote: the run resumes after round `done`."""

    def stop(self) -> None:
        """Note that the run is over, whichever way."""


class Silent(Observer):
    """An observer that does nothing."""


class Several(Observer):
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def started(self, experiment: Experiment, folder: Path, done: int) -> None:
        """Tell all that the run begins."""
        for each in self._observers:
            each.started(experiment, folder, done)

    def round_done(self, line: Line) -> None:
        """Tell all that a round is over."""
        for each in self._observers:
            each.round_done(line)

    def client_failed(self, client: int, failure: Failure) -> None:
        """Tell all of an exception."""
        for each in self._observers:
            each.client_failed(client, failure)

    def checkpoint(self, folder: Path, done: int) -> None:
        """Tell all to write."""
        for each in self._observers:
            each.checkpoint(folder, done)

    def restore(self, folder: Path, done: int) -> None:
        """Tell all to read."""
        for each in self._observers:
            each.restore(folder, done)

    def stop(self) -> None:
        """Tell all that the run is over."""
        for each in self._observers:
            each.stop()
