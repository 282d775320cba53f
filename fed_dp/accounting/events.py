"""Events: one frozen record per release. An event describes; `composition` interprets."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from fed_dp.accounting.guarantee import Guarantee, Neighbours, declared, guarantee
from fed_dp.errors import PrivacyError
from fed_dp.mechanisms import NoiseSource


@dataclass(frozen=True, slots=True)
class Laplace:
    """A release that is ε-DP by Laplace noise."""

    epsilon: float
    mechanism: str = field(default="laplace", init=False, repr=False)

    def __post_init__(self) -> None:
        _in_range("epsilon", self.epsilon, 1e-9, 2e9)

    @property
    def pure(self) -> float:
        """Its ε at δ = 0."""
        return self.epsilon


@dataclass(frozen=True, slots=True)
class SparseVector:
    """A release of at most `count` of many values, ε-DP as a whole, however many it yields."""

    epsilon: float
    count: int  # c
    mechanism: str = field(default="sparse_vector", init=False, repr=False)

    def __post_init__(self) -> None:
        _in_range("epsilon", self.epsilon, 1e-9, 2e9)
        _whole("count", self.count, least=1)

    @property
    def pure(self) -> float:
        """Its ε at δ = 0."""
        return self.epsilon


@dataclass(frozen=True, slots=True)
class Gaussian:
    """A vector of sensitivity Δ plus N(0, (σΔ)²)."""

    noise_multiplier: float  # σ
    mechanism: str = field(default="gaussian", init=False, repr=False)
    pure = None

    def __post_init__(self) -> None:
        _in_range("noise_multiplier", self.noise_multiplier, 1e-3, 1e6)


@dataclass(frozen=True, slots=True)
class SampledGaussian:
    """`steps` sums over Poisson samples (each record with chance q), clipped to C, plus N(0, σ²C²)."""

    noise_multiplier: float  # σ
    sample_rate: float  # q
    steps: int
    mechanism: str = field(default="sampled_gaussian", init=False, repr=False)
    pure = None

    def __post_init__(self) -> None:
        _in_range("noise_multiplier", self.noise_multiplier, 1e-3, 1e6)  # beyond, accountants overflow
        if not 0 < self.sample_rate <= 1:
            raise PrivacyError(f"sample_rate = {self.sample_rate!r}: expected in (0, 1]")
        _whole("steps", self.steps, least=0)


@dataclass(frozen=True, slots=True)
class Unprotected:
    """A release without noise: an upload of an experiment that protects nobody, or scores on test records."""

    of: Literal["upload", "scores"]
    mechanism: str = field(default="none", init=False, repr=False)
    pure = math.inf

    def __post_init__(self) -> None:
        if self.of not in ("upload", "scores"):
            raise PrivacyError(f"of = {self.of!r}: expected upload or scores")


Release = Laplace | SparseVector | Gaussian | SampledGaussian | Unprotected
_RELEASES: dict[str, type[Release]] = {
    "laplace": Laplace,
    "sparse_vector": SparseVector,
    "gaussian": Gaussian,
    "sampled_gaussian": SampledGaussian,
    "none": Unprotected,
}


Charge = tuple[Release, Neighbours | None]  # None: for any change of a site's records


def plain(item: Any) -> dict[str, Any]:
    """Return a flat dataclass with slots as a table (as `asdict`, but ten times as fast)."""
    return {name: getattr(item, name) for name in item.__slots__}


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not (isinstance(value, float | int) and low <= value <= high):
        raise PrivacyError(f"{name} = {value!r}: expected in [{low:g}, {high:g}]")


def _whole(name: str, value: int, *, least: int) -> None:
    if not (type(value) is int and least <= value <= 10**9):
        raise PrivacyError(f"{name} = {value!r}: expected a whole number from {least} to 1e9")


@dataclass(frozen=True, slots=True)
class Event:
    """One release by one client in one round, under a named guarantee, with named noise."""

    release: Release
    guarantee: str
    round: int
    client: int
    noise_source: NoiseSource | Literal["none"]

    def __post_init__(self) -> None:
        """Refuse what could be written and not be read again: a ledger would be lost with it."""
        for key in ("round", "client"):
            if type(value := getattr(self, key)) is not int or not 0 <= value < 2**63:
                raise PrivacyError(f"{key} = {value!r}: expected a whole number from 0")

    @property
    def charge(self) -> Charge:
        """The release, and for which neighbours it is charged."""
        return self.release, self.stated.relation

    @property
    def stated(self) -> Guarantee:
        """The guarantee in full."""
        return guarantee(self.guarantee)

    def tables(self) -> dict[str, Any]:
        """Return the event as plain tables."""
        return {**plain(self), "release": plain(self.release)}


def to_json(events: Iterable[Event]) -> str:
    """Write events for the wire."""
    return json.dumps([event.tables() for event in events])


def from_json(text: str) -> tuple[Event, ...]:
    """Read events from the wire; anything malformed is a PrivacyError."""
    try:
        return tuple(event_of(item) for item in json.loads(text))
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
        raise PrivacyError(f"events are malformed: {error}") from None


def release_of(item: dict[str, Any]) -> Release:
    """Read a release from plain tables."""
    fields = dict(item)
    return _RELEASES[fields.pop("mechanism")](**fields)


def event_of(item: dict[str, Any]) -> Event:
    """Read an event from plain tables."""
    event = Event(**{**item, "release": release_of(item["release"])})
    if declared(event.guarantee) is None:
        raise ValueError(f"guarantee = {event.guarantee!r}")
    noise: tuple[str, ...] = ("none",) if event.release.mechanism == "none" else get_args(NoiseSource)
    if event.noise_source not in noise or (event.guarantee == "none") != (noise == ("none",)):
        raise ValueError(f"noise_source = {event.noise_source!r}")
    return event
