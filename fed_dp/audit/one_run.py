"""Audit a whole federated run with one run: many canaries, each decided by a fair coin.

Canaries are training records under a wrong label, drawn once from those that sites hold. Where neighbours
zero out, add or remove a record, the coin says whether a canary is in or out (and what sums are divided by
stays as it is); where they replace one, which of two wrong labels it has. All other records stay where they
are. The federation runs once, on all its sites. The attacker sees the model of every round, and guesses the
coins of those canaries whose scores tell most, and no others:

loss       how far a canary's loss fell
gradient   (white box) canaries are images of noise, whose gradients are nearly orthogonal; the cosine of
           every round's change of the model with a canary's gradient in the model before it

Where all releases have Gaussian noise, the guesses are held against the whole privacy profile of those
releases with more and more noise, and the bound is the ε of the most private one that they speak against.
Else they are held against (ε, δ) alone, which shows less.

References: Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023;
Mahloujifar, Melis, Chaudhuri, "Auditing f-Differential Privacy in One Run", 2024; Andrew et al., "One-shot
Empirical Privacy Estimation for Federated Learning", 2023.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fed_dp import seeds
from fed_dp.accounting import Gaussian, Release, SampledGaussian, epsilon, from_json
from fed_dp.accounting.composition import deltas
from fed_dp.audit.bounds import check_confidence, least_wrong, one_run, one_run_rejects
from fed_dp.audit.finding import Finding, StatedGuarantee, stated
from fed_dp.audit.releases import paid_most
from fed_dp.data.dataset import DataSet
from fed_dp.errors import ConfigError
from fed_dp.experiment import Experiment
from fed_dp.experiment.federation import adopt, load, make_federation
from fed_dp.experiment.plan import guarantee_of
from fed_dp.experiment.start import starting_weights
from fed_dp.models import Evaluator, FlatNetwork, Vector
from fed_dp.models.client_batches import gradients_of
from fed_dp.runs.folder import Line, RunFolder
from fed_dp.server.observers import Silent
from fed_dp.simulations.runner import simulate

SHARES = (0.1, 0.3, 1.0)  # of the canaries that are guessed; all are tried, and the doubt is shared
NO_PRIVACY = StatedGuarantee("no privacy", "record", "add/remove one")
Attack = Literal["loss", "gradient"]
EPSILONS = np.concatenate(
    [np.linspace(0, 5, 251), np.linspace(5, 50, 226)[1:]]
)  # at which a profile is known
CHUNK = 256  # records whose gradients are in memory at once
NOISIER = (1 / 64, 64.0)  # the least and the largest noise that is tried, × the run's own


class _Models(Silent):
    """An observer that keeps the model of every round."""

    def __init__(self) -> None:
        self.weights: list[Vector] = []
        self._folder = Path()

    def started(self, experiment: Experiment, folder: Path, done: int) -> None:
        self._folder = folder

    def round_done(self, line: Line) -> None:
        found = RunFolder(self._folder).latest()
        assert found is not None  # a round is checkpointed before it is told
        self.weights.append(found[1]["weights"].astype(np.float32))


@dataclass(frozen=True, slots=True)
class Canaries:
    """Which records, how their coins fell, and the labels they have then and otherwise."""

    rows: NDArray[np.int64]
    inside: NDArray[np.bool_]
    label: NDArray[np.int64]
    other: NDArray[np.int64] | None  # none: otherwise they are not there at all
    x: NDArray[Any] | None = None  # what stands in their place; none: they are as they were


def audit_run(
    experiment: Experiment,
    *,
    canaries: int = 300,
    seed: int = 1,
    confidence: float = 0.95,
    attack: Attack = "loss",
) -> Finding:
    """Run the experiment once, with canaries; return a lower bound on the ε of its models."""
    check_confidence(confidence)
    if attack not in SCORES:
        raise ConfigError(f"--attack = {attack!r}: expected {' or '.join(SCORES)}")
    if not experiment.strategy.audited_by_runs:
        raise ConfigError(f"strategy.name = {experiment.strategy.name!r}: there is no one model to audit")
    whole, guarantee = load(experiment.data), guarantee_of(experiment)
    neighbours = None if guarantee is None else guarantee.neighbours
    chosen = _canaries(experiment, whole, canaries, seed, neighbours, noise=attack == "gradient")
    start, models, summary, releases = _run(experiment, whole, chosen)
    models = [start, *models]
    scores = SCORES[attack](experiment, whole, chosen, models)
    if chosen.other is not None:
        otherwise = replace(chosen, label=chosen.other)
        scores = scores - SCORES[attack](experiment, whole, otherwise, models)
    delta = experiment.privacy.delta or 0.0
    guesses, correct, bound = _bound(scores, chosen.inside, releases, delta, confidence)
    against = "the whole privacy profile of its releases" if _gaussian(releases) else "(ε, δ) alone"
    return Finding(
        f"run {experiment.name}",
        NO_PRIVACY if guarantee is None else stated(guarantee.name),
        claim=math.inf if summary["privacy"] is None else summary["privacy"]["epsilon_total"],
        delta=delta,
        bound=bound,
        confidence=confidence,
        attack=(
            f"one run, {canaries} mislabelled canaries by fair coins: {correct} of {guesses} guesses right, "
            f"{TOLD[attack]}; against {against}"
        ),
        trials=1,
        seed=seed,
    )


def _canaries(
    experiment: Experiment,
    whole: DataSet,
    count: int,
    seed: int,
    neighbours: str | None,
    *,
    noise: bool = False,
) -> Canaries:
    """Draw canaries from the records that sites hold: public ones are not protected."""
    held = np.unique(np.concatenate(make_federation(experiment).parts))
    if not 20 <= count <= len(held) // 2:
        raise ConfigError(f"--canaries = {count}: expected from 20 to {len(held) // 2}, half of the records")
    rng, classes = seeds.generator(seed, "canaries"), whole.classes
    rows = np.sort(rng.choice(held, count, replace=False))
    inside = rng.random(count) < 0.5
    shift = rng.integers(1, classes, count)
    label = (whole.train.y[rows] + shift) % classes
    other = None
    if neighbours == "replace one":
        other = (label + rng.integers(1, classes, count)) % classes
    x = None
    if noise:  # every input is the smallest or the largest that there is
        extremes = np.array([whole.train.x.min(), whole.train.x.max()], whole.train.x.dtype)
        x = extremes[rng.integers(0, 2, whole.train.x[rows].shape)]
    return Canaries(rows, inside, label, other, x)


def _run(
    experiment: Experiment, whole: DataSet, canaries: Canaries
) -> tuple[Vector, list[Vector], dict[str, Any], list[Release]]:
    """Run it; return the first weights, those of every round, the summary and what the total composes."""
    rows, inside, other = canaries.rows, canaries.inside, canaries.other
    x, labels = whole.train.x, whole.train.y.copy()
    labels[rows] = canaries.label if other is None else np.where(inside, canaries.label, other)
    if canaries.x is not None:
        x = x.copy()
        x[rows] = canaries.x
    marked, models = replace(whole, train=replace(whole.train, x=x, y=labels)), _Models()
    federation, guarantee = make_federation(experiment), guarantee_of(experiment)
    if (
        guarantee is not None and guarantee.neighbours == "zero-out one"
    ):  # a null record stands where one is out
        counts = tuple(len(part) for part in federation.parts)
        data = experiment.data.model_copy(update={"expected_records": counts})
        experiment = experiment.model_copy(update={"data": data})
    adopt(experiment.data, marked, without=rows[~inside] if other is None else None)
    try:
        start = starting_weights(experiment, make_federation(experiment))
        with tempfile.TemporaryDirectory() as folder:
            path, summary = simulate(
                experiment, observer=models, engine="in-process", folder=Path(folder) / "run"
            )
            events = [event for line in RunFolder(path).lines() for event in from_json(line["events"])]
    finally:
        adopt(experiment.data, whole)
    cost = summary["privacy"]
    releases = [] if cost is None else [event.release for event in paid_most(events, cost)]
    return start, models.weights, summary, releases


def _fallen(
    experiment: Experiment, whole: DataSet, canaries: Canaries, models: Sequence[Vector]
) -> NDArray[np.float64]:
    """Return how far each canary's loss fell, in the models of the later rounds."""
    network = experiment.network(whole.shape, whole.classes)
    evaluator = Evaluator(network, _inputs(whole, canaries), canaries.label)
    start = evaluator.losses(models[0])
    each = [start - evaluator.losses(weights) for weights in models[1 + (len(models) - 1) // 2 :]]
    return np.asarray(np.mean(each, axis=0), np.float64)


def _along(
    experiment: Experiment, whole: DataSet, canaries: Canaries, models: Sequence[Vector]
) -> NDArray[np.float64]:
    """Return how far all rounds went against each canary's gradient, of length 1, in the model before.

    What the other records, which the attacker knows, add to the change of a round is taken away first.
    """
    net = FlatNetwork(experiment.network(whole.shape, whole.classes))
    inputs, found = _inputs(whole, canaries), np.zeros(len(canaries.rows))
    others = np.setdiff1d(np.concatenate(make_federation(experiment).parts), canaries.rows)
    clip = getattr(experiment.trainer, "clip", math.inf)
    for before, after in pairwise(models):
        change = (before - after).astype(np.float64)
        known = np.zeros(len(before))
        for rows in np.array_split(others, -(-len(others) // CHUNK)):
            known += _directions(
                gradients_of(net, before, whole.inputs(whole.train, rows), whole.train.y[rows]), clip
            ).sum(0)
        change -= float(change @ known) / max(float(known @ known), 1e-300) * known
        found += _directions(gradients_of(net, before, inputs, canaries.label), 0.0) @ change
    return found


def _directions(gradients: NDArray[np.float64], clip: float) -> NDArray[np.float64]:
    """Return gradients of length `clip` at most; of length 1, where that is 0."""
    lengths = np.maximum(np.linalg.norm(gradients, axis=1, keepdims=True), 1e-12)
    return np.asarray(gradients * (np.minimum(1, clip / lengths) if clip else 1 / lengths))


def _inputs(whole: DataSet, canaries: Canaries) -> Vector:
    if canaries.x is None:
        return whole.inputs(whole.train, canaries.rows)
    return whole.inputs(replace(whole.train, x=canaries.x, y=canaries.label, owner=None))


SCORES = {"loss": _fallen, "gradient": _along}
TOLD = {
    "loss": "from how far each canary's loss fell in the models of the later rounds",
    "gradient": "from the cosine of each round's change with the gradients of canaries that are noise",
}


def _gaussian(releases: Sequence[Release]) -> bool:
    return bool(releases) and all(isinstance(each, Gaussian | SampledGaussian) for each in releases)


def _bound(
    scores: NDArray[np.float64],
    inside: NDArray[np.bool_],
    releases: Sequence[Release],
    delta: float,
    confidence: float,
) -> tuple[int, int, float]:
    """Return guesses, correct ones and the bound, for the share of canaries that shows most."""
    order, best = np.argsort(scores), (0, 0, -1.0)
    sure = 1 - (1 - confidence) / len(SHARES)
    for share in SHARES:
        each = max(1, int(share * len(scores)) // 2)
        correct = int((~inside[order[:each]]).sum() + inside[order[-each:]].sum())
        guessed = {"canaries": len(scores), "guesses": 2 * each, "correct": correct}
        if _gaussian(releases):
            bound = by_profile(releases, delta=delta, confidence=sure, **guessed)
        else:
            bound = one_run(delta=delta, confidence=sure, **guessed)
        if bound > best[2]:
            best = 2 * each, correct, bound
    return best


def by_profile(
    releases: Sequence[Release], *, canaries: int, guesses: int, correct: int, delta: float, confidence: float
) -> float:
    """Return the ε of the same releases with as much more noise as the guesses still speak against.

    Below the run's own noise where it is refuted; 0 where not even NOISIER[1] times the noise is.
    """

    def noisier(factor: float) -> list[Release]:
        scaled = [
            replace(each, noise_multiplier=each.noise_multiplier * factor)
            for each in releases
            if isinstance(each, Gaussian | SampledGaussian)
        ]
        return list(scaled)

    def rejected(factor: float) -> bool:
        least = least_wrong(EPSILONS, deltas(noisier(factor), EPSILONS))
        return one_run_rejects(
            least, canaries=canaries, guesses=guesses, correct=correct, confidence=confidence
        )

    low, high = NOISIER
    if not rejected(high):
        return 0.0
    while high > 1.02 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if rejected(middle) else (middle, high)
    return epsilon(noisier(high), delta=delta)
