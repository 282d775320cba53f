"""What a round and a whole run come to: the lines of metrics.jsonl, and summary.json."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from fed_dp.accounting import Event, Statement, spread, to_json
from fed_dp.accounting.events import Charge
from fed_dp.accounting.statement import statement
from fed_dp.experiment import Experiment
from fed_dp.experiment.federation import Federation
from fed_dp.experiment.plan import budget_of
from fed_dp.experiment.start import network_of
from fed_dp.runs.folder import Line
from fed_dp.runs.scores import scored
from fed_dp.strategies.failures import NO_REPLY, REFUSALS
from fed_dp.strategies.site_strategy import RoundStats, SiteStrategy
from fed_dp.strategies.sites import Site
from fed_dp.tasks import metric_tables
from fed_dp.version import __version__

EventsByClient = Mapping[int, Sequence[Event]]
BYTES = ("uploaded", "downloaded", "bound_uploaded", "bound_downloaded")


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    others = ("flwr", "torch", "opacus", "numpy", "scikit-learn", "dp-accounting")
    return {"fed-dp": __version__} | {package: version(package) for package in others}


def spent_by_sites(
    experiment: Experiment, charges: Mapping[int, Mapping[Charge, int]]
) -> dict[str, float] | None:
    """Return the least, the median and the most that sites have spent; None where nothing was."""
    budget = budget_of(experiment)
    return None if budget is None or not charges else spread(charges, delta=budget.delta)


def round_line(
    server_round: int,
    stats: RoundStats,
    scores: Mapping[str, float],
    seconds: float,
    cost: dict[str, float] | None,
) -> Line:
    """Return one round's line of metrics.jsonl."""
    return {
        "round": server_round,
        **scores,
        "epsilon": cost,
        "clients": {"asked": stats.asked, "uploaded": stats.uploads, "failed": len(stats.failed)},
        "repeated": stats.repeated,
        "late": stats.late,
        "failures": {
            str(client) if at == server_round else f"{client}, round {at}": failure.reason
            for (client, at), failure in sorted(stats.failed.items())
        },
        "failure_codes": dict(Counter(failure.code for failure in stats.failed.values())),
        "bytes": {
            "uploaded": stats.bytes_uploaded,
            "downloaded": stats.bytes_downloaded,
            "bound_uploaded": round(stats.bound_uploaded),
            "bound_downloaded": round(stats.bound_downloaded),
        },
        "staleness": _staleness(stats.staleness),
        "seconds": seconds,
        "devices": sorted(stats.devices),
        "events": to_json(stats.events),
    }


def run_summary(
    experiment: Experiment,
    federation: Federation,
    strategy: SiteStrategy,
    lines: Sequence[Line],
    events: EventsByClient,
) -> dict[str, Any]:
    """Return what summary.json says of a finished run."""
    rounds = scored(lines, experiment.task.metrics)
    metrics = [metric for metric in experiment.task.metrics if metric.name in rounds[-1]]
    scores = {
        metric.name: {
            "final": rounds[-1][metric.name],
            "best": metric.best([line[metric.name] for line in rounds if metric.name in line]),
        }
        for metric in metrics
    }
    asked = sum(line["clients"]["asked"] for line in lines)
    uploads = sum(line["clients"]["uploaded"] for line in lines)
    seconds = sum(line["seconds"] for line in lines)
    came_late = sum(line["late"] for line in lines)
    cost = _statement(experiment, federation, strategy.sites, lines, events)
    return {
        "experiment": experiment.name,
        "digest": experiment.digest,
        "data": _about_data(experiment, federation, strategy.sites),
        "model": {"name": experiment.model.name, "parameters": int(strategy.weights.size)},
        "trainer": experiment.trainer.name,
        "strategy": experiment.strategy.name,
        "decided": _decided(experiment, federation, strategy.sites),
        "mechanism": _mechanism(experiment),
        "clients": experiment.nodes,
        "rounds": experiment.rounds,
        "task": experiment.task.name,
        "metrics": metric_tables(metrics),
        "scores": scores,
        **{
            key: scores[key] for key in ("accuracy", "auc") if key in scores
        },  # as earlier versions wrote them
        "seconds": {"total": seconds, "per_client_round": seconds / uploads},
        "bytes": {
            **{key: sum(line["bytes"][key] for line in lines) for key in BYTES},
            "dense": 4 * int(strategy.weights.size) * asked,
        },
        "failures": sum(line["clients"]["failed"] for line in lines) - came_late,
        "late": came_late,
        "failure_kinds": _kinds(lines),
        "repeated": sum(line["repeated"] for line in lines),
        "staleness": _all_staleness(lines),
        "devices": sorted({device for line in lines for device in line["devices"]}),
        "privacy": None if cost is None else cost.tables(),
        "epsilon_by_round": _epsilon_by_round(lines),
        "versions": versions(),
    }


