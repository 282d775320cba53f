"""The round loop: ask, combine, score, record, checkpoint; from the start or from a checkpoint."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from flwr.serverapp import Grid

import fed_dp
from fed_dp.accounting import Event, Statement, from_json, spread, statement, to_json
from fed_dp.errors import ResumeError
from fed_dp.experiment import Dssgd as DssgdOptions
from fed_dp.experiment import Experiment, Functional
from fed_dp.experiment.federation import Federation, at_server, federation
from fed_dp.experiment.release import Agreement, agreement, amount, budget_of, promise
from fed_dp.experiment.saved import SavedModel
from fed_dp.experiment.schema import Natural
from fed_dp.experiment.schema import Statistics as StatisticsOptions
from fed_dp.experiment.start import starting_weights
from fed_dp.models import Evaluator, Solver, Vector, use_one_thread
from fed_dp.strategies.averaging import Averaging
from fed_dp.strategies.baselines import Centralised, Standalone
from fed_dp.strategies.dssgd import Dssgd
from fed_dp.strategies.marks import Marks
from fed_dp.strategies.patient import Deployment, Patient
from fed_dp.strategies.run_folder import Line, RunFolder
from fed_dp.strategies.site_scores import scores_of_sites
from fed_dp.strategies.site_strategy import NO_REPLY, SiteStrategy
from fed_dp.strategies.sites import Site, discover
from fed_dp.strategies.statistics import Statistics
from fed_dp.strategies.turns import FreeRunning, Turns, Waves

STRATEGIES: dict[str, type[SiteStrategy]] = {
    "averaging": Averaging,
    "centralised": Centralised,
    "public": Centralised,
    "standalone": Standalone,
    "dssgd": Dssgd,
    "statistics": Statistics,
}


class Observer(Protocol):
    """Who watches a run: a progress bar, a log, a checkpoint of the clients."""

    def started(self, experiment: Experiment, folder: Path, done: int) -> None:
        """Note that the run begins (done = 0) or resumes after round `done`."""

    def round_done(self, line: Line) -> None:
        """Note that a round is over; its line is in metrics.jsonl."""

    def checkpoint(self, folder: Path, done: int) -> None:
        """Round `done` is about to be checkpointed: write now what must be as old as it."""

    def restore(self, folder: Path, done: int) -> None:
        """Read back what `checkpoint` wrote: the run resumes after round `done`."""

    def stop(self) -> None:
        """Note that the run is over, whichever way."""


class Silent:
    """An observer that does nothing; a starting point for others."""

    def started(self, experiment: Experiment, folder: Path, done: int) -> None:
        """Do nothing."""

    def round_done(self, line: Line) -> None:
        """Do nothing."""

    def checkpoint(self, folder: Path, done: int) -> None:
        """Do nothing."""

    def restore(self, folder: Path, done: int) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


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
    members = federation(experiment) if deployment is None else at_server(experiment, path=deployment.data)
    data = members.dataset
    network = (experiment.model.name, data.shape, data.classes)
    options = experiment.network
    evaluator = Evaluator(*network, data.inputs(data.test), data.test.y, options)
    seen = Marks(folder.path.parent)
    sites = seen.admitted(_discovered(experiment, grid, deployment))
    strategy = _strategy(experiment, members, starting_weights(experiment, members), sites)
    turns = _turns(experiment, strategy, grid, real=real)
    fingerprint = data.fingerprint()
    if folder.same_data(fingerprint) and experiment.private:
        _check_repeatable(experiment, folder, turns, real=real)
    done, lines = _resume(folder, strategy, observer)
    strategy.marks = seen.of(sites, strategy.marks)
    events: dict[int, list[Event]] = defaultdict(list)
    if real:  # also of rounds that came to nothing
        strategy.noted = folder.note
    for mark, event in folder.noted() if real else _booked(lines):
        events[event.client].append(event)
        strategy.booked.add((event.client, event.round, mark))
    observer.started(experiment, folder.path, done)
    for turn in range(done + 1, experiment.rounds + 1):
        began = time.perf_counter()
        turns.round(turn)
        trained = time.perf_counter()
        for event in strategy.tally.events:
            events[event.client].append(event)
        last = turn == experiment.rounds
        scores = strategy.scores(evaluator) if last or turn % experiment.evaluate_every == 0 else {}
        line = _line(turn, strategy, scores, trained - began, _spent(experiment, events))
        folder.append(line)
        lines.append(line)
        seen.keep(sites, strategy.marks)
        observer.checkpoint(folder.path, turn)
        folder.save(turn, strategy.state())
        observer.round_done(line)
    summary = _summary(experiment, members, strategy, lines, events)
    summary["data"]["sha256"] = fingerprint
    summary["by_owner"] = (
        scores_of_sites(grid, strategy) if real else _by_owner(experiment, members, strategy, evaluator)
    )
    if experiment.strategy.name != "standalone":  # which has as many models as sites
        folder.keep_model(SavedModel(experiment, data.shape, data.classes, strategy.weights).to_bytes())
    folder.finish(summary)
    return summary


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    others = ("flwr", "torch", "opacus", "numpy", "scikit-learn", "dp-accounting")
    return {"fed-dp": fed_dp.__version__} | {package: version(package) for package in others}


def _booked(lines: Sequence[Line]) -> Iterator[tuple[str, Event]]:
    """Yield what earlier rounds released; these are never asked for again, so that no mark is needed."""
    for line in lines:
        for event in from_json(line["events"]):
            yield "", event


def _discovered(experiment: Experiment, grid: Grid, deployment: Deployment | None) -> tuple[Site, ...]:
    if deployment is None:
        said = promise(experiment)
        counted = said is None or said.unit == "record"
        return discover(grid, expected=experiment.nodes, timeout=experiment.round_timeout, counted=counted)
    return discover(
        grid,
        expected=experiment.nodes,
        timeout=deployment.join_timeout,
        quorum=experiment.clients.quorum,
        keys=deployment.keys,
        most=deployment.max_records,
    )


def _check_repeatable(experiment: Experiment, folder: RunFolder, turns: Turns, *, real: bool) -> None:
    """Refuse to resume a private run whose last turns cannot be repeated with the same noise.

    Real sites keep what they sent: they repeat it, or pay again.
    """
    if isinstance(turns, FreeRunning):
        what = "strategy.exchange = 'free_running'"
    elif experiment.privacy.noise_source == "secure" and not real:
        what = "privacy.noise_source = 'secure'"
    else:
        return
    raise ResumeError(
        f"{folder.path}: {what} cannot repeat the turns after its last checkpoint exactly, so what they "
        "released would be released twice and paid once; start a new run"
    )


def _strategy(
    experiment: Experiment, members: Federation, weights: Vector, sites: Sequence[Site]
) -> SiteStrategy:
    options: dict[str, Any] = {
        "fraction": experiment.clients.fraction,
        "quorum": experiment.clients.quorum,
        "seed": experiment.seed,
        "agreements": [agreement(experiment, client=site.client, size=weights.size) for site in sites],
    }
    if isinstance(experiment.strategy, DssgdOptions):
        options["options"] = experiment.strategy
    if isinstance(experiment.strategy, StatisticsOptions):
        options |= _solving(experiment, members, options["agreements"][0])
    return STRATEGIES[experiment.strategy.name](weights, sites, **options)


def _solving(experiment: Experiment, members: Federation, agreed: Agreement | None) -> dict[str, Any]:
    config, model, data = experiment.trainer, experiment.model, members.dataset
    assert isinstance(config, Functional)  # by schema
    stages = model.learnt + 1
    return {
        "solver": Solver(model.name, data.shape, data.classes, experiment.network, cross=config.cross),
        "amounts": [amount(release) for release in agreed.stages] if agreed else [None] * stages,
        "ridge": config.ridge,
    }


def _turns(experiment: Experiment, strategy: SiteStrategy, grid: Grid, *, real: bool) -> Turns:
    timeout = experiment.round_timeout
    if isinstance(strategy, Dssgd) and strategy.options.exchange == "free_running":
        return FreeRunning(strategy, grid, rounds=experiment.rounds, timeout=timeout)
    if real:
        return Patient(strategy, grid, timeout=timeout)
    return Waves(strategy, grid, timeout=timeout)


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


def _spent(experiment: Experiment, events: dict[int, list[Event]]) -> dict[str, float] | None:
    budget = budget_of(experiment)
    return None if budget is None or not events else spread(events, delta=budget.delta)


def _line(
    turn: int, strategy: SiteStrategy, scores: dict[str, float], seconds: float, cost: dict[str, float] | None
) -> Line:
    tally = strategy.tally
    return {
        "round": turn,
        **scores,
        "epsilon": cost,
        "clients": {"asked": tally.asked, "uploaded": tally.uploads, "failed": len(tally.failed)},
        "repeated": tally.repeated,
        "late": tally.late,
        "failures": {
            str(client) if at == turn else f"{client}, turn {at}": why
            for (client, at), why in sorted(tally.failed.items())
        },
        "bytes": {
            "uploaded": tally.bytes_uploaded,
            "downloaded": tally.bytes_downloaded,
            "bound_uploaded": round(tally.bound_uploaded),
            "bound_downloaded": round(tally.bound_downloaded),
        },
        "staleness": _staleness(tally.staleness),
        "seconds": seconds,
        "devices": sorted(tally.devices),
        "events": to_json(tally.events),
    }


def _staleness(found: Sequence[int]) -> dict[str, float] | None:
    return {"mean": sum(found) / len(found), "max": max(found)} if found else None


def _summary(
    experiment: Experiment,
    members: Federation,
    strategy: SiteStrategy,
    lines: Sequence[Line],
    events: dict[int, list[Event]],
) -> dict[str, Any]:
    scored = [line for line in lines if "accuracy" in line]
    uploads = sum(line["clients"]["uploaded"] for line in lines)
    asked = sum(line["clients"]["asked"] for line in lines)
    seconds = sum(line["seconds"] for line in lines)
    came_late = sum(line["late"] for line in lines)
    late = sum(why == NO_REPLY for line in lines for why in line["failures"].values()) - came_late
    refused = sum(
        any(word in why for word in ("over the budget", "ledger ", "this site"))
        for line in lines
        for why in line["failures"].values()
    )
    cost = _statement(experiment, members, strategy.sites, events, late, refused)
    summary: dict[str, Any] = {
        "experiment": experiment.name,
        "digest": experiment.digest,
        "data": {
            "name": members.dataset.name,
            "train": (
                len(np.unique(np.concatenate(members.parts)))
                if members.parts
                else sum(site.records for site in strategy.sites)
            ),
            "test": len(members.dataset.test),
            "partition": experiment.data.partition.name,
            "notes": list(members.notes),
        },
        "model": {"name": experiment.model.name, "parameters": int(strategy.weights.size)},
        "trainer": experiment.trainer.name,
        "strategy": experiment.strategy.name,
        "mechanism": _mechanism(experiment),
        "clients": experiment.nodes,
        "rounds": experiment.rounds,
        "accuracy": {
            "final": scored[-1]["accuracy"],
            "best": max(line["accuracy"] for line in scored),
        },
        "seconds": {"total": seconds, "per_client_round": seconds / uploads},
        "bytes": {
            **{
                key: sum(line["bytes"][key] for line in lines)
                for key in ("uploaded", "downloaded", "bound_uploaded", "bound_downloaded")
            },
            "dense": 4 * int(strategy.weights.size) * asked,
        },
        "failures": sum(line["clients"]["failed"] for line in lines) - came_late,
        "late": came_late,
        "failure_kinds": _kinds(lines),
        "repeated": sum(line["repeated"] for line in lines),
        "staleness": _all_staleness(lines),
        "devices": sorted({device for line in lines for device in line["devices"]}),
        "privacy": None if cost is None else cost.tables(),
        "epsilon_by_round": [line["epsilon"]["max"] for line in lines if line["epsilon"]],
        "versions": versions(),
    }
    if "auc" in scored[-1]:
        summary["auc"] = {"final": scored[-1]["auc"], "best": max(line["auc"] for line in scored)}
    return summary


def _by_owner(
    experiment: Experiment, members: Federation, strategy: SiteStrategy, evaluator: Evaluator
) -> dict[str, dict[str, float]]:
    """Return the scores on each natural client's own test records, of the model that it ends with."""
    train, test = members.dataset.train, members.dataset.test
    if not isinstance(experiment.data.partition, Natural) or train.owner is None or test.owner is None:
        return {}
    found = {}
    for client, part in enumerate(members.parts):  # where all are pooled, one part has many owners
        for owner in np.unique(train.owner[part]):
            rows = test.owner == owner
            if rows.any():
                scores = evaluator.scores(strategy.weights_of(client), rows)
                found[str(owner)] = {**scores, "test": int(rows.sum())}
    return found


