"""An audit of pSGD from its own code: every way in which it computes gradients, samples and adds noise.

A trainer is run as an experiment would, on records that show one thing at a time:

clip      one record, with next to no noise: how long what it adds to a sum is
sampling  many equal records, with next to no noise: how often they were in a sample
noise     records without a gradient in most parameters: how large the noise there is

From the three, each at the end of its confidence interval that claims less, follows what all steps of a run
lose about one record: a lower bound, which no accountant of the trainer has a part in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.stats import chi2

from fed_dp import seeds
from fed_dp.accounting import SampledGaussian
from fed_dp.audit.bounds import rate_bounds
from fed_dp.audit.finding import Finding, stated
from fed_dp.clients.psgd import PATHS, Psgd
from fed_dp.clients.psgd.trainer import PsgdTrainer
from fed_dp.clients.trainer import ClientData
from fed_dp.errors import ConfigError
from fed_dp.experiment import Experiment, build
from fed_dp.experiment.plan import release_plan
from fed_dp.experiment.source import merged
from fed_dp.models import FlatNetwork, Vector, use_one_thread
from fed_dp.sharing.update import MAX_ABS_VALUE

RATE, ROUNDS, CLIP = 0.1, 5, 1.0
SHAPE, INPUTS, CLASSES = (1, 4, 4), 16, 10
SILENT = 1e-3  # of a noise multiplier that hides nothing
COPIES = 100  # equal records, whose samples are counted
SHORT = 0.5  # of C: a sum that is shorter holds no record
SMALL_STEP = 1e-8  # a learning rate at which weights, and so gradients, stay where they are
DOUBT = 1e-3


@dataclass(frozen=True, slots=True)
class Measured:
    """What a path does, each number on the side that claims less."""

    clip: float  # the norm of what one record adds to a sum
    rate: float  # the chance of a record to be in a sample
    scale: float  # the standard deviation of the noise in a sum

    def loss(self, steps: int, delta: float) -> float:
        """Return ε at δ of so many steps."""
        return sampled_gaussian_loss(self.scale / self.clip, self.rate, steps, delta)


def sampled_gaussian_loss(
    sigma: float, rate: float, steps: int, delta: float, *, beside: Sequence[float] = ()
) -> float:
    """Return ε at δ of the sampled Gaussian's own pair of worlds: a gradient of length C, or none.

    By dp-accounting's privacy loss distribution, rounded to the side that claims less: a lower bound.
    `beside` are the noise multipliers of Gaussian releases of the same record, which differ by all they can.
    """
    grid = 1e-4 * max(1.0, 1 / sigma**2)  # losses are of the order of 1/σ²

    def shown(multiplier: float, chance: float) -> Any:
        return pld.from_gaussian_mechanism(
            multiplier,
            value_discretization_interval=grid,
            sampling_prob=chance,
            pessimistic_estimate=False,
            use_connect_dots=False,
        )

    whole = shown(sigma, rate).self_compose(steps)
    for multiplier in beside:
        whole = whole.compose(shown(multiplier, 1.0))
    return float(whole.get_epsilon_for_delta(delta))


def audit_path(
    path: str, *, epsilon: float = 1.0, delta: float = 1e-5, factor: float = 1.0, runs: int = 40
) -> Finding:
    """Audit one path at a stated (ε, δ); `factor` makes its noise larger or smaller."""
    if path not in PATHS:
        raise ConfigError(f"path {path!r} is not known; known: {', '.join(PATHS)}")
    use_one_thread()
    bench = _Bench(path, epsilon, delta)
    found = bench.measured(factor, runs)
    steps = ROUNDS * bench.config.steps_per_round
    return Finding(
        f"psgd ({path})",
        stated("psgd"),
        claim=epsilon,
        delta=delta,
        bound=found.loss(steps, delta),
        confidence=1 - DOUBT,
        attack=(
            f"its own code, measured: one record adds {found.clip:.4g} C to a sum, is in a sample with "
            f"chance {found.rate:.4g} or more, noise in it is {found.scale:.4g} C or less; {steps} steps"
        ),
        trials=2 * runs + runs // 4,
        noise=factor,
    )


class _Bench:
    """A linear network, whose gradients are known, under one path of pSGD."""

    def __init__(self, path: str, epsilon: float, delta: float) -> None:
        tables: dict[str, Any] = {
            "name": "audit-psgd",
            "rounds": ROUNDS,
            "model": {"name": "linear"},
            "trainer": {"name": "psgd", "sample_rate": RATE, "clip": CLIP, "learning_rate": SMALL_STEP},
            "privacy": {"budget_epsilon": epsilon, "delta": delta},
        }
        self.experiment: Experiment = build(merged(tables, PATHS[path]))
        assert isinstance(self.experiment.trainer, Psgd)
        self.config = self.experiment.trainer
        plan = release_plan(self.experiment, client=0, size=INPUTS)
        assert plan is not None
        assert isinstance(plan.release, SampledGaussian)
        self._release = plan.release

    def measured(self, factor: float, runs: int) -> Measured:
        """Measure clip, sampling and noise."""
        silent, loud = (
            self._trainer(replace(self._release, noise_multiplier=sigma))
            for sigma in (SILENT, self._release.noise_multiplier * factor)
        )
        record = np.full((1, *SHAPE), 10.0, np.float32)
        alone, many = (
            self._sums(silent, record, runs),
            self._sums(silent, record.repeat(COPIES, 0), runs // 4),
        )
        direction = many.sum(0) / np.linalg.norm(many.sum(0))  # in which the gradient of all of them goes
        lengths = alone @ direction
        clip = float(lengths[lengths > SHORT * CLIP].min(initial=np.inf))  # of a run that took it once
        draws = COPIES * self.config.steps_per_round * len(many)
        taken = 0 if math.isinf(clip) else min(draws, round(float((many @ direction).sum()) / clip))
        rate = rate_bounds(taken, draws, DOUBT / 2)[0]
        return Measured(clip if math.isfinite(clip) else 1e-9, max(rate, 1e-9), self._scale(loud, runs))

    def _scale(self, trainer: PsgdTrainer, runs: int) -> float:
        """Return an upper bound on the noise of one step, from the parameters that have no gradient."""
        nothing = np.zeros((1, *SHAPE), np.float32)
        noise = self._sums(trainer, nothing, runs)[:, : INPUTS * CLASSES]
        squares = float((noise**2).sum()) / chi2.ppf(DOUBT / 2, noise.size)
        return math.sqrt(squares / self.config.steps_per_round)

    def _sums(self, trainer: PsgdTrainer, x: Vector, runs: int) -> Vector:
        """Return what a round's steps add up to, in units of gradients, once for each of many seeds."""
        weights = np.zeros(INPUTS * CLASSES + CLASSES, np.float32)
        y = np.zeros(len(x), np.int64)
        found = []
        for run in range(runs):
            site = ClientData(x, y, 0, 1, seeds.integer(1, "audit of psgd", run), expected_records=1)
            change = trainer.fit(weights, site, {}).change.astype(np.float64)
            assert np.abs(change).max() < MAX_ABS_VALUE
            found.append(-change * self.config.sample_rate / SMALL_STEP)
        return np.stack(found).astype(np.float64)

    def _trainer(self, release: SampledGaussian) -> PsgdTrainer:
        return PsgdTrainer(
            self.config,
            FlatNetwork(self.experiment.network(SHAPE, CLASSES)),
            release=release,
            noise_source=self.experiment.privacy.noise_source,
            clients_at_once=self.experiment.clients.at_once,
        )
