"""Audits of trainers: two worlds that differ in one record (or in all, where a participant is protected).

The trainer is the one that an experiment would run, with its own noise, many times in each world. The
attacker knows everything but the noise and the world: what is released is projected on the difference
that there would be without noise, every number weighed by how noisy it is. The papers' forms that share
noise are attacked by eliminating it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fed_dp import plugins, seeds
from fed_dp.accounting import SampledGaussian
from fed_dp.audit.bounds import check_confidence, sampled, two_worlds
from fed_dp.audit.finding import Finding, stated
from fed_dp.audit.mechanisms import check_numbers
from fed_dp.clients.adlm.perturbed import INPUT_LIMIT
from fed_dp.clients.adlm.trainer import AdlmTrainer
from fed_dp.clients.building import make_trainer
from fed_dp.clients.functional.perturbed import PerturbedTrainer, head_residual
from fed_dp.clients.trainer import ClientData, StagedTrainer, Trainer
from fed_dp.clients.update_exchange import UpdateExchange
from fed_dp.data.dataset import Floats, Integers
from fed_dp.errors import ConfigError
from fed_dp.experiment import Experiment, build
from fed_dp.experiment.components import Attack, AuditSetup, Mechanism, Tables
from fed_dp.experiment.federation import make_federation
from fed_dp.experiment.plan import ReleasePlan, guarantee_of, release_plan
from fed_dp.experiment.schema import DEFAULTS
from fed_dp.experiment.source import merged
from fed_dp.experiment.start import starting_weights
from fed_dp.mechanisms import SimulationNoise
from fed_dp.mechanisms.noise import Reals
from fed_dp.models import FlatNetwork, Vector, use_one_thread
from fed_dp.sharing.codec import decode

DELTA = 1e-5  # where noise needs one and none is given
CALIBRATION = 64  # runs from which the size of the noise is learnt; none of them is a trial
Transcript = NDArray[np.float64]
World = tuple[Floats, Integers]
Score = Callable[[Transcript], float]  # which is not told the world


class Scaled(SimulationNoise):
    """Noise times a factor, to see whether an audit notices."""

    def __init__(self, rng: np.random.Generator, factor: float) -> None:
        super().__init__(rng)
        self._factor = factor

    def laplace(self, values: Reals, *, scale: float) -> NDArray[np.float64]:
        """Add Laplace noise."""
        return super().laplace(values, scale=scale * self._factor)

    def gaussian(self, values: Reals, *, scale: float) -> NDArray[np.float64]:
        """Add Gaussian noise."""
        return super().gaussian(values, scale=scale * self._factor)

    def spherical(self, values: Reals, *, scale: float) -> NDArray[np.float64]:
        """Add noise of random direction."""
        return super().spherical(values, scale=scale * self._factor)


@dataclass(frozen=True, slots=True)
class Stage:
    """A trainer with everything that an attacker knows: the start, and the records of both worlds."""

    experiment: Experiment
    trainer: Trainer
    net: FlatNetwork
    weights: Vector
    worlds: tuple[World, World]  # without the canary, and with it
    plan: ReleasePlan
    attack: Attack
    factor: float = 1.0

    def site(self, world: bool, seed: int) -> ClientData:
        """Return the site of a world."""
        x, y = self.worlds[world]
        return ClientData(x, y, client=0, server_round=1, seed=seed, expected_records=self.expected)

    @property
    def expected(self) -> int:
        """What both worlds' sums are divided by: a null record stands in the place of an absent one."""
        return max(len(y) for _, y in self.worlds)


