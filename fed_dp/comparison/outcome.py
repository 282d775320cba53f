"""What a comparison came to: means, intervals, paired tests against pSGD, and what each row cost.

Seeds pair runs: the same seed gives every mechanism the same partition of the records. p-values are of
paired t-tests, two-sided, and are adjusted for the number of them (Holm).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from scipy.stats import t as student

from fed_dp.comparison.run_cache import Done
from fed_dp.experiment.comparing import Plan
from fed_dp.experiment.plan import release_plan
from fed_dp.runs.folder import Line
from fed_dp.runs.groups import spread_of
from fed_dp.runs.scores import final, leading, metrics_of
from fed_dp.server.summary import versions
from fed_dp.tasks import ACCURACY, Metric

Row = dict[str, Any]


def outcome(plan: Plan, done: Sequence[Done], *, command: str) -> dict[str, Any]:
    """Return everything that the report, the tables and the figures are drawn from."""
    groups: dict[tuple[str, float | None], list[Done]] = {}
    for each in done:
        groups.setdefault((each.cell.variant, each.cell.epsilon), []).append(each)
    rows = [_row(variant, epsilon, each) for (variant, epsilon), each in groups.items()]
    whole = [row for row in rows if not row["failures"]]
    metric = leading([each.summary for each in done if each.summary])
    _test(whole, plan.baseline, metric.name)
    first = next((d.summary for d in done if d.summary), None)
    first_metric = ACCURACY if first is None else metrics_of(first)[0]
    return {
        "name": plan.name,
        "command": command,
        "score": metric.name,
        "metric": asdict(metric),
        "by_round": asdict(first_metric),
        "baseline": plan.baseline,
        "epsilons": list(plan.epsilons),
        "seeds": list(plan.seeds),
        "data": None
        if first is None
        else {**first["data"], "clients": plan.cells[0].experiment.clients.count},
        "rows": rows,
        "versions": {**versions(), "python": platform.python_version()},
        "experiments": {
            f"{each.cell.variant}, ε = {each.cell.epsilon}": each.cell.experiment.tables()
            for each in done
            if each.cell.seed == plan.seeds[0]
        },
    }


def _row(variant: str, epsilon: float | None, each: Sequence[Done]) -> Row:
    """Return one mechanism at one ε: all its seeds together."""
    there = [done for done in each if done.summary]
    row: Row = {
        "variant": variant,
        "epsilon": epsilon,
        "failures": {str(done.cell.seed): done.failure for done in each if done.failure},
        "kept": sum(done.kept for done in each),
    }
    if not there:
        return row
    summaries = [done.summary for done in there]
    first = summaries[0]
    told = spread_of(summaries)
    metrics = metrics_of(first)
    for metric in metrics:
        if metric.name in told:
            by_seed = {str(done.cell.seed): final(done.summary, metric) for done in there}
            row[metric.name] = {**told[metric.name], "by_seed": by_seed}
    costs = [summary["privacy"] for summary in summaries if summary["privacy"] is not None]
    return row | {
        "trainer": first["trainer"],
        "strategy": first["strategy"],
        "model": first["model"],
        "mechanism": first["mechanism"],
        "rounds": first["rounds"],
        "clients": first["clients"],
        "bytes": {
            key: float(np.mean([s["bytes"][key] for s in summaries])) for key in ("uploaded", "downloaded")
        },
        "seconds": told["seconds"],
        "privacy": max(costs, key=lambda cost: float(cost["epsilon_total"])) if costs else None,
        "epsilon_by_round": first["epsilon_by_round"],
        "paid_once": _paid_once(there[0]),
        "by_round": _by_round([done.lines for done in there], metrics[0]),
        "digests": {str(done.cell.seed): done.cell.experiment.digest for done in there},
        "notes": first["data"]["notes"],
    }


def _paid_once(done: Done) -> bool:
    """Return whether all is released in the rounds of the run, and any further round would be free."""
    plan = release_plan(done.cell.experiment, client=0, size=done.summary["model"]["parameters"])
    return plan is not None and not plan.goes_on and 0 < len(plan.stages) <= done.summary["rounds"]


def _by_round(lines: Sequence[Sequence[Line]], metric: Metric) -> list[dict[str, float]]:
    """Return the mean score after each round that was scored."""
    found: dict[int, list[float]] = {}
    for rounds in lines:
        for line in rounds:
            if metric.name in line:
                found.setdefault(line["round"], []).append(line[metric.name])
    return [
        {"round": server_round, metric.name: float(np.mean(values))}
        for server_round, values in sorted(found.items())
    ]


def _test(rows: Sequence[Row], baseline: str, score: str) -> None:
    """Compare every private row with pSGD at the same ε, seed by seed."""
    base = {row["epsilon"]: row for row in rows if row["variant"] == baseline}
    tested: list[Mapping[str, Any]] = []
    for row in rows:
        other = base.get(row["epsilon"])
        row["against_baseline"] = None
        if other is None or other is row:
            continue
        pairs = row[score]["by_seed"], other[score]["by_seed"]
        common = sorted(pairs[0].keys() & pairs[1].keys())
        row["against_baseline"] = paired(*([each[seed] for seed in common] for each in pairs))
        if row["against_baseline"]["p"] is not None:
            tested.append(row["against_baseline"])
    for found, adjusted in zip(tested, holm([found["p"] for found in tested]), strict=True):
        found["p_adjusted"] = adjusted  # type: ignore[index]


def paired(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float | list[float] | None]:
    """Return the mean difference, its 95 % interval and the two-sided p of the paired t-test.

    With one pair there is a difference alone; where all differences are equal, no test.
    """
    differences = np.subtract(ours, theirs)
    mean, count = float(differences.mean()), len(differences)
    found: dict[str, float | list[float] | None] = {
        "difference": mean,
        "interval": None,
        "p": None,
        "p_adjusted": None,
    }
    error = float(differences.std(ddof=1)) / count**0.5 if count > 1 else 0.0
    if error > 0:
        half = float(student.ppf(0.975, count - 1)) * error
        found["interval"] = [mean - half, mean + half]
        found["p"] = float(2 * student.sf(abs(mean) / error, count - 1))
    return found


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values adjusted such that the chance of any false alarm among them is as stated."""
    order = np.argsort(values)
    adjusted = np.zeros(len(values))
    largest = 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = largest
    return [float(value) for value in adjusted]
