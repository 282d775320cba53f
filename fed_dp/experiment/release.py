"""What a site releases, and when: agreed before the run, paid by the site, held to by the server."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fed_dp.accounting import (
    GUARANTEES,
    Budget,
    Event,
    Gaussian,
    Guarantee,
    Laplace,
    Release,
    SampledGaussian,
    SparseVector,
    noise_multiplier,
    pure_share,
)
from fed_dp.accounting.composition import LEAST_NOISE
from fed_dp.experiment.pairs import PAPER_MODELS
from fed_dp.experiment.schema import Dssgd, Experiment, Functional, Psgd, Svm
from fed_dp.mechanisms import NoiseSource, gaussian_multiplier
from fed_dp.mechanisms.statistics import Amount
from fed_dp.mechanisms.support_vector import SvmNoise
from fed_dp.sharing.selection import share

_VARIANTS = {
    "proved": "sparse_vector",
    "paper": "sparse_vector_paper",
    "paper_as_printed": "sparse_vector_as_printed",
}


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a client releases, under which guarantee, with noise from which source.

    Usually `release` in every turn. Where there are `stages`, stage s is released once, in turn s, the
    last in whichever turn a client comes to it; turns after that cost nothing.
    """

    release: Release
    guarantee: str
    noise_source: NoiseSource
    stages: tuple[Release, ...] = ()

    def stage(self, turn: int) -> int:
        """Return the stage of a turn, from 1; 0 where every turn is alike."""
        return min(turn, len(self.stages))

    def event(self, *, turn: int, client: int) -> Event:
        """Return the event of one turn."""
        release = self.stages[self.stage(turn) - 1] if self.stages else self.release
        return Event(release, self.guarantee, turn, client, self.noise_source)


def promise(experiment: Experiment) -> Guarantee | None:
    """Return what its releases promise; None where nothing is private."""
    if experiment.mechanism is None:
        return None
    _, name = experiment.mechanism
    if isinstance(experiment.trainer, Functional | Psgd | Svm):
        name = _name_of(experiment)
    elif name == "sparse_vector":
        name = _VARIANTS[experiment.privacy.variant]
    return GUARANTEES[name]


def banner(experiment: Experiment) -> str | None:
    """Return what must be said before a run whose privacy is not proved."""
    said = promise(experiment)
    if said is None or said.status == "proved":
        return None
    return f"NOT PROVED: privacy.variant = {experiment.privacy.variant!r} is {said.status}: {said.reason}"


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
        return Agreement(SampledGaussian(sigma, rate, steps), _name_of(experiment), source)
    if isinstance(config, Functional):
        return _functional(experiment, config, budget)
    if isinstance(config, Svm):
        return _svm(experiment, budget)
    assert isinstance(strategy, Dssgd)  # by schema
    if strategy.selection == "random_mask":
        multiplier = gaussian_multiplier(epsilon=budget.epsilon, delta=budget.delta, releases=rounds)
        return Agreement(Gaussian(max(multiplier, LEAST_NOISE)), "random_mask", source)
    each = pure_share(epsilon=budget.epsilon, delta=budget.delta, releases=rounds)
    count = share(strategy.upload_share(client), size)
    return Agreement(SparseVector(each, count), _VARIANTS[experiment.privacy.variant], source)


def amount(release: Release) -> Amount:
    """Return how much noise a release asks for."""
    if isinstance(release, Gaussian):
        return Amount("gaussian", release.noise_multiplier)
    assert isinstance(release, Laplace)  # by agreement
    return Amount("laplace", release.epsilon)


def svm_noise(experiment: Experiment) -> SvmNoise:
    """Return which noise the weights of a support vector machine get."""
    config, privacy = experiment.trainer, experiment.privacy
    assert isinstance(config, Svm)
    if privacy.variant != "proved":
        return "paper"
    if config.noise != "auto":
        return config.noise
    if privacy.delta is not None:
        return "gaussian"
    return "laplace" if privacy.noise_source == "secure" else "gamma"


def _svm(experiment: Experiment, budget: Budget) -> Agreement:
    release: Release = Laplace(budget.epsilon)
    if svm_noise(experiment) == "gaussian":
        release = Gaussian(_multiplier(budget))
    return Agreement(release, _name_of(experiment), experiment.privacy.noise_source, (release,))


def _multiplier(budget: Budget, share: float = 1.0) -> float:
    """Return σ/Δ of a release that costs a share of the budget, which must not be exceeded by rounding."""
    one = gaussian_multiplier(epsilon=budget.epsilon, delta=budget.delta) * (1 + 1e-11)
    return max(one / math.sqrt(share), LEAST_NOISE)


def _functional(experiment: Experiment, config: Functional, budget: Budget) -> Agreement:
    """Return the stages: of the proved form, one for each learnt layer, and the head; of a paper's, one.

    A paper's is the sum of what it charges to each layer and to the head.
    """
    source = experiment.privacy.noise_source
    if experiment.model.name in PAPER_MODELS:
        whole = Laplace(budget.epsilon)
        return Agreement(whole, _name_of(experiment), source, (whole,))
    learnt = experiment.model.learnt
    shares = [config.encoder_share] * learnt + [1 - config.encoder_share * learnt]
    stages: tuple[Release, ...]
    if budget.delta:
        stages = tuple(Gaussian(_multiplier(budget, share)) for share in shares)
    else:
        stages = tuple(Laplace(budget.epsilon * share) for share in shares)
    return Agreement(stages[-1], _name_of(experiment), source, stages)


def _name_of(experiment: Experiment) -> str:
    """Return the name of the guarantee of a trainer that adds noise: proved, or as its paper has it."""
    trainer, variant = experiment.trainer, experiment.privacy.variant
    if variant == "proved":
        if isinstance(trainer, Svm):
            return "svm"
        name = "psgd" if isinstance(trainer, Psgd) else "statistics"
        return name if experiment.data.expected_records is None else f"{name}_add_remove"
    stem = "adlm" if trainer.name == "ilm" else trainer.name
    return stem + variant.removeprefix("paper") if variant != "paper" else f"{stem}_paper"