def audit_trainer(
    name: str,
    *,
    variant: str = "proved",
    epsilon: float = 1.0,
    delta: float | None = None,
    trials: int = 500,
    seed: int = 1,
    factor: float = 1.0,
    confidence: float = 0.95,
    path: str | None = None,
) -> Finding:
    """Audit a trainer in one of its forms: a lower bound on ε from `trials` runs in each of two worlds.

    `path` is one of pSGD's ways of computing (`fed_dp.audit.psgd.PATHS`).
    """
    stage = prepare(name, variant=variant, epsilon=epsilon, delta=delta, factor=factor, seed=seed, path=path)
    guarantee = guarantee_of(stage.experiment)
    assert guarantee is not None  # by setup
    if trials < 20:
        raise ConfigError(f"--trials = {trials}: expected at least 20 trials in each world")
    check_confidence(confidence)
    use_one_thread()
    draw, score, attack = _attack(stage, seed)

    present, absent = sampled(
        lambda rng, world: score(draw(rng, world)), trials=trials, seed=seeds.integer(seed, "audit")
    )
    at = stage.experiment.privacy.delta or 0.0
    return Finding(
        f"trainer {name}" + ("" if variant == "proved" else f", {variant}") + (f", {path}" if path else ""),
        stated(guarantee.name),
        claim=epsilon,
        delta=at,
        bound=two_worlds(present, absent, delta=at, confidence=confidence),
        confidence=confidence,
        attack=attack,
        trials=2 * trials,
        seed=seed,
        noise=factor,
    )


def setups() -> dict[str, Mapping[str, AuditSetup]]:
    """Return the smallest experiments of all trainers and private selections, by name and variant."""
    kinds: tuple[plugins.Kind, ...] = ("trainer", "strategy")
    return {
        name: variants
        for kind in kinds
        for component in plugins.components(kind).values()
        for name, variants in component.audits().items()
    }


def prepare(
    name: str,
    *,
    variant: str = "proved",
    epsilon: float = 1.0,
    delta: float | None = None,
    factor: float = 1.0,
    seed: int = 1,
    path: str | None = None,
) -> Stage:
    """Build the experiment, its trainer, and the two worlds."""
    setup = _setup(name, variant)
    check_numbers(epsilon=epsilon, delta=delta, noise=factor)
    tables: dict[str, Any] = {"rounds": 1, "clients": {"count": 1}, **setup.tables}
    if ":" in name:
        tables["trainer"] = {**tables["trainer"], "name": name}
    if delta is None and _noisy_part(tables).requires_delta:
        delta = DELTA
    privacy: dict[str, Any] = {"budget_epsilon": float(epsilon), "variant": variant}
    tables |= {
        "privacy": privacy | ({"delta": delta} if delta else {}),
        "name": f"audit-{name}",
        "seed": seed,
    }
    if path is not None:
        tables = merged(tables, _path(name, setup, path))
    experiment = build(tables, where=f"audit trainer {name}")
    federation = make_federation(experiment)
    trainer, net = make_trainer(experiment, federation.dataset)
    plan = release_plan(experiment, client=0, size=net.size)
    guarantee = guarantee_of(experiment)
    assert plan is not None  # every setup adds noise
    assert guarantee is not None
    if factor != 1:
        trainer = _weakened(trainer, experiment, net, plan, factor)
    x, y = federation.client(0)
    worlds = _worlds(x, y, setup.records, guarantee.unit, guarantee.neighbours)
    weights = starting_weights(experiment, federation)
    return Stage(experiment, trainer, net, weights, worlds, plan, setup.attack, factor)


def _setup(name: str, variant: str) -> AuditSetup:
    known = setups()
    if ":" in name:  # the import path of a trainer
        known[name] = next(iter(plugins.find("trainer", name).audits().values()), {})
    if name not in known:
        raise ConfigError(f"trainer {name!r} is not known; known: {', '.join(known)}")
    if variant not in known[name]:
        raise ConfigError(f"--variant = {variant!r}: trainer {name!r} has {', '.join(known[name])}")
    return known[name][variant]


def _path(name: str, setup: AuditSetup, path: str) -> Tables:
    if path not in setup.paths:
        has = f"has {', '.join(setup.paths)}" if setup.paths else "has none"
        raise ConfigError(f"--path = {path!r}: trainer {name!r} {has}")
    return setup.paths[path]


