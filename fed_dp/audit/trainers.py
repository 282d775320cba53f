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

from fed_dp import seeds
from fed_dp.accounting import SampledGaussian
from fed_dp.audit.bounds import check_confidence, sampled, two_worlds
from fed_dp.audit.finding import Finding, about
from fed_dp.audit.mechanisms import check_numbers
from fed_dp.audit.psgd import PATHS
from fed_dp.clients.adlm import AdlmTrainer
from fed_dp.clients.paper import PaperTrainer, head_residual
from fed_dp.clients.participant import Participant
from fed_dp.clients.psgd import PsgdTrainer
from fed_dp.clients.registry import make_trainer
from fed_dp.clients.trainer import Releasing, Site, Trainer
from fed_dp.data.dataset import Floats, Integers
from fed_dp.errors import ConfigError
from fed_dp.experiment import Experiment, Psgd, build
from fed_dp.experiment.federation import federation
from fed_dp.experiment.release import agreement, promise
from fed_dp.experiment.start import starting_weights
from fed_dp.mechanisms import SimulationNoise
from fed_dp.mechanisms.noise import Reals
from fed_dp.models import FlatNetwork, Vector, use_one_thread
from fed_dp.sharing.codec import decode

CALIBRATION = 64  # runs from which the size of the noise is learnt; none of them is a trial
Transcript = NDArray[np.float64]
World = tuple[Floats, Integers]
Score = Callable[[Transcript], float]  # which is not told the world

_PUBLIC = {"name": "digits", "public_records": 100}
_STATISTICS = {"strategy": {"name": "statistics"}}
_DSSGD = {"name": "dssgd", "upload_fraction": 0.1}
# The smallest experiment of each trainer, by its variant: on digits, one site, one round of each stage.
SETUPS: dict[str, dict[str, dict[str, Any]]] = {
    "psgd": {
        "proved": {
            "model": {"name": "linear"},
            # Weights, and so gradients, hardly move: what each step adds is known but for samples and noise.
            "trainer": {"name": "psgd", "sample_rate": 0.25, "local_epochs": 3, "learning_rate": 1e-4},
        }
    },
    "dssgd": {
        variant: {
            "model": {"name": "linear"},
            "trainer": {"name": "sgd", "learning_rate": 5.0},
            "strategy": {**_DSSGD, "selection": "sparse_vector", "bound": 0.001},
        }
        for variant in ("proved", "paper", "paper_as_printed")
    },
    "random_mask": {
        "proved": {
            "model": {"name": "linear"},
            "trainer": {"name": "sgd", "learning_rate": 5.0},
            "strategy": {**_DSSGD, "selection": "random_mask", "clip": 0.1},
        }
    },
    "dpa": {
        "proved": {
            **_STATISTICS,
            "rounds": 2,
            "model": {"name": "scattering", "components": 30},
            "trainer": {"name": "dpa"},
        },
        **{
            variant: {
                "model": {"name": "auto-encoder", "hidden": 4, "layers": 1},
                "trainer": {"name": "dpa", "batch_size": 1000, **more},
            }
            for variant, more in (
                ("paper", {"local_epochs": 5}),
                ("paper_as_printed", {"local_epochs": 5}),
                ("paper_as_released", {"local_epochs": 300, "learning_rate": 0.05}),  # to its end
            )
        },
    },
    "pcdbn": {
        "proved": {
            **_STATISTICS,
            "rounds": 3,
            "model": {"name": "patch-filters", "components": 30},
            "trainer": {"name": "pcdbn"},
        },
        "paper": {
            "model": {"name": "cdbn", "filters": 2, "hidden": 8},
            "trainer": {"name": "pcdbn", "local_epochs": 5, "batch_size": 1000},
        },
    },
    **{
        name: {
            "proved": {
                **_STATISTICS,
                "data": _PUBLIC,
                "model": {"name": "class-sums"},
                "trainer": {"name": name},
            },
            **{
                variant: {
                    "model": {"name": "adlm-cnn", "filters": 4, "hidden": 8},
                    "trainer": {"name": name, "batch_size": 40, **more},
                }
                for variant in ("paper", "paper_as_released")
            },
        }
        for name, more in (("adlm", {"relevance_epochs": 1}), ("ilm", {}))
    },
    "svm": {
        variant: {
            "data": _PUBLIC,
            "model": {"name": "rbf", "features": 20},
            "trainer": {"name": "svm", "cost": 0.002},  # all records inside the margin: none moves w by more
        }
        for variant in ("proved", "paper", "paper_as_printed")
    },
}
NEEDS_DELTA = ("psgd", "random_mask")
RECORDS = {"svm": 200, "psgd": 1}  # of a site; of the others:
FEW = 40


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
    factor: float = 1.0

    def site(self, world: bool, seed: int) -> Site:
        """Return the site of a world."""
        x, y = self.worlds[world]
        return Site(x, y, client=0, round=1, seed=seed, expected_records=self.expected)

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
    said = promise(stage.experiment)
    assert said is not None  # by setup
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
        about(said.name),
        claim=epsilon,
        delta=at,
        bound=two_worlds(present, absent, delta=at, confidence=confidence),
        confidence=confidence,
        attack=attack,
        trials=2 * trials,
        seed=seed,
        noise=factor,
    )


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
    if name not in SETUPS:
        raise ConfigError(f"trainer {name!r} is not known; known: {', '.join(SETUPS)}")
    if variant not in SETUPS[name]:
        raise ConfigError(f"--variant = {variant!r}: trainer {name!r} has {', '.join(SETUPS[name])}")
    check_numbers(epsilon=epsilon, delta=delta, noise=factor)
    if delta is None and name in NEEDS_DELTA:
        delta = 1e-5
    privacy: dict[str, Any] = {"budget_epsilon": float(epsilon), "variant": variant} | (
        {"delta": delta} if delta else {}
    )
    tables: dict[str, Any] = {
        "rounds": 1,
        "clients": {"count": 1},
        "privacy": privacy,
        "name": f"audit-{name}",
        "seed": seed,
    }
    tables |= SETUPS[name][variant]
    if path is not None:
        if name != "psgd" or path not in PATHS:
            raise ConfigError(f"--path = {path!r}: only 'psgd' has paths: {', '.join(PATHS)}")
        gradients, source, together = PATHS[path]
        tables["trainer"] = {**tables["trainer"], "gradients": gradients}
        tables["clients"] = {"count": 1, "together": together}
        tables["privacy"] = {**privacy, "noise_source": source}
    experiment = build(tables, where=f"audit trainer {name}")
    members = federation(experiment)
    trainer, net = make_trainer(experiment, members.dataset)
    if factor != 1:
        trainer = _weakened(trainer, experiment, net, factor)
    weights = starting_weights(experiment, members)
    said = promise(experiment)
    assert said is not None
    x, y = members.client(0)
    worlds = _worlds(x, y, RECORDS.get(name, FEW), said.unit, said.neighbours)
    return Stage(experiment, trainer, net, weights, worlds, factor)


