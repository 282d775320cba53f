"""What one turn of one site releases: agreed before the run, paid by the site, held to by the server."""

from __future__ import annotations

from dataclasses import dataclass

from fed_dp.accounting import (
    Budget,
    Event,
    Gaussian,
    Release,
    SampledGaussian,
    SparseVector,
    noise_multiplier,
    pure_share,
)
from fed_dp.accounting.composition import LEAST_NOISE
from fed_dp.experiment.schema import Dssgd, Experiment, Psgd
from fed_dp.mechanisms import NoiseSource, gaussian_multiplier
from fed_dp.sharing.selection import share

_VARIANTS = {
    "proved": "sparse_vector",
    "paper": "sparse_vector_paper",
    "paper_as_printed": "sparse_vector_as_printed",
}


@dataclass(frozen=True, slots=True)
class Agreement:
    """What every private upload of a client is: a release, under a guarantee, with noise from a source."""

    release: Release
    guarantee: str
    noise_source: NoiseSource

    def event(self, *, turn: int, client: int) -> Event:
        """Return the event of one turn."""
        return Event(self.release, self.guarantee, turn, client, self.noise_source)


def budget_of(experiment: Experiment) -> Budget | None:
    """Return what each site may spend; None where nothing is private."""
    privacy = experiment.privacy
    return None if privacy.budget_epsilon is None else Budget(privacy.budget_epsilon, privacy.delta or 0.0)


def agreement(experiment: Experiment, *, client: int, size: int) -> Agreement | None:
    """Return what a client's turn costs, such that all rounds together cost its budget; or None.

    `size` is the number of the model's parameters.
    """
    config, strategy, rounds = experiment.trainer, experiment.strategy, experiment.rounds
    budget, source = budget_of(experiment), experiment.privacy.noise_source
    if budget is None:
        return None
    if isinstance(config, Psgd):
        rate, steps = config.sample_rate, config.steps_per_round
        sigma = noise_multiplier(
            epsilon=budget.epsilon, delta=budget.delta, sample_rate=rate, steps=rounds * steps
        )
        return Agreement(SampledGaussian(sigma, rate, steps), "psgd", source)
    assert isinstance(strategy, Dssgd)  # by schema
    if strategy.selection == "random_mask":
        multiplier = gaussian_multiplier(epsilon=budget.epsilon, delta=budget.delta, releases=rounds)
        return Agreement(Gaussian(max(multiplier, LEAST_NOISE)), "random_mask", source)
    each = pure_share(epsilon=budget.epsilon, delta=budget.delta, releases=rounds)
    count = share(strategy.upload_share(client), size)
    return Agreement(SparseVector(each, count), _VARIANTS[experiment.privacy.variant], source)