def _noisy_part(tables: Tables) -> Mechanism:
    """Return the part of a setup that adds noise: its strategy's selection, or its trainer."""
    strategy: Mechanism = plugins.read("strategy", tables.get("strategy", {}), default=DEFAULTS["strategy"])
    trainer: Mechanism = plugins.read("trainer", tables["trainer"])
    return trainer if strategy.mechanism is None else strategy


def _weakened(
    trainer: Trainer, experiment: Experiment, net: FlatNetwork, plan: ReleasePlan, factor: float
) -> Trainer:
    """Return a trainer that draws its noise elsewhere than from what it is given with less of it."""
    if not trainer.is_private or isinstance(trainer, StagedTrainer):
        return trainer  # its noise comes from outside, scaled
    if not isinstance(plan.release, SampledGaussian):
        raise ConfigError(f"--noise = {factor:g}: the papers' forms draw their own noise; allowed: 1")
    less = replace(plan.release, noise_multiplier=plan.release.noise_multiplier * factor)
    weak: Trainer = experiment.trainer.build(
        experiment, FlatNetwork(net.spec, net.device), replace(plan, release=less)
    )
    return weak


def _worlds(x: Floats, y: Integers, count: int, unit: str, neighbours: str) -> tuple[World, World]:
    """Return the records of both worlds.

    The canary is the negative of a record under a wrong label. Where neighbours replace one, it takes
    the place of that record, and else it is one more;
    where a participant is protected, all its records are others.
    """
    one = (x[:count], y[:count])
    if unit == "participant":
        return one, (-x[count : 2 * count], (y[count : 2 * count] + 1) % 10)
    canary = -x[:1], (y[:1] + 5) % 10
    rest = (one[0][1:], one[1][1:]) if neighbours == "replace one" else one
    return one, (np.concatenate([canary[0], rest[0]]), np.concatenate([canary[1], rest[1]]))


# ------------------------------------------------------------------------------------ attacks

Draw = Callable[[np.random.Generator, bool], Transcript]


def _attack(stage: Stage, seed: int) -> tuple[Draw, Score, str]:
    """Return what draws transcripts, the score, and the attack in words."""
    if stage.attack == "inputs":
        return *_differences(stage), (
            "on the noisy inputs, which the paper calls private and which are not sent: noise elimination; "
            "what all have in common is subtracted under each hypothesis, and that which leaves less is taken"
        )
    if stage.attack == "residual":
        return *_residuals(stage), (
            "noise elimination: the intercept holds the shared noise, so the released head is a noiseless "
            "fit to the records of one world and not of the other"
        )
    if stage.attack == "bounds":
        return *_bounds_of(stage), (
            "the smallest and largest activations that ship with the model, computed again under each "
            "hypothesis"
        )
    draw = _draw(stage)
    return (
        draw,
        _projection(stage, draw, seed),
        ("two worlds: what is released, projected on the difference that there is without noise"),
    )


def _draw(stage: Stage) -> Draw:
    """Return what draws one transcript: all that leaves the site in all rounds."""
    experiment, trainer = stage.experiment, stage.trainer
    if isinstance(trainer, StagedTrainer):

        def released(rng: np.random.Generator, world: bool) -> Transcript:
            noise = Scaled(rng, stage.factor)
            site = stage.site(world, 0)
            stages = range(1, experiment.rounds + 1)
            parts = [trainer.release(stage.weights, site, number, noise) for number in stages]
            return np.concatenate(parts).astype(np.float64)

        return released
    if not trainer.is_private:  # the selection is what adds noise
        exchange = UpdateExchange.of(experiment, 0, stage.net.size, stage.plan.release)
        changes = [trainer.fit(stage.weights, stage.site(world, 0), {}).change for world in (False, True)]

        def uploaded(rng: np.random.Generator, world: bool) -> Transcript:
            noise = Scaled(rng, stage.factor)
            data = exchange.upload(changes[world], seed=0, server_round=1, client=0, noise=noise)
            update = decode(data, size=stage.net.size, most=stage.net.size)
            found = np.zeros(stage.net.size, np.float32)
            update.overwrite(found)
            return found.astype(np.float64)

        return uploaded

    def fitted(rng: np.random.Generator, world: bool) -> Transcript:
        site = stage.site(world, int(rng.integers(2**62)))
        return trainer.fit(stage.weights, site, {}).change.astype(np.float64)

    return fitted


