"""The Flower ServerApp: it reads the experiment, opens a run folder and runs the rounds."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fed_dp.accounting.statement import number
from fed_dp.errors import ResumeError
from fed_dp.experiment import Experiment, from_run_config
from fed_dp.experiment.plan import warning_of
from fed_dp.runs.folder import Line, RunFolder, new_path
from fed_dp.runs.scores import EARLIER
from fed_dp.server.observers import Observer, Silent
from fed_dp.server.rounds import run_rounds
from fed_dp.strategies.failures import Failure
from fed_dp.tasks import Metric

RUN_FOLDER = "run-folder"  # the key of the run config that names the folder


class PlainLines(Silent):
    """One plain line per round, for logs and for terminals that are none."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout

    def started(self, experiment: Experiment, folder: Path, done: int) -> None:
        """Say what runs where."""
        again = f", resumed after round {done}" if done else ""
        self._say(
            f"{experiment.name}: {experiment.rounds} rounds, {experiment.nodes} clients{again}; {folder}"
        )
        if words := warning_of(experiment):
            self._say(words)
        self._rounds, self._budget = experiment.rounds, experiment.privacy.budget_epsilon
        self._metrics = experiment.task.metrics

    def round_done(self, line: Line) -> None:
        """Say how the round went."""
        self._say(round_text(line, rounds=self._rounds, budget=self._budget, metrics=self._metrics))

    def client_failed(self, client: int, failure: Failure) -> None:
        """Show the traceback of a client's exception."""
        self._say(f"client {client} failed:\n{failure.traceback}")

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def spent_text(cost: Mapping[str, float], budget: float | None) -> str:
    """Return what sites have spent of their budget: least / median / most, or one where all are equal."""
    each = [number(cost[key]) for key in ("min", "median", "max")]
    told = each[0] if len(set(each)) == 1 else f"min/median/max {' / '.join(each)}"
    return f"ε {told} of {budget:,.10g}"


def score_text(line: Line, metrics: Sequence[Metric]) -> str:
    """Return the first score of a round; empty where it was not scored."""
    metric = next((metric for metric in metrics if metric.name in line), None)
    return "" if metric is None else f"{metric.label} {line[metric.name]:.4f}"


def round_text(line: Line, *, rounds: int, budget: float | None, metrics: Sequence[Metric] = EARLIER) -> str:
    """Return one round's line for people."""
    clients, sent = line["clients"], line["bytes"]
    parts = [f"round {line['round']}/{rounds}"]
    if score := score_text(line, metrics):
        parts.append(score)
    if line["epsilon"]:
        parts.append(spent_text(line["epsilon"], budget))
    elif budget is None:
        parts.append("no privacy")
    parts.append(f"{clients['uploaded']}/{clients['asked']} clients")
    if clients["failed"]:
        client, why = next(iter(line["failures"].items()))
        parts.append(f"{clients['failed']} failed (client {client}: {why})")
    parts.append(f"up {sent['uploaded'] / 1e6:.2f} MB, down {sent['downloaded'] / 1e6:.2f} MB")
    parts.append(f"{line['seconds']:.2f} s")
    return ", ".join(parts)


def make_server_app(observer: Observer) -> ServerApp:
    """Build the ServerApp with the given watcher."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        experiment = from_run_config(context.run_config)
        named = str(context.run_config.get(RUN_FOLDER, ""))
        path = Path(named) if named else new_path(Path("runs"), experiment.name)
        exists = (path / "experiment.toml").is_file()
        folder = RunFolder.open(path, experiment) if exists else RunFolder.create(path, experiment)
        run_rounds(experiment, grid, folder, observer)

    return app


class _UnderFlower(PlainLines):
    """Flower's engine starts every run with empty client contexts: what sites have spent is not there."""

    def restore(self, folder: Path, done: int) -> None:
        raise ResumeError(
            f"{RUN_FOLDER} = {str(folder)!r} holds an unfinished run, and this engine kept no state of its "
            "clients: choose another folder, or resume it with fed-dp simulate --resume"
        )


app = make_server_app(_UnderFlower())