def _about_data(experiment: Experiment, federation: Federation, sites: Sequence[Site]) -> dict[str, Any]:
    parts = federation.parts
    train = len(np.unique(np.concatenate(parts))) if parts else sum(site.records for site in sites)
    return {
        "name": federation.dataset.name,
        "train": train,
        "test": len(federation.dataset.test),
        "partition": experiment.data.partition.name,
        "notes": list(federation.notes),
    }


def _epsilon_by_round(lines: Sequence[Line]) -> list[float]:
    """Return what was spent after each round: where it was not added up, what was by the next that was."""
    found: list[float] = []
    for line in reversed(lines):
        if line["epsilon"]:
            found.append(line["epsilon"]["max"])
        elif found:
            found.append(found[-1])
    return found[::-1]


def _decided(
    experiment: Experiment, federation: Federation, sites: Sequence[Site]
) -> dict[str, dict[str, float]]:
    """Return what the trainer decides itself from public numbers: over all sites, the least and most."""
    expected = {experiment.data.expected(site.client) or site.records for site in sites} - {0}
    network = network_of(experiment, federation)
    found = [experiment.trainer.decided(experiment, records=records, network=network) for records in expected]
    keys = dict.fromkeys(key for each in found for key in each)
    return {
        key: {"min": min(each[key] for each in found), "max": max(each[key] for each in found)}
        for key in keys
    }


def _mechanism(experiment: Experiment) -> str | None:
    """Name what makes it private, with what decides how much: runs that differ in ε alone have the same."""
    if experiment.mechanism is None:
        return None
    variant = experiment.privacy.variant
    parts = [experiment.mechanism[1], *([] if variant == "proved" else [variant])]
    parts += [experiment.strategy.upload_summary] if experiment.strategy.upload_summary else []
    return ", ".join(parts)


def _kinds(lines: Sequence[Line]) -> dict[str, int]:
    """Count failures by what was wrong: the words before the first colon or bracket, without numbers."""
    reasons = (re.split(r"[:(;,]", why)[0].strip() for line in lines for why in line["failures"].values())
    return dict(Counter(re.sub(r"\d+", "…", reason) for reason in reasons).most_common(20))


def _codes(line: Line) -> Mapping[str, int]:
    """Return how many failures a round had of each code; earlier versions wrote reasons alone."""
    if "failure_codes" in line:
        return dict(line["failure_codes"])
    return {NO_REPLY.code: sum(why == NO_REPLY.reason for why in line["failures"].values())}


def _staleness(found: Sequence[int]) -> dict[str, float] | None:
    return {"mean": sum(found) / len(found), "max": max(found)} if found else None


def _all_staleness(lines: Sequence[Line]) -> dict[str, float] | None:
    there = [(line["clients"]["uploaded"], line["staleness"]) for line in lines if line["staleness"]]
    if not there:
        return None
    uploads = sum(count for count, _ in there)
    mean = sum(count * found["mean"] for count, found in there) / uploads
    return {"mean": mean, "max": max(found["max"] for _, found in there)}


def _statement(
    experiment: Experiment,
    federation: Federation,
    sites: Sequence[Site],
    lines: Sequence[Line],
    events: EventsByClient,
) -> Statement | None:
    budget = budget_of(experiment)
    if budget is None:
        return None
    codes: Counter[str] = Counter()
    for line in lines:
        codes.update(_codes(line))
    return statement(
        events,
        delta=budget.delta,
        budget_epsilon=budget.epsilon,
        sites_per_record=federation.sites_per_record,
        smallest_site=min((site.records for site in sites if site.records), default=1),
        rounds=experiment.rounds,
        late=codes[NO_REPLY.code] - sum(line["late"] for line in lines),
        refused=sum(codes[code] for code in REFUSALS),
        deployed=not federation.parts,
    )
