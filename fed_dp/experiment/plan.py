"""What a client releases, and when: planned before the run, paid by the site, held to by the server."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fed_dp.accounting import Budget, Event, Gaussian, Guarantee, Laplace, Release
from fed_dp.accounting.composition import MIN_NOISE_MULTIPLIER
from fed_dp.accounting.events import Charge
from fed_dp.mechanisms import NoiseSource, gaussian_multiplier
from fed_dp.mechanisms.statistics import NoiseSpec

if TYPE_CHECKING:
    from fed_dp.experiment.schema import Experiment


@dataclass(frozen=True, slots=True)
class ReleasePlan:
    """What a client releases, under which guarantee, with noise from which source.

    Usually `release` in every round. Where there are `stages`, stage s is released once, in round s, the
    last in whichever round a client comes to it; rounds after that cost nothing. Unless it `goes_on`: then
    every round after the stages releases `release`.
    """

    release: Release
    guarantee: str
    noise_source: NoiseSource
    stages: tuple[Release, ...] = ()
    goes_on: bool = False

    def stage(self, server_round: int) -> int:
        """Return the stage of a round, from 1; 0 where what it releases is released in that round alone."""
        if self.goes_on and server_round > len(self.stages):
            return 0
        return min(server_round, len(self.stages))

    def event(self, *, server_round: int, client: int) -> Event:
        """Return the event of one round."""
        stage = self.stage(server_round)
        release = self.stages[stage - 1] if stage else self.release
        return Event(release, self.guarantee, server_round, client, self.noise_source)

    def charges(self, rounds: int) -> dict[Charge, int]:
        """Return what so many rounds are charged: each kind of release, and how often."""
        last = rounds if self.goes_on or not self.stages else len(self.stages)
        return Counter(self.event(server_round=r, client=0).charge for r in range(1, last + 1))


def guarantee_of(experiment: Experiment) -> Guarantee | None:
    """Return the guarantee of its releases; None where nothing is private."""
    source = experiment.noisy_part
    return None if source is None else source.guarantee(experiment)


def warning_of(experiment: Experiment) -> str | None:
    """Return what must be said before a run whose privacy is not proved."""
    guarantee = guarantee_of(experiment)
    if guarantee is None or guarantee.status == "proved":
        return None
    variant, (key, name) = experiment.privacy.variant, experiment.mechanism or ("", "")
    which = f"{key} = {name!r}" if variant == "proved" else f"privacy.variant = {variant!r}"
    return f"NOT PROVED: {which} is {guarantee.status}: {guarantee.reason}"


def budget_of(experiment: Experiment) -> Budget | None:
    """Return what each site may spend; None where nothing is private."""
    privacy = experiment.privacy
    return None if privacy.budget_epsilon is None else Budget(privacy.budget_epsilon, privacy.delta or 0.0)


def release_plan(experiment: Experiment, *, client: int, size: int) -> ReleasePlan | None:
    """Return what a client releases; None where nothing is private. `size`: the model's parameters."""
    source = experiment.noisy_part
    return None if source is None else source.release_plan(experiment, client=client, size=size)


def noise_spec(release: Release) -> NoiseSpec:
    """Return how much noise a release asks for."""
    if isinstance(release, Gaussian):
        return NoiseSpec("gaussian", release.noise_multiplier)
    assert isinstance(release, Laplace)  # by its plan
    return NoiseSpec("laplace", release.epsilon)


def one_multiplier(budget: Budget, share: float = 1.0) -> float:
    """Return σ/Δ of a release that costs a share of the budget, which must not be exceeded by rounding."""
    one = gaussian_multiplier(epsilon=budget.epsilon, delta=budget.delta) * (1 + 1e-11)
    return max(one / math.sqrt(share), MIN_NOISE_MULTIPLIER)
