"""The privacy statement of a run: the total first, with unit, neighbours, scope and standing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fed_dp.accounting.composition import epsilon
from fed_dp.accounting.events import Event

_WORST = ("refuted", "claimed", "proved")
ASSUMPTIONS = (
    "the number of records of each site is public",
    "bounds, categories and standardisation constants are public",
    "test records are the server's and are not protected: every score is computed on them as they are",
    "choosing hyper-parameters is not counted",
)


@dataclass(frozen=True, slots=True)
class Statement:
    """What a run cost. `epsilon_total` covers the whole run for the record that paid most."""

    epsilon_total: float
    epsilon_per_round: float
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

    def tables(self) -> dict[str, Any]:
        """Return the statement as plain tables."""
        return asdict(self)

    @property
    def noise(self) -> str:
        """The noise source, and what it is not good for."""
        warning = " (seeded, not secure: for simulation only)" if self.noise_source == "simulation" else ""
        return self.noise_source + warning

    def lines(self) -> list[str]:
        """Return the statement for people: the total first."""
        return [
            f"privacy: total ε = {self.epsilon_total:.3f}, δ = {self.delta:g} over the whole run "
            f"(budget {self.budget_epsilon:g} per site); {self.guarantee}",
            f"  unit: one {self.unit}; neighbours: {self.neighbours}; scope: {self.scope}",
            f"  one round alone: ε = {self.epsilon_per_round:.3f} at the same δ; noise: {self.noise}",
            f"  why: {self.reason}",
            *(f"  warning: {warning}" for warning in self.warnings),
        ]


def spent(events: Sequence[Event], *, delta: float) -> float:
    """Return the ε one site has spent over all its events."""
    return epsilon((event.release for event in events), delta=delta)


def spread(events_by_site: Mapping[int, Sequence[Event]], *, delta: float) -> dict[str, float]:
    """Return the smallest, the median and the largest ε over the sites that have spent any."""
    each = [spent(events, delta=delta) for events in events_by_site.values() if events]
    return {"min": min(each), "median": statistics.median(each), "max": max(each)}


def statement(
    events_by_site: Mapping[int, Sequence[Event]],
    *,
    delta: float,
    budget_epsilon: float,
    sites_per_record: int,
    smallest_site: int,
    noise_source: str,
    late: int = 0,
) -> Statement | None:
    """State what all sites' events cost; None where nothing was released.

    Sites that hold disjoint records compose in parallel: the total is the largest site's. A record
    held by k sites pays at each of them: the total then composes the k most expensive sites.
    """
    sites = {site: spent(events, delta=delta) for site, events in events_by_site.items() if events}
    if not sites:
        return None
    dearest = sorted(sites, key=lambda site: sites[site], reverse=True)[:sites_per_record]
    together = [event for site in dearest for event in events_by_site[site]]
    everything = [event for events in events_by_site.values() for event in events]
    first = everything[0]
    single = max(epsilon([release], delta=delta) for release in {event.release for event in everything})
    scope = "every message of the run, so also the final model; each site protects its own records"
    if sites_per_record > 1:
        scope += f"; a record is held by up to {sites_per_record} sites and pays at each"
    return Statement(
        epsilon_total=spent(together, delta=delta),
        epsilon_per_round=single,
        delta=delta,
        budget_epsilon=budget_epsilon,
        unit=first.unit,
        neighbours=first.neighbours,
        scope=scope,
        guarantee=min((event.guarantee for event in everything), key=_WORST.index),
        noise_source=noise_source,
        reason=first.reason,
        assumptions=ASSUMPTIONS,
        epsilon_by_site=spread(events_by_site, delta=delta),
        sites_per_record=sites_per_record,
        warnings=_warnings(delta, smallest_site, late, budget_epsilon),
    )


def _warnings(delta: float, smallest_site: int, late: int, budget: float) -> tuple[str, ...]:
    found = []
    if delta * smallest_site >= 1:
        found.append(
            f"δ = {delta:g} is not below 1/{smallest_site}, one over the records of the smallest site: "
            "publishing a record at random would satisfy it"
        )
    if late:
        found.append(
            f"{late} replies never came or came too late: what they released is metered by their sites "
            f"(each within its budget of {budget:g}), but is not in this total"
        )
    return tuple(found)
