"""Audit a whole federated run with one run: many canaries, each in or out by a fair coin.

Canaries are training records under a wrong label, drawn once. Those whose coin falls are left in, the others
taken out, and the federation runs as it is, on all its sites. The attacker sees the model of every round and
guesses, for the canaries whose loss fell most and least, that they were in and out, and on the rest nothing.

Reference: Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

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


def audit_run(
    experiment: Experiment, *, canaries: int = 300, seed: int = 1, confidence: float = 0.95
) -> Finding:
    """Run the experiment once, with canaries; return a lower bound on the ε of its models."""
    check_confidence(confidence)
    if experiment.strategy.name in ("standalone", "public"):
        raise ConfigError(f"strategy.name = {experiment.strategy.name!r}: there is no one model to audit")
    if experiment.data.public_records:
        raise ConfigError(
            f"data.public_records = {experiment.data.public_records}: a canary among them would not be "
            "protected; expected 0, or data.public_data"
        )
    whole = load(experiment.data)
    rng = seeds.generator(seed, "canaries")
    if not 20 <= canaries <= len(whole.train) // 2:
        raise ConfigError(
            f"--canaries = {canaries}: expected from 20 to {len(whole.train) // 2}, half of the records"
        )
    chosen = np.sort(rng.choice(len(whole.train), canaries, replace=False))
    inside = rng.random(canaries) < 0.5
    wrong = (whole.train.y[chosen] + rng.integers(1, whole.classes, canaries)) % whole.classes
    scores = _scores(experiment, whole, chosen, inside, wrong)
    guesses, correct, bound = _bound(scores, inside, experiment.privacy.delta or 0.0, confidence)
    said = promise(experiment)
    return Finding(
        f"run {experiment.name}",
        NO_PRIVACY if said is None else about(said.name),
        claim=experiment.privacy.budget_epsilon or float("inf"),
        delta=experiment.privacy.delta or 0.0,
        bound=bound,
        confidence=confidence,
        attack=(
            f"one run, {canaries} mislabelled canaries by fair coins: {correct} of {guesses} guesses right, "
            "from how far each canary's loss fell in the models of the later rounds"
        ),
        trials=1,
        seed=seed,
    )


def _scores(
    experiment: Experiment,
    whole: DataSet,
    chosen: NDArray[np.int64],
    inside: NDArray[np.bool_],
    wrong: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Run it; return how far each canary's loss fell, in the mean of the later rounds' models."""
    labels = whole.train.y.copy()
    labels[chosen] = wrong
    kept = np.setdiff1d(np.arange(len(labels)), chosen[~inside])
    marked = replace(whole, train=replace(whole.train, y=labels))
    evaluator = Evaluator(
        experiment.model.name,
        whole.shape,
        whole.classes,
        marked.inputs(marked.train, chosen),
        wrong,
        experiment.network,
    )
    models = _Models()
    adopt(experiment.data, replace(marked, train=marked.train.part(kept)))
    try:
        start = starting_weights(experiment, federation(experiment))
        with tempfile.TemporaryDirectory() as folder:
            simulate(experiment, observer=models, engine="in-process", folder=Path(folder) / "run")
    finally:
        adopt(experiment.data, whole)
    later = models.weights[len(models.weights) // 2 :]
    fallen = [evaluator.losses(start) - evaluator.losses(weights) for weights in later]
    return np.asarray(np.mean(fallen, axis=0), np.float64)


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