def _projection(stage: Stage, draw: Draw, seed: int) -> Score:
    """Return Fisher's score: the noiseless difference of the worlds over the noise's variance."""
    difference = _noiseless(stage, True) - _noiseless(stage, False)
    rng = seeds.generator(seed, "audit calibration")
    runs = np.stack([draw(rng, bool(i % 2)) for i in range(CALIBRATION)])
    spread = np.mean([runs[w::2].var(0) for w in (0, 1)], axis=0)
    if not stage.trainer.is_private:
        spread = spread.mean()  # which coordinates are uploaded changes from run to run
    if isinstance(
        stage.plan.release, SampledGaussian
    ):  # whether the other record is in a sample is not told apart
        other = _noiseless(stage, False)
        difference = difference - (difference @ other) / (other @ other) * other
        spread = spread.mean()
    weight = difference / np.maximum(spread, 1e-9 * spread.max() + 1e-300)
    return lambda transcript: float(transcript @ weight)


def _noiseless(stage: Stage, world: bool) -> Transcript:
    """Return what would be released without noise."""
    experiment, trainer, site = stage.experiment, stage.trainer, stage.site(world, 0)
    if isinstance(trainer, StagedTrainer):
        stages = range(1, experiment.rounds + 1)
        parts = [trainer.release(stage.weights, site, number, None) for number in stages]
        return np.concatenate(parts).astype(np.float64)
    if trainer.is_private:
        trainer = experiment.trainer.without_noise(experiment, FlatNetwork(stage.net.spec, stage.net.device))
    return trainer.fit(stage.weights, site, {}).change.astype(np.float64)


def _differences(stage: Stage) -> tuple[Draw, Score]:
    """Attack inputs that one noise image is added to: the paper says that they are private as they are.

    Inputs that were cut off for some record tell nothing, and are left out.
    """
    trainer = stage.trainer
    assert isinstance(trainer, AdlmTrainer)  # by its setup
    plain = [np.clip((x.reshape(len(x), -1) + 1) / 2, 0, 1) for x, _ in stage.worlds]

    def draw(rng: np.random.Generator, world: bool) -> Transcript:
        site = stage.site(world, int(rng.integers(2**62)))
        return np.asarray(trainer.seen(stage.weights, site), np.float64)

    def left(seen: Transcript, world: int) -> float:
        whole = (np.abs(seen) != INPUT_LIMIT).all(0)
        apart = (seen - plain[world])[:, whole]
        return float(np.linalg.norm(apart - apart.mean(0)))

    return draw, lambda seen: left(seen, 0) - left(seen, 1)


def _residuals(stage: Stage) -> tuple[Draw, Score]:
    draw = _weights_of(stage)

    def left(weights: Transcript, world: int) -> float:
        return head_residual(stage.net, weights.astype(np.float32), *stage.worlds[world])

    return draw, lambda weights: left(weights, 0) - left(weights, 1)


def _bounds_of(stage: Stage) -> tuple[Draw, Score]:
    draw, trainer = _weights_of(stage), stage.trainer
    assert isinstance(trainer, PerturbedTrainer)  # by its setup

    def left(weights: Transcript, world: int) -> float:
        return trainer.bounds_apart(weights.astype(np.float32), stage.worlds[world][0])

    return draw, lambda weights: left(weights, 0) - left(weights, 1)


def _weights_of(stage: Stage) -> Draw:
    """Return what draws the weights that a model is released with."""

    def draw(rng: np.random.Generator, world: bool) -> Transcript:
        site = stage.site(world, int(rng.integers(2**62)))
        return (stage.weights + stage.trainer.fit(stage.weights, site, {}).change).astype(np.float64)

    return draw