def _mechanism(experiment: Experiment) -> str | None:
    """Name what makes it private, with what decides how much: runs that differ in ε alone have the same."""
    if experiment.mechanism is None:
        return None
    name = experiment.mechanism[1]
    variant = "" if experiment.privacy.variant == "proved" else f", {experiment.privacy.variant}"
    share = getattr(experiment.strategy, "upload_fraction", None)
    return f"{name}{variant}" + (f", θ_u = {share:g}" if isinstance(share, float) else "")


def _kinds(lines: Sequence[Line]) -> dict[str, int]:
    """Count failures by what was wrong: the words before the first colon or bracket, without numbers."""
    reasons = (re.split(r"[:(;,]", why)[0].strip() for line in lines for why in line["failures"].values())
    return dict(Counter(re.sub(r"\d+", "…", reason) for reason in reasons).most_common(20))


def _all_staleness(lines: Sequence[Line]) -> dict[str, float] | None:
    there = [(line["clients"]["uploaded"], line["staleness"]) for line in lines if line["staleness"]]
    if not there:
        return None
    uploads = sum(count for count, _ in there)
    mean = sum(count * found["mean"] for count, found in there) / uploads
    return {"mean": mean, "max": max(found["max"] for _, found in there)}


def _statement(
    experiment: Experiment,
    members: Federation,
    sites: Sequence[Site],
    events: dict[int, list[Event]],
    late: int,
    refused: int,
) -> Statement | None:
    budget = budget_of(experiment)
    if budget is None:
        return None
    return statement(
        events,
        delta=budget.delta,
        budget_epsilon=budget.epsilon,
        sites_per_record=members.sites_per_record,
        smallest_site=min((site.records for site in sites if site.records), default=1),
        rounds=experiment.rounds,
        late=late,
        refused=refused,
        deployed=not members.parts,
    )
