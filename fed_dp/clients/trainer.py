"""The trainer protocol: private local training is a trainer. Any trainer works under any strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from fed_dp.data.dataset import Floats
from fed_dp.mechanisms import Noise
from fed_dp.models import Vector

State = Mapping[str, list[float]]  # what a site keeps between rounds; never sent


@dataclass(frozen=True, slots=True)
class ClientData:
    """What a trainer may use: the site's records, and where in the run it is."""

    x: Floats
    y: NDArray[Any]
    client: int
    server_round: int
    seed: int
    expected_records: int = 0  # the public number that sums are divided by; 0: as many as there are

    def __post_init__(self) -> None:
        if not self.expected_records:
            object.__setattr__(self, "expected_records", len(self.y))


@dataclass(frozen=True, slots=True)
class Fit:
    """What a trainer returns.

    `change` and `metrics` are sent, so a trainer that adds noise puts nothing into `metrics` that is
    computed from records without it. `state` stays at the site.
    """

    change: Vector
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: State = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FitRequest:
    """What a trainer is asked for: one client's round."""

    weights: Vector
    data: ClientData
    state: State


class Trainer(Protocol):
    """One site's training of one round.

    `is_private` says whether its change is private: one fit is the release that was planned and charged
    before it began.
    """

    is_private: bool

    def fit(self, weights: Vector, data: ClientData, state: State) -> Fit:
        """Train from `weights` on the site's records; return the change of all parameters."""
        ...


@runtime_checkable
class ClientBatchTrainer(Protocol):
    """A trainer that can train several virtual clients at once, each from weights and records of its own."""

    clients_at_once: int  # how many at once are fastest; 1: none

    def fit_batch(self, requests: Sequence[FitRequest]) -> list[Fit]:
        """Return what `fit` returns for each, but for rounding."""
        ...


@runtime_checkable
class NoisedOnceTrainer(Protocol):
    """A trainer whose noise is drawn once, before its first fit, and is the same in every round.

    In a simulation it follows from the seed. At a real site it comes from the operating system, and the site
    keeps it where it keeps what it sent: drawn anew in every round, it would average out.
    """

    def draw(self, weights: Vector, data: ClientData, noise: Noise) -> Vector:
        """Return the noise of all rounds, and what it is scaled by where that depends on records."""
        ...

    def fit_with(self, drawn: Vector, weights: Vector, data: ClientData, state: State) -> Fit:
        """Fit as `fit` does, with what was drawn in place of seeded noise."""
        ...


@runtime_checkable
class StagedTrainer(Protocol):
    """A trainer that releases something about the records once, and trains on that alone ever after."""

    def stage(self, server_round: int) -> int:
        """Return the stage of a round, from 1."""
        ...

    def frozen(self, weights: Vector, stage: int) -> Vector:
        """Return the part of the weights that decides what is released in a stage."""
        ...

    def release(self, weights: Vector, data: ClientData, stage: int, noise: Noise | None) -> Vector:
        """Return what is released in a stage (from 1), with noise."""
        ...

    def follow(self, weights: Vector, released: Vector, stage: int, *, records: int) -> Fit:
        """Train on what was released; it is not given the records, so this is free."""
        ...
