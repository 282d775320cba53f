"""The round loop: ask, combine, score, record, checkpoint; from the start or from a checkpoint."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from flwr.serverapp import Grid

from fed_dp.accounting import Event, from_json
from fed_dp.accounting.events import Charge
from fed_dp.errors import EmptyRound, ResumeError
from fed_dp.experiment import Experiment
from fed_dp.experiment.components import StrategySetting
from fed_dp.experiment.federation import Federation, at_server, make_federation
from fed_dp.experiment.plan import guarantee_of, release_plan
from fed_dp.experiment.start import network_of, starting_weights
from fed_dp.models import Evaluator, use_one_thread
from fed_dp.runs.folder import REPORT, Line, RunFolder
from fed_dp.runs.report import write_report
from fed_dp.runs.saved_model import SavedModel
from fed_dp.server.discovery import discover
from fed_dp.server.drivers import AsynchronousDriver, RoundDriver, SynchronousDriver
from fed_dp.server.ledger_heads import LedgerHeads
from fed_dp.server.networked import Deployment, NetworkedDriver
from fed_dp.server.observers import Observer
from fed_dp.server.site_scores import scores_of_sites
from fed_dp.server.summary import round_line, run_summary, spent_by_sites
from fed_dp.strategies.failures import Failure
from fed_dp.strategies.site_strategy import SiteStrategy
from fed_dp.strategies.sites import Site

CHECKPOINT_SECONDS = 1.0  # after which a simulation writes a checkpoint, though no round was scored


def run_rounds(
    experiment: Experiment,
    grid: Grid,
    folder: RunFolder,
    observer: Observer,
    deployment: Deployment | None = None,
) -> dict[str, Any]:
    """Run all rounds that are not done yet; return the summary, which is also in the folder.

    With a `deployment`, sites are real: they may come and go, and have the records; the server has not.
    """
    use_one_thread()
    real = deployment is not None
    federation = (
        make_federation(experiment) if deployment is None else at_server(experiment, path=deployment.data)
    )
    data = federation.dataset
    evaluator = Evaluator(network_of(experiment, federation), data.inputs(data.test), data.test.y)
    heads = LedgerHeads(folder.path.parent)
    sites = heads.admitted(_discovered(experiment, grid, deployment))
    strategy = _strategy(experiment, federation, sites)
    fingerprint = data.fingerprint()
    if folder.same_data(fingerprint) and experiment.private:
        _check_repeatable(experiment, folder, real=real)
    done, lines = _resume(folder, strategy, observer)
    strategy.ledger_heads = heads.of(sites, strategy.ledger_heads)
    events: dict[int, list[Event]] = defaultdict(list)
    charges: dict[int, Counter[Charge]] = defaultdict(Counter)  # of these, how often each

    def note(event: Event) -> None:
        events[event.client].append(event)
        charges[event.client][event.charge] += 1

    if real:  # also of rounds that came to nothing
        strategy.on_release = folder.note
    for head, event in folder.noted() if real else _accounted(lines):
        note(event)
        strategy.accounted.add((event.client, event.round, head))
    tracebacks = _Tracebacks(folder, observer)
    strategy.on_failure = tracebacks.note
    observer.started(experiment, folder.path, done)
    driver = _driver(experiment, strategy, grid, real=real)
    saved = time.perf_counter()
    for server_round in range(done + 1, experiment.rounds + 1):
        began = time.perf_counter()
        with tracebacks.attached():
            driver.round(server_round)
        seconds = time.perf_counter() - began
        for event in strategy.stats.events:
            note(event)
        scored = server_round == experiment.rounds or server_round % experiment.evaluate_every == 0
        scores = strategy.scores(evaluator) if scored else {}
        # Short rounds of a simulation can be run again; to add up ε and write takes longer than they do.
        due = real or scored or time.perf_counter() - saved > CHECKPOINT_SECONDS
        spent = spent_by_sites(experiment, charges) if real or scored else None
        line = round_line(server_round, strategy.stats, scores, seconds, spent)
        folder.append(line, sync=due)
        lines.append(line)
        heads.keep(sites, strategy.ledger_heads)
        if due:
            observer.checkpoint(folder.path, server_round)
            folder.save(server_round, strategy.state())
            saved = time.perf_counter()
        observer.round_done(line)
    summary = run_summary(experiment, federation, strategy, lines, events)
    summary["data"]["sha256"] = fingerprint
    summary["by_owner"] = (
        scores_of_sites(grid, strategy, experiment.task.metrics)
        if real
        else _by_owner(experiment, federation, strategy, evaluator)
    )
    if experiment.strategy.one_model:
        folder.keep_model(SavedModel(experiment, data.shape, data.classes, strategy.weights_of(0)).to_bytes())
    if real:  # a simulation's report tells of all its variants
        write_report(
            folder.path / REPORT, experiment.name, {experiment.name: summary}, {experiment.name: lines}
        )
    folder.finish(summary)
    return summary


class _Tracebacks:
    """Shows and keeps the tracebacks of simulated clients' exceptions, the first of each kind."""

    def __init__(self, folder: RunFolder, observer: Observer) -> None:
        self._folder, self._observer = folder, observer
        self._by_reason: dict[str, str] = {}

    def note(self, client: int, failure: Failure) -> None:
        """Take a client's failure."""
        if failure.traceback and failure.reason not in self._by_reason:
            self._by_reason[failure.reason] = failure.traceback
            self._folder.keep_traceback(client, failure.traceback)
            self._observer.client_failed(client, failure)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Add them to the error of a round in which everybody failed."""
        try:
            yield
        except EmptyRound as error:
            for traceback in self._by_reason.values():
                error.add_note(traceback)
            raise


def _accounted(lines: Sequence[Line]) -> Iterator[tuple[str, Event]]:
    """Yield what earlier rounds released; these are never asked for again, so that no head is needed."""
    for line in lines:
        for event in from_json(line["events"]):
            yield "", event


def _discovered(experiment: Experiment, grid: Grid, deployment: Deployment | None) -> tuple[Site, ...]:
    if deployment is None:
        guarantee = guarantee_of(experiment)
        counted = guarantee is None or guarantee.unit == "record"
        return discover(grid, expected=experiment.nodes, timeout=experiment.round_timeout, counted=counted)
    return discover(
        grid,
        expected=experiment.nodes,
        timeout=deployment.join_timeout,
        quorum=experiment.clients.quorum,
        keys=deployment.keys,
        most=deployment.max_records,
    )


def _check_repeatable(experiment: Experiment, folder: RunFolder, *, real: bool) -> None:
    """Refuse to resume a private run whose last rounds cannot be repeated with the same noise.

    Real sites keep what they sent: they repeat it, or pay again.
    """
    if experiment.strategy.free_running:
        what = "strategy.exchange = 'free_running'"
    elif experiment.privacy.noise_source == "secure" and not real:
        what = "privacy.noise_source = 'secure'"
    else:
        return
    raise ResumeError(
        f"{folder.path}: {what} cannot repeat the rounds after its last checkpoint exactly, so what they "
        "released would be released twice and paid once; start a new run"
    )


def _strategy(experiment: Experiment, federation: Federation, sites: Sequence[Site]) -> SiteStrategy:
    weights = starting_weights(experiment, federation)
    plans = [release_plan(experiment, client=site.client, size=weights.size) for site in sites]
    setting = StrategySetting(experiment, network_of(experiment, federation), weights, sites, plans)
    strategy: SiteStrategy = experiment.strategy.build(setting)
    return strategy


def _driver(experiment: Experiment, strategy: SiteStrategy, grid: Grid, *, real: bool) -> RoundDriver:
    timeout = experiment.round_timeout
    if experiment.strategy.free_running:
        return AsynchronousDriver(strategy, grid, rounds=experiment.rounds, timeout=timeout)
    if real:
        return NetworkedDriver(strategy, grid, timeout=timeout)
    return SynchronousDriver(strategy, grid, timeout=timeout)


def _resume(folder: RunFolder, strategy: SiteStrategy, observer: Observer) -> tuple[int, list[Line]]:
    checkpoint = folder.latest()
    if checkpoint is None:
        return 0, folder.rewind(0)
    done, state = checkpoint
    if state["weights"].shape != strategy.weights.shape:
        raise ResumeError(
            f"{folder.path}: its checkpoint has {state['weights'].size} parameters, "
            f"the model {strategy.weights.size}"
        )
    lines = folder.rewind(done)
    if [line["round"] for line in lines] != list(range(1, done + 1)):
        raise ResumeError(
            f"{folder.path / 'metrics.jsonl'} does not hold rounds 1 to {done} of the checkpoint: what they "
            "cost would be forgotten; start a new run"
        )
    strategy.restore(state)
    observer.restore(folder.path, done)
    return done, lines


def _by_owner(
    experiment: Experiment, federation: Federation, strategy: SiteStrategy, evaluator: Evaluator
) -> dict[str, dict[str, float]]:
    """Return the scores on each natural client's own test records, of the model that it ends with."""
    train, test = federation.dataset.train, federation.dataset.test
    if not experiment.data.partition.natural or train.owner is None or test.owner is None:
        return {}
    found = {}
    for client, part in enumerate(federation.parts):  # where all are pooled, one part has many owners
        for owner in np.unique(train.owner[part]):
            rows = test.owner == owner
            if rows.any():
                scores = evaluator.scores(strategy.weights_of(client), rows)
                found[str(owner)] = {**scores, "test": int(rows.sum())}
    return found
