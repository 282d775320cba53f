"""Audit a whole federated run with one run: many canaries, each decided by a fair coin.

Canaries are training records under a wrong label, drawn once from those that sites hold. Where neighbours add
or remove a record, the coin says whether a canary is in or out; where they replace one, which of two wrong
labels it has. All other records stay where they are. The federation runs once, on all its sites. The attacker
sees the model of every round and guesses the coins of those canaries whose losses tell most, and no others.

Reference: Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fed_dp import seeds
from fed_dp.audit.bounds import check_confidence, one_run
from fed_dp.audit.finding import Finding, Said, about
from fed_dp.data.dataset import DataSet
from fed_dp.errors import ConfigError
from fed_dp.experiment import Experiment
from fed_dp.experiment.federation import adopt, federation, load
from fed_dp.experiment.release import promise
from fed_dp.experiment.start import starting_weights
from fed_dp.models import Evaluator, Vector
from fed_dp.simulations.runner import simulate
from fed_dp.strategies.rounds import Silent
from fed_dp.strategies.run_folder import Line, RunFolder

SHARES = (0.1, 0.3, 1.0)  # of the canaries that are guessed; all are tried, and the doubt is shared
NO_PRIVACY = Said("no privacy", "record", "add/remove one")


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


def audit_run(
    experiment: Experiment, *, canaries: int = 300, seed: int = 1, confidence: float = 0.95
) -> Finding:
    """Run the experiment once, with canaries; return a lower bound on the ε of its models."""
    check_confidence(confidence)
    if experiment.strategy.name in ("standalone", "public"):
        raise ConfigError(f"strategy.name = {experiment.strategy.name!r}: there is no one model to audit")
    whole, said = load(experiment.data), promise(experiment)
    chosen = _canaries(experiment, whole, canaries, seed, None if said is None else said.neighbours)
    scores, summary = _scores(experiment, whole, chosen)
    delta = experiment.privacy.delta or 0.0
    guesses, correct, bound = _bound(scores, chosen.inside, delta, confidence)
    return Finding(
        f"run {experiment.name}",
        NO_PRIVACY if said is None else about(said.name),
        claim=math.inf if summary["privacy"] is None else summary["privacy"]["epsilon_total"],
        delta=delta,
        bound=bound,
        confidence=confidence,
        attack=(
            f"one run, {canaries} mislabelled canaries by fair coins: {correct} of {guesses} guesses right, "
            "from how far each canary's loss fell in the models of the later rounds"
        ),
        trials=1,
        seed=seed,
    )


def _canaries(
    experiment: Experiment, whole: DataSet, count: int, seed: int, neighbours: str | None
) -> Canaries:
    """Draw canaries from the records that sites hold: public ones are not protected."""
    held = np.unique(np.concatenate(federation(experiment).parts))
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
    return Canaries(rows, inside, label, other)


def _scores(
    experiment: Experiment, whole: DataSet, canaries: Canaries
) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """Run it; return how far each canary's loss fell, less that of its other label, and the summary."""
    rows, inside, other = canaries.rows, canaries.inside, canaries.other
    labels = whole.train.y.copy()
    labels[rows] = canaries.label if other is None else np.where(inside, canaries.label, other)
    marked = replace(whole, train=replace(whole.train, y=labels))
    models = _Models()
    adopt(experiment.data, marked, without=rows[~inside] if other is None else None)
    try:
        start = starting_weights(experiment, federation(experiment))
        with tempfile.TemporaryDirectory() as folder:
            _, summary = simulate(
                experiment, observer=models, engine="in-process", folder=Path(folder) / "run"
            )
    finally:
        adopt(experiment.data, whole)
    later = models.weights[len(models.weights) // 2 :]

    def fallen(label: NDArray[np.int64]) -> NDArray[np.float64]:
        inputs = whole.inputs(whole.train, rows)
        evaluator = Evaluator(
            experiment.model.name, whole.shape, whole.classes, inputs, label, experiment.network
        )
        each = [evaluator.losses(start) - evaluator.losses(weights) for weights in later]
        return np.asarray(np.mean(each, axis=0), np.float64)

    found = fallen(canaries.label)
    return found if other is None else found - fallen(other), summary


def _bound(
    scores: NDArray[np.float64], inside: NDArray[np.bool_], delta: float, confidence: float
) -> tuple[int, int, float]:
    """Return guesses, correct ones and the bound, for the share of canaries that shows most."""
    order, best = np.argsort(scores), (0, 0, 0.0)
    doubt = (1 - confidence) / len(SHARES)
    for share in SHARES:
        each = max(1, int(share * len(scores)) // 2)
        correct = int((~inside[order[:each]]).sum() + inside[order[-each:]].sum())
        bound = one_run(
            canaries=len(scores), guesses=2 * each, correct=correct, delta=delta, confidence=1 - doubt
        )
        if bound >= best[2]:
            best = 2 * each, correct, bound
    return best
