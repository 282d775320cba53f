"""Audit what an experiment releases, as it is configured: the exact loss of all its releases together.

The mechanisms are those of its trainer or selection, with its own noise; the records are the worst that we
know, not the experiment's. So the bound is about the mechanism and the amount of its noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fed_dp.accounting import Event, Gaussian, Release, SampledGaussian, SparseVector
from fed_dp.accounting.statement import spent
from fed_dp.audit.exact import Values, loss, sparse_vector_losses
from fed_dp.audit.finding import Finding, stated
from fed_dp.audit.mechanisms import COST, RECORDS, SIZE, histogram_worlds, one_more, opposed_weights
from fed_dp.audit.psgd import sampled_gaussian_loss
from fed_dp.clients.functional import Functional
from fed_dp.clients.svm import Svm
from fed_dp.data.dataset import DataSet
from fed_dp.errors import PrivacyError
from fed_dp.experiment import Experiment
from fed_dp.experiment.plan import guarantee_of, noise_spec
from fed_dp.mechanisms import Noise, Released, figure_12, gaussian_epsilon, sparse_vector
from fed_dp.mechanisms.support_vector import perturbed
from fed_dp.models import Solver
from fed_dp.sharing.private_selection import RandomMask
from fed_dp.strategies.dssgd import Dssgd

EXACT = (
    "psgd",
    "psgd_add_remove",
    "psgd_learnt",
    "psgd_learnt_add_remove",
    "statistics",
    "statistics_add_remove",
    "random_mask",
    "sparse_vector",
    "sparse_vector_paper",
    "sparse_vector_as_printed",
    "svm",
    "svm_paper",
    "svm_as_printed",
    "dpme",
    "dpme_add_remove",
    "filter_priority",
    "filter_priority_add_remove",
)


def audit_releases(
    experiment: Experiment, cost: dict[str, Any], events: Iterable[Event], *, size: int, data: DataSet
) -> Finding | None:
    """Return the exact loss of what a run released about the record that paid most; None if there is none.

    `cost` is the run's statement, `events` all that it released, `size` the number of its parameters.
    """
    guarantee, paid = guarantee_of(experiment), paid_most(events, cost)
    if guarantee is None or not paid or guarantee.name not in EXACT:
        return None
    releases = [event.release for event in paid]
    if guarantee.name.startswith("statistics"):
        bound, delta, attack = _statistics(experiment, paid, cost["delta"], data)
    else:
        bound, delta, attack = _bound(experiment, releases, guarantee.name, cost["delta"], size, data.classes)
    pure = delta == 0 and cost["delta"] > 0
    return Finding(
        f"{guarantee.name}, {len(releases)} release{'s' if len(releases) > 1 else ''}",
        stated(guarantee.name),
        claim=cost["epsilon_pure"] if pure else cost["epsilon_total"],
        delta=delta,
        bound=bound,
        confidence=1.0,
        attack=f"exact: {attack}",
    )


def paid_most(events: Iterable[Event], cost: dict[str, Any]) -> list[Event]:
    """Return the events that the total composes: of the dearest site, or sites, where records overlap."""
    by_site: dict[int, list[Event]] = {}
    for event in events:
        by_site.setdefault(event.client, []).append(event)
    dearest = sorted(by_site.values(), key=lambda own: spent(own, delta=cost["delta"]), reverse=True)
    return [event for own in dearest[: cost["sites_per_record"]] for event in own]


def _statistics(
    experiment: Experiment, paid: Sequence[Event], delta: float, data: DataSet
) -> tuple[float, float, str]:
    """Return the loss of the very statistics that were released, each in its stage."""
    config = experiment.trainer
    assert isinstance(config, Functional)  # by its guarantee
    solver = Solver(experiment.network(data.shape, data.classes), cross=config.cross)
    stages = solver.statistics
    released = [(stages[min(event.round, len(stages)) - 1], noise_spec(event.release)) for event in paid]

    def worlds(noise: Noise, world: bool) -> None:
        for statistic, noisy in released:
            one_more(statistic, noisy)(noise, world)

    at = delta if isinstance(paid[0].release, Gaussian) else 0.0
    kinds = ", ".join(dict.fromkeys(type(statistic).__name__ for statistic, _ in released))
    return (
        loss(worlds, delta=at),
        at,
        f"one more record, as long as the bound allows, in every stage ({kinds})",
    )


def _bound(
    experiment: Experiment, releases: Sequence[Release], name: str, delta: float, size: int, classes: int
) -> tuple[float, float, str]:
    first = releases[0]
    if name.startswith("psgd"):
        return _sampled(releases, delta)
    if isinstance(first, SparseVector):
        bound = sum(
            count * sum(_sparse_vector(experiment, each, name, size))
            for each, count in Counter(releases).items()
            if isinstance(each, SparseVector)
        )
        return bound, 0.0, "all magnitudes and values move by what they can, in every round; at δ = 0"
    if name.startswith("svm"):
        return _svm(experiment, releases, name, delta, classes)
    if name.startswith(("dpme", "filter_priority")):
        worlds = histogram_worlds(name.removesuffix("_add_remove"), [noise_spec(r).value for r in releases])
        return loss(worlds), 0.0, "one more record, in a cell of its own"
    if name == "random_mask":
        assert isinstance(experiment.strategy, Dssgd)
        clip, change = experiment.strategy.clip or 1.0, np.full(SIZE, 1e3, np.float32)

        def worlds(noise: Noise, world: bool) -> None:
            for each in releases:
                mask = RandomMask(SIZE, clip=clip, multiplier=noise_spec(each).value)
                mask.select(change if world else -change, noise=noise)

        told = "a change of full length and its opposite, in every round"
        return loss(worlds, delta=delta), delta, told
    raise PrivacyError(f"no exact loss of {name!r} is known")


def _sampled(releases: Sequence[Release], delta: float) -> tuple[float, float, str]:
    sums = [each for each in releases if isinstance(each, SampledGaussian)]
    moments = [each.noise_multiplier for each in releases if isinstance(each, Gaussian)]
    also = f"moments of full length in {len(moments)} release{'s' if len(moments) > 1 else ''}"
    if not sums:
        multiplier = 1 / math.sqrt(sum(1 / each**2 for each in moments))
        return gaussian_epsilon(multiplier=multiplier, delta=delta), delta, also
    steps = sum(each.steps for each in sums)
    bound = sampled_gaussian_loss(sums[0].noise_multiplier, sums[0].sample_rate, steps, delta, beside=moments)
    told = f"all {steps} noisy sums, a gradient of length C in each"
    return bound, delta, f"{told}; {also}" if moments else told


def _sparse_vector(experiment: Experiment, each: SparseVector, name: str, size: int) -> tuple[float, float]:
    strategy = experiment.strategy
    assert isinstance(strategy, Dssgd)
    bound = strategy.bound or 1.0

    def once(values: Values, noise: Noise) -> Released:
        options: dict[str, Any] = {"bound": bound, "threshold": strategy.threshold, "count": each.count}
        if name == "sparse_vector":
            return sparse_vector(values, epsilon=each.epsilon, noise=noise, split=strategy.split, **options)
        printed = name == "sparse_vector_as_printed"
        return figure_12(values, epsilon=each.epsilon, noise=noise, as_printed=printed, **options)

    return sparse_vector_losses(
        once,
        bound=bound,
        count=each.count,
        segments=name != "sparse_vector",
        negatives=size - each.count,
        threshold=strategy.threshold,
    )


def _svm(
    experiment: Experiment, releases: Sequence[Release], name: str, delta: float, classes: int
) -> tuple[float, float, str]:
    assert isinstance(experiment.trainer, Svm)  # by its guarantee
    problems = 1 if classes == 2 else classes
    kind, at = experiment.trainer.noise_kind(experiment), delta if isinstance(releases[0], Gaussian) else 0.0
    one, other = (opposed_weights(sign, as_printed=name == "svm_as_printed") for sign in (1.0, -1.0))
    solved = [np.stack([weights] * problems) for weights in (one, other)]

    def worlds(noise: Noise, world: bool) -> None:
        options: dict[str, Any] = {"cost": COST, "records": RECORDS, "problems": problems}
        for released in releases:
            perturbed(
                solved[world], kind=kind, noise_value=noise_spec(released).value, noise=noise, **options
            )

    told = f"one of {RECORDS} records turns round, all others in pairs that cancel; {kind} noise"
    return loss(worlds, delta=at), at, told
