"""The privacy statement of a run: the total first, with unit, neighbours, scope and standing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fed_dp.accounting.composition import pure_epsilon, total
from fed_dp.accounting.events import Charge, Event, SparseVector, Unprotected
from fed_dp.accounting.guarantee import WORST, common


@dataclass(frozen=True, slots=True)
class Statement:
    """What a run cost. `epsilon_total` covers the whole run for the record that paid most."""

    epsilon_total: float
    epsilon_per_round: float
    epsilon_per_parameter: float | None  # of one round; only where a release is of so many parameters
    epsilon_pure: float | None  # the total at δ = 0, where every release is pure
    delta: float
    budget_epsilon: float
    unit: str
    neighbours: str
    scope: str
    guarantee: str
    noise_source: str
    reason: str
    assumptions: tuple[str, ...]
    epsilon_by_site: dict[str, float]  # min, median, max
    sites_per_record: int
    warnings: tuple[str, ...] = ()
    rounds: int = 0
    rounds_free: int = 0  # because everything in them is computed from what was released before

    def __str__(self) -> str:
        """Return the statement for people."""
        return "\n".join(self.lines())

    def tables(self) -> dict[str, Any]:
        """Return the statement as plain tables."""
        return asdict(self)

    @property
    def noise(self) -> str:
        """The noise source, and what it is not good for."""
        warning = " (seeded, not secure: for simulation only)" if self.noise_source == "simulation" else ""
        return self.noise_source + warning

    @property
    def parts(self) -> str:
        """What smaller parts of the run cost: less than it, and no measure of it."""
        one = f"one round alone: ε = {number(self.epsilon_per_round)}"
        if self.rounds_free:
            return (
                f"a site pays in {self.rounds - self.rounds_free} of {self.rounds} rounds, at most ε = "
                f"{number(self.epsilon_per_round)} in one; the others are free"
            )
        if self.epsilon_per_parameter is None:
            return f"{one} at the same δ"
        return f"{one}; one parameter of one round: ε/c = {self.epsilon_per_parameter:.4g}"

    def lines(self) -> list[str]:
        """Return the statement for people: the total first."""
        pure = (
            ""
            if self.epsilon_pure in (None, self.epsilon_total)
            else f" ({number(self.epsilon_pure)} at δ = 0)"
        )
        return [
            f"privacy: total ε = {number(self.epsilon_total)}, δ = {self.delta:g}{pure} over the whole run "
            f"(budget {self.budget_epsilon:,.10g} per site); {self.guarantee}",
            f"  unit: one {self.unit}; neighbours: {self.neighbours}; scope: {self.scope}",
            f"  {self.parts}; noise: {self.noise}",
            f"  why: {self.reason}",
            *(f"  warning: {warning}" for warning in self.warnings),
        ]


def number(value: float | None) -> str:
    """Write an ε: three decimals where they say something."""
    if value is None:
        return "none"
    if math.isinf(value):
        return "∞ (no bound)"
    return f"{value:.3f}" if value < 1000 else f"{value:,.0f}"


def protects(events: Iterable[Event]) -> str:
    """Return whom a total of these events protects: the unit, and the neighbours it is composed for."""
    found = [event.stated for event in events if not isinstance(event.release, Unprotected)]
    relations = {guarantee.relation for guarantee in found}
    if (strongest := common(relations)) is None:
        return " and ".join(sorted({f"{guarantee.neighbours} {guarantee.unit}" for guarantee in found}))
    told = f"{strongest} record"
    if strongest == "replace one" and (others := relations - {None, strongest}):
        told += (
            f" (charges for {' or '.join(sorted(map(str, others)))} are composed with twice the sensitivity)"
        )
    return told + (" (some charges: replace one participant)" if None in relations else "")


def weakest(events: Iterable[Event]) -> str | None:
    """Return the weakest guarantee among releases with noise: of all of them together, no more holds."""
    found = (event.stated.status for event in events if not isinstance(event.release, Unprotected))
    return min(found, key=WORST.index, default=None)


def standing(events: Iterable[Event]) -> str:
    """Return what stands behind charges: the weakest guarantee among them, unit and neighbours."""
    listed = list(events)
    kept = [event for event in listed if not isinstance(event.release, Unprotected)]
    told = []
    if kept:
        told = [f"{weakest(kept)}; neighbours: {protects(kept)}"]
    for kind, words in (
        ("upload", "without noise: {} uploads, so that no ε bounds what was released"),
        ("scores", "without noise: scores on the test records, {} times"),
    ):
        if count := sum(event.release == Unprotected(kind) for event in listed):  # type: ignore[arg-type]
            told.append(words.format(count))
    return "; ".join(told)


def spent(events: Sequence[Event], *, delta: float) -> float:
    """Return the ε one site has spent over all its events."""
    return total((event.charge for event in events), delta=delta)


def spread(charges_by_site: Mapping[int, Mapping[Charge, int]], *, delta: float) -> dict[str, float]:
    """Return the smallest, the median and the largest ε over the sites that have spent any."""
    return _spread([total(charges, delta=delta) for charges in charges_by_site.values() if charges])


def _spread(each: Sequence[float]) -> dict[str, float]:
    return {"min": min(each), "median": statistics.median(each), "max": max(each)}


def statement(
    events_by_site: Mapping[int, Sequence[Event]],
    *,
    delta: float,
    budget_epsilon: float,
    sites_per_record: int,
    smallest_site: int,
    rounds: int = 0,
    late: int = 0,
    refused: int = 0,
    deployed: bool = False,
) -> Statement | None:
    """State what all sites' events cost; None where nothing was released.

    Sites that hold disjoint records compose in parallel: the total is the largest site's. A record
    held by k sites pays at each of them: the total then composes the k most expensive sites. So it
    holds for a record; for all records of one site at once, where a guarantee is of that unit, the
    site's own ε holds.
    """
    sites = {site: spent(events, delta=delta) for site, events in events_by_site.items() if events}
    if not sites:
        return None
    dearest = sorted(sites, key=lambda site: sites[site], reverse=True)[:sites_per_record]
    together = [event.charge for site in dearest for event in events_by_site[site]]
    everything = [event for events in events_by_site.values() for event in events]
    charges = {event.charge for event in everything}
    guarantees = {event.guarantee: event.stated for event in everything}.values()
    relation = common(relation for _, relation in charges)
    unit = "participant" if relation is None else "record"
    worst = min(guarantees, key=lambda guarantee: WORST.index(guarantee.status))
    each = [r.epsilon / r.count for r, _ in charges if isinstance(r, SparseVector)]
    by_site = _spread(list(sites.values()))
    return Statement(
        epsilon_total=total(together, delta=delta),
        epsilon_per_round=max(total([charge], delta=delta) for charge in charges),
        epsilon_per_parameter=max(each, default=None),
        epsilon_pure=pure_epsilon(together),
        delta=delta,
        budget_epsilon=budget_epsilon,
        unit=unit,
        neighbours=relation or "replace one",
        scope=_scope(unit, sites_per_record, by_site["max"]),
        guarantee=worst.status,
        noise_source=" and ".join(sorted({event.noise_source for event in everything})),
        reason="; ".join(dict.fromkeys(guarantee.reason for guarantee in guarantees)),
        assumptions=tuple(dict.fromkeys(a for guarantee in guarantees for a in guarantee.assumptions)),
        epsilon_by_site=by_site,
        sites_per_record=sites_per_record,
        warnings=(
            *_warnings(late, budget_epsilon, refused, worst.status, deployed),
            *_large_delta(delta, unit, smallest_site, len(events_by_site)),
        ),
        rounds=rounds,
        rounds_free=_free(everything, events_by_site, rounds),
    )


def _free(everything: Sequence[Event], events_by_site: Mapping[int, Sequence[Event]], rounds: int) -> int:
    if any(not event.guarantee.startswith("statistics") for event in everything):
        return 0
    return rounds - max(len({event.round for event in events}) for events in events_by_site.values())


def _scope(unit: str, sites_per_record: int, dearest: float) -> str:
    scope = "every message of the run, so also the final model; each site protects its own records"
    if sites_per_record > 1:
        scope += f"; a record is held by up to {sites_per_record} sites and pays at each"
        if unit == "participant":
            scope += f" (the records of one site alone, all together, cost ε = {number(dearest)})"
    return scope


def _large_delta(delta: float, unit: str, smallest_site: int, sites: int) -> Iterator[str]:
    """Warn of a δ that would be satisfied by publishing one of those it protects."""
    if unit == "participant":
        count, whose = sites, f"one over the number of sites: publishing all records of a {unit}"
    else:
        count, whose = smallest_site, f"one over the records of the smallest site: publishing a {unit}"
    if delta * count >= 1:
        yield f"δ = {delta:g} is not below 1/{count}, {whose} at random would satisfy it"


def _warnings(late: int, budget: float, refused: int, status: str, deployed: bool) -> tuple[str, ...]:
    found = []
    if deployed:
        found.append(
            "what the server has seen of this run alone: every site's own ledger tells what it spent in all; "
            "a person whose records several sites hold pays at each of them, which no site can count"
        )
    if status == "refuted":
        found.append("this guarantee is refuted: no ε holds, and the numbers above are only what is stated")
    if status == "claimed":
        found.append(
            "this guarantee is only claimed by its paper or author: no proof covers what is done here"
        )
    if late:
        found.append(
            f"{late} replies never came or came too late: what they released is metered by their sites "
            f"(each within its budget of {budget:g}), but is not in this total"
        )
    if refused:
        found.append(
            f"{refused} client-rounds went on without a site whose budget, ledger or own file refused: it "
            "sent nothing"
        )
    return tuple(found)