def _weakened(trainer: Trainer, experiment: Experiment, net: FlatNetwork, factor: float) -> Trainer:
    """Return a trainer that draws its noise elsewhere than from what it is given with less of it."""
    if isinstance(trainer, PsgdTrainer):
        agreed = agreement(experiment, client=0, size=net.size)
        assert agreed is not None
        assert isinstance(agreed.release, SampledGaussian)
        assert isinstance(experiment.trainer, Psgd)
        less = replace(agreed.release, noise_multiplier=agreed.release.noise_multiplier * factor)
        return _psgd(experiment, net, experiment.trainer, less)
    if isinstance(trainer, AdlmTrainer | PaperTrainer):
        raise ConfigError(f"--noise = {factor:g}: the papers' forms draw their own noise; allowed: 1")
    return trainer


def _psgd(experiment: Experiment, net: FlatNetwork, config: Psgd, release: SampledGaussian) -> PsgdTrainer:
    """Return pSGD on the experiment's path, with another release."""
    return PsgdTrainer(
        config,
        _again(net, experiment),
        release=release,
        noise_source=experiment.privacy.noise_source,
        together=experiment.clients.at_once,
    )


def _again(net: FlatNetwork, experiment: Experiment) -> FlatNetwork:
    """Return the same network anew: Opacus takes each once."""
    dataset = federation(experiment).dataset
    return FlatNetwork(net.name, dataset.shape, dataset.classes, net.device, experiment.network)


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
    variant, trainer = stage.experiment.privacy.variant, stage.trainer
    if isinstance(trainer, AdlmTrainer):
        return *_differences(stage, trainer), (
            "on the noisy inputs, which the paper calls private and which are not sent: noise elimination; "
            "what all have in common is subtracted under each hypothesis, and that which leaves less is taken"
        )
    if isinstance(trainer, PaperTrainer) and variant == "paper_as_released":
        return *_residuals(stage), (
            "noise elimination: the intercept holds the shared noise, so the released head is a noiseless "
            "fit to the records of one world and not of the other"
        )
    if isinstance(trainer, PaperTrainer) and variant == "paper_as_printed":
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
    if isinstance(trainer, Releasing):

        def released(rng: np.random.Generator, world: bool) -> Transcript:
            noise = Scaled(rng, stage.factor)
            site = stage.site(world, 0)
            stages = range(1, experiment.rounds + 1)
            parts = [trainer.release(stage.weights, site, number, noise) for number in stages]
            return np.concatenate(parts).astype(np.float64)

        return released
    agreed = agreement(experiment, client=0, size=stage.net.size)
    assert agreed is not None
    if experiment.strategy.name == "dssgd":
        participant = Participant.of(experiment, 0, stage.net.size, agreed.release)
        changes = [trainer.fit(stage.weights, stage.site(world, 0), {}).change for world in (False, True)]

        def uploaded(rng: np.random.Generator, world: bool) -> Transcript:
            noise = Scaled(rng, stage.factor)
            data = participant.upload(changes[world], seed=0, turn=1, client=0, noise=noise)
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
    if stage.experiment.strategy.name == "dssgd":
        spread = spread.mean()  # which coordinates are uploaded changes from run to run
    if isinstance(stage.trainer, PsgdTrainer):  # whether the other record is in a sample is not told apart
        other = _noiseless(stage, False)
        difference = difference - (difference @ other) / (other @ other) * other
        spread = spread.mean()
    weight = difference / np.maximum(spread, 1e-9 * spread.max() + 1e-300)
    return lambda transcript: float(transcript @ weight)


