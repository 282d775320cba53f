"""Progress of a run in a terminal: round, score, ε spent of budget, bytes, time left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fed_dp.experiment import Experiment
from fed_dp.experiment.plan import warning_of
from fed_dp.runs.folder import Line
from fed_dp.server.app import score_text, spent_text
from fed_dp.server.observers import Silent
from fed_dp.strategies.failures import Failure
from fed_dp.tasks import Metric


class ProgressBar(Silent):
    """A live bar; the failures of a round stay on the screen above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
        )
        self._task: TaskID | None = None
        self._budget: float | None = None
        self._score = ""
        self._metrics: Sequence[Metric] = ()
        self._bytes = [0, 0]

    def started(self, experiment: Experiment, folder: Path, done: int) -> None:
        """Show the bar."""
        self._budget, self._metrics = experiment.privacy.budget_epsilon, experiment.task.metrics
        if words := warning_of(experiment):
            self._console.print(words, style="bold", markup=False, soft_wrap=True)
        self._bar.start()
        self._task = self._bar.add_task(experiment.name, total=experiment.rounds, completed=done, status="")

    def client_failed(self, client: int, failure: Failure) -> None:
        """Show the traceback of a client's exception."""
        self._console.print(f"  client {client} failed:\n{failure.traceback}", markup=False)

    def round_done(self, line: Line) -> None:
        """Move the bar."""
        assert self._task is not None
        for client, why in list(line["failures"].items())[:3]:
            self._console.print(f"  round {line['round']}: client {client} failed: {why}", markup=False)
        self._score = score_text(line, self._metrics) or self._score
        cost = line["epsilon"]
        spent = spent_text(cost, self._budget) if cost else "no privacy"
        self._bytes[0] += line["bytes"]["uploaded"]
        self._bytes[1] += line["bytes"]["downloaded"]
        traffic = f"↑ {self._bytes[0] / 1e6:.1f} ↓ {self._bytes[1] / 1e6:.1f} MB"
        self._bar.update(self._task, completed=line["round"], status=f"{self._score} · {spent} · {traffic}")
        if line["round"] == self._bar.tasks[0].total:
            self.stop()  # the next variant has a bar of its own

    def stop(self) -> None:
        """Leave the bar as it is."""
        self._bar.stop()
