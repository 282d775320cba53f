"""Events: one frozen record per release. An event describes; `composition` interprets."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

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
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier > 0):
            raise PrivacyError(f"noise_multiplier = {self.noise_multiplier!r}: expected > 0 and finite")
        if not 0 < self.sample_rate <= 1:
            raise PrivacyError(f"sample_rate = {self.sample_rate!r}: expected in (0, 1]")
        if not (isinstance(self.steps, int) and self.steps >= 0):
            raise PrivacyError(f"steps = {self.steps!r}: expected a whole number ≥ 0")


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
        return tuple(
            Event(**{**item, "release": SampledGaussian(**item["release"])}) for item in json.loads(text)
        )
    except (TypeError, KeyError, ValueError) as error:
        raise PrivacyError(f"events are malformed: {error}") from None