def _noiseless(stage: Stage, world: bool) -> Transcript:
    """Return what would be released without noise."""
    experiment, trainer, site = stage.experiment, stage.trainer, stage.site(world, 0)
    if isinstance(trainer, Releasing):
        stages = range(1, experiment.rounds + 1)
        parts = [trainer.release(stage.weights, site, number, None) for number in stages]
        return np.concatenate(parts).astype(np.float64)
    if isinstance(trainer, PsgdTrainer):
        assert isinstance(experiment.trainer, Psgd)
        everybody = experiment.trainer.model_copy(update={"sample_rate": 1.0})  # in one step
        quiet = _psgd(experiment, stage.net, everybody, SampledGaussian(1e-3, 1.0, everybody.steps_per_round))
        return quiet.fit(stage.weights, site, {}).change.astype(np.float64)
    if isinstance(trainer, PaperTrainer):
        plain: dict[str, Any] = experiment.tables()
        plain["trainer"]["perturb"] = False
        plain["privacy"] = {}
        quiet_trainer, _ = make_trainer(build(plain), federation(experiment).dataset)
        return quiet_trainer.fit(stage.weights, site, {}).change.astype(np.float64)
    return trainer.fit(stage.weights, site, {}).change.astype(np.float64)


def _differences(stage: Stage, trainer: AdlmTrainer) -> tuple[Draw, Score]:
    """Attack inputs that one noise image is added to: the paper says that they are private as they are."""
    plain = [np.clip((x.reshape(len(x), -1) + 1) / 2, 0, 1) for x, _ in stage.worlds]

    def draw(rng: np.random.Generator, world: bool) -> Transcript:
        site = stage.site(world, int(rng.integers(2**62)))
        return np.asarray(trainer.seen(stage.weights, site), np.float64)

    def left(seen: Transcript, world: int) -> float:
        apart = seen - plain[world]
        return float(np.linalg.norm(apart - apart.mean(0)))

    return draw, lambda seen: left(seen, 0) - left(seen, 1)


def _residuals(stage: Stage) -> tuple[Draw, Score]:
    draw = _weights_of(stage)

    def left(weights: Transcript, world: int) -> float:
        return head_residual(stage.net, weights.astype(np.float32), *stage.worlds[world])

    return draw, lambda weights: left(weights, 0) - left(weights, 1)


def _bounds_of(stage: Stage) -> tuple[Draw, Score]:
    draw, trainer = _weights_of(stage), stage.trainer
    assert isinstance(trainer, PaperTrainer)

    def left(weights: Transcript, world: int) -> float:
        return trainer.bounds_apart(weights.astype(np.float32), stage.worlds[world][0])

    return draw, lambda weights: left(weights, 0) - left(weights, 1)


def _weights_of(stage: Stage) -> Draw:
    """Return what draws the weights that a model is released with."""

    def draw(rng: np.random.Generator, world: bool) -> Transcript:
        site = stage.site(world, int(rng.integers(2**62)))
        return (stage.weights + stage.trainer.fit(stage.weights, site, {}).change).astype(np.float64)

    return draw


def known_trainers() -> Mapping[str, tuple[str, ...]]:
    """Return the trainers that can be audited, each with its variants."""
    return {name: tuple(variants) for name, variants in SETUPS.items()}
