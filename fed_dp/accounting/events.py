"""Events: one frozen record per release. An event describes; `composition` interprets."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from fed_dp.errors import PrivacyError

Status = Literal["proved", "claimed", "refuted"]
Unit = Literal["record", "participant"]
Neighbours = Literal["add/remove one", "replace one"]


@dataclass(frozen=True, slots=True)
class SampledGaussian:
    """`steps` sums over Poisson samples (each record with chance q), clipped to C, plus N(0, σ²C²)."""

    noise_multiplier: float  # σ
    sample_rate: float  # q
    steps: int

    def __post_init__(self) -> None:
        if not 1e-3 <= self.noise_multiplier <= 1e6:  # beyond, accountants overflow
            raise PrivacyError(f"noise_multiplier = {self.noise_multiplier!r}: expected in [0.001, 1e6]")
        if not 0 < self.sample_rate <= 1:
            raise PrivacyError(f"sample_rate = {self.sample_rate!r}: expected in (0, 1]")
        if not (type(self.steps) is int and 0 <= self.steps <= 10**9):
            raise PrivacyError(f"steps = {self.steps!r}: expected a whole number from 0 to 1e9")


@dataclass(frozen=True, slots=True)
class Event:
    """One release by one client in one round, with the standing of its guarantee."""

    release: SampledGaussian
    round: int
    client: int
    unit: Unit
    neighbours: Neighbours
    guarantee: Status
    reason: str


def to_json(events: Iterable[Event]) -> str:
    """Write events for the wire."""
    return json.dumps([asdict(event) for event in events])


def from_json(text: str) -> tuple[Event, ...]:
    """Read events from the wire; anything malformed is a PrivacyError."""
    try:
        return tuple(_event(item) for item in json.loads(text))
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
        raise PrivacyError(f"events are malformed: {error}") from None


def _event(item: dict[str, Any]) -> Event:
    event = Event(**{**item, "release": SampledGaussian(**item["release"])})
    for key, allowed in (("unit", Unit), ("neighbours", Neighbours), ("guarantee", Status)):
        if (value := getattr(event, key)) not in get_args(allowed):
            raise ValueError(f"{key} = {value!r}")
    for key in ("round", "client"):
        if type(value := getattr(event, key)) is not int or value < 0:
            raise ValueError(f"{key} = {value!r}")
    if not isinstance(event.reason, str) or len(event.reason) > 1000:
        raise ValueError("reason is no text of at most 1000 characters")
    return event
