"""What one turn of one site releases: agreed before the run, made by the trainer, held to by the server."""

from __future__ import annotations

from fed_dp.accounting import SampledGaussian, noise_multiplier
from fed_dp.experiment.schema import Experiment, Psgd


def psgd_release(config: Psgd, *, budget_epsilon: float, delta: float, rounds: int) -> SampledGaussian:
    """Return the release of one round, with σ calibrated so that all rounds together cost the budget."""
    steps = config.steps_per_round
    sigma = noise_multiplier(
        epsilon=budget_epsilon, delta=delta, sample_rate=config.sample_rate, steps=rounds * steps
    )
    return SampledGaussian(sigma, config.sample_rate, steps)


def agreed_release(experiment: Experiment) -> SampledGaussian | None:
    """Return what every private upload of this experiment costs; None where nothing is private."""
    config, privacy = experiment.trainer, experiment.privacy
    if not isinstance(config, Psgd):
        return None
    assert privacy.budget_epsilon is not None  # by schema
    assert privacy.delta is not None
    return psgd_release(
        config, budget_epsilon=privacy.budget_epsilon, delta=privacy.delta, rounds=experiment.rounds
    )
