"""Audit what an experiment releases, as it is configured: the exact loss of all its releases together.

The mechanisms are those of its trainer or selection, with its own noise; the records are the worst that we
know, not the experiment's. So the bound is about the mechanism and the amount of its noise.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fed_dp.accounting import Gaussian, SampledGaussian, SparseVector
from fed_dp.audit.exact import Values, loss, sparse_vector_losses
from fed_dp.audit.finding import Finding, about
from fed_dp.audit.mechanisms import COST, RECORDS, SIZE, opposed_weights, sampled_gaussian_loss
from fed_dp.experiment import Dssgd, Experiment, Svm
from fed_dp.experiment.release import Agreement, agreement, amount, promise, svm_noise
from fed_dp.mechanisms import Noise, Released, figure_12, sparse_vector
from fed_dp.mechanisms.statistics import HeadStatistics, release
from fed_dp.mechanisms.support_vector import perturbed
from fed_dp.sharing.private_selection import RandomMask

EXACT = (
    "psgd", "statistics", "random_mask", "sparse_vector", "sparse_vector_paper", "sparse_vector_as_printed",
    "svm", "svm_paper", "svm_as_printed",
)  # fmt: skip


def audit_releases(
    experiment: Experiment, cost: dict[str, Any], *, size: int, classes: int
) -> Finding | None:
    """Return the exact loss of all releases of a run; None where it cannot be computed exactly.

    `cost` is the run's statement, `size` the number of its parameters.
    """
    said, agreed = promise(experiment), agreement(experiment, client=0, size=size)
    if said is None or agreed is None or said.name not in EXACT:
        return None
    releases = len(agreed.stages) or experiment.rounds
    bound, delta, attack = _bound(experiment, agreed, said.name, releases, cost["delta"], classes)
    pure = delta == 0 and cost["delta"] > 0
    return Finding(
        f"{said.name}, {releases} release{'s' if releases > 1 else ''}",
        about(said.name),
        claim=cost["epsilon_pure"] if pure else cost["epsilon_total"],
        delta=delta,
        bound=bound,
        confidence=1.0,
        attack=f"exact: {attack}",
    )


def _bound(
    experiment: Experiment, agreed: Agreement, name: str, releases: int, delta: float, classes: int
) -> tuple[float, float, str]:
    each = agreed.release
    if isinstance(each, SampledGaussian):
        steps = releases * each.steps
        bound = sampled_gaussian_loss(each.noise_multiplier, each.sample_rate, steps, delta)
        return bound, delta, f"all {steps} noisy sums, a gradient of length C in each"
    if isinstance(each, SparseVector):
        finding, releasing = _sparse_vector(experiment, each, name)
        told = "all magnitudes and values move by what they can, in every round; at δ = 0"
        return releases * (finding + releasing), 0.0, told
    if name == "random_mask":
        assert isinstance(each, Gaussian)
        assert isinstance(experiment.strategy, Dssgd)
        mask = RandomMask(SIZE, clip=experiment.strategy.clip or 1.0, multiplier=each.noise_multiplier)
        change = np.full(SIZE, 1e3, np.float32)

        def masked(noise: Noise, world: bool) -> None:
            for _ in range(releases):
                mask.select(change if world else -change, noise=noise)

        return loss(masked, delta=delta), delta, "a change of full length and its opposite, in every round"
    if name.startswith("svm"):
        return _svm(experiment, agreed, name, delta, classes)
    record, label = np.full((1, SIZE), 10.0), np.zeros(1, np.int64)

    def statistics(noise: Noise, world: bool) -> None:
        for stage in agreed.stages:
            batches = [(record / 100, label), (record, label)][: 2 if world else 1]
            release(HeadStatistics(SIZE, 4), batches, amount(stage), noise)

    at = delta if isinstance(each, Gaussian) else 0.0
    return loss(statistics, delta=at), at, "one more record, as long as the bound allows, in every stage"


def _sparse_vector(experiment: Experiment, each: SparseVector, name: str) -> tuple[float, float]:
    strategy = experiment.strategy
    assert isinstance(strategy, Dssgd)
    bound = strategy.bound or 1.0

    def once(values: Values, noise: Noise) -> Released:
        options: dict[str, Any] = {"bound": bound, "threshold": strategy.threshold, "count": each.count}
        if name == "sparse_vector":
            return sparse_vector(values, epsilon=each.epsilon, noise=noise, split=strategy.split, **options)
        printed = name == "sparse_vector_as_printed"
        return figure_12(values, epsilon=each.epsilon, noise=noise, as_printed=printed, **options)

    return sparse_vector_losses(once, bound=bound, count=each.count, segments=name != "sparse_vector")


def _svm(
    experiment: Experiment, agreed: Agreement, name: str, delta: float, classes: int
) -> tuple[float, float, str]:
    problems = 1 if classes == 2 else classes
    kind, at = svm_noise(experiment), delta if isinstance(agreed.release, Gaussian) else 0.0
    assert isinstance(experiment.trainer, Svm)
    each = COST if name == "svm_as_printed" else COST / RECORDS
    solved = [np.stack([opposed_weights(each, sign)] * problems) for sign in (1.0, -1.0)]

    def worlds(noise: Noise, world: bool) -> object:
        value = amount(agreed.release).value
        options: dict[str, Any] = {"cost": COST, "records": RECORDS, "problems": problems}
        return perturbed(solved[world], kind=kind, amount=value, noise=noise, **options)

    told = f"one of {RECORDS} records turns round, all others in pairs that cancel; {kind} noise"
    return loss(worlds, delta=at), at, told
