"""Audits of mechanisms: the exact loss between the worst neighbours that we know, from their own code.

Each function builds two neighbouring inputs, lets the mechanism ask a spy for noise in both worlds, and
computes the loss: once as with seeded noise, and once with the code for secure noise (sums of whole multiples
of a grid). With `factor` the noise is that much smaller or larger, to see whether an audit notices. pSGD is
measured instead, on each of its ways of computing (`psgd`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import numpy as np

from fed_dp.audit.exact import SPIES, Values, loss, sparse_vector_losses
from fed_dp.audit.finding import Finding, StatedGuarantee, stated
from fed_dp.audit.psgd import audit_path
from fed_dp.clients.psgd import PATHS
from fed_dp.clients.svm.trainer import liblinear
from fed_dp.errors import ConfigError, PrivacyError
from fed_dp.mechanisms import (
    Noise,
    Released,
    figure_12,
    gaussian,
    gaussian_multiplier,
    laplace,
    sparse_vector,
)
from fed_dp.mechanisms.histogram import Grid, filter_priority, noisy_histogram
from fed_dp.mechanisms.statistics import (
    ClassSums,
    HeadStatistics,
    Kind,
    MapMoments,
    NoiseSpec,
    PatchMoments,
    Statistic,
    release,
)
from fed_dp.mechanisms.support_vector import SvmNoise, perturbed, solve
from fed_dp.sharing.private_selection import RandomMask

ANY = StatedGuarantee("proved", "input", "any two inputs")
COUNT, BOUND, THRESHOLD = 3, 0.5, 0.2  # c, γ and τ of sparse vectors
SIZE = 20  # numbers of other inputs
RECORDS, COST = 101, 0.5  # of support vector machines
Audit = Callable[[float, float, float], Iterator[Finding]]


def audit_mechanism(
    name: str, *, epsilon: float = 1.0, delta: float = 1e-5, factor: float = 1.0
) -> list[Finding]:
    """Audit a mechanism at a stated ε (and δ, where it is not pure)."""
    if name not in MECHANISMS:
        raise ConfigError(f"mechanism {name!r} is not known; known: {', '.join(MECHANISMS)}")
    check_numbers(epsilon=epsilon, delta=delta, noise=factor)
    return list(MECHANISMS[name](epsilon, delta, factor))


def check_numbers(*, epsilon: float, delta: float | None, noise: float) -> None:
    """Refuse an ε, δ or factor of the noise that is none."""
    given = (
        ("epsilon", epsilon, 1e9),
        ("delta", 1e-5 if delta is None else delta, 1.0),
        ("noise", noise, 1e6),
    )
    for key, value, most in given:
        if not 0 < value < most:
            raise ConfigError(f"--{key} = {value!r}: expected above 0 and below {most:g}")


def _found(
    subject: str,
    source: str,
    guarantee: StatedGuarantee,
    claim: float,
    bound: float,
    attack: str,
    *,
    delta: float,
    factor: float,
) -> Finding:
    return Finding(
        f"{subject}, {source} noise",
        guarantee,
        claim=claim,
        delta=delta,
        bound=bound,
        confidence=1.0,
        attack=attack,
        noise=factor,
    )


def _laplace(epsilon: float, _: float, factor: float) -> Iterator[Finding]:
    def worlds(noise: Noise, world: bool) -> object:
        return laplace(np.full(SIZE, 10.0 if world else -10.0), bound=1.0, epsilon=epsilon, noise=noise)

    attack = f"exact: {SIZE} values from one end of their bounds to the other"
    for source in SPIES:
        bound = loss(worlds, factor=factor, source=source)
        yield _found("laplace", source, ANY, epsilon, bound, attack, delta=0.0, factor=factor)


def _gaussian(epsilon: float, delta: float, factor: float) -> Iterator[Finding]:
    multiplier = gaussian_multiplier(epsilon=epsilon, delta=delta)

    def worlds(noise: Noise, world: bool) -> object:
        return gaussian(np.full(SIZE, 10.0 if world else -10.0), clip=1.0, multiplier=multiplier, noise=noise)

    attack = "exact: a vector of full length and its opposite"
    for source in SPIES:
        bound = loss(worlds, delta=delta, factor=factor, source=source)
        yield _found("gaussian", source, ANY, epsilon, bound, attack, delta=delta, factor=factor)


def _sparse_vector(form: str, epsilon: float, _: float, factor: float) -> Iterator[Finding]:
    def once(values: Values, noise: Noise) -> Released:
        options = {"bound": BOUND, "threshold": THRESHOLD, "count": COUNT, "epsilon": epsilon, "noise": noise}
        if form == "sparse_vector":
            return sparse_vector(values, **options)  # type: ignore[arg-type]
        return figure_12(values, as_printed=form == "sparse_vector_as_printed", **options)  # type: ignore[arg-type]

    for source in SPIES:
        finding, releasing = sparse_vector_losses(
            once, bound=BOUND, count=COUNT, segments=form != "sparse_vector", factor=factor, source=source
        )
        attack = (
            f"exact: {COUNT} of 10,000 magnitudes move from γ to 0, the others from 0 to γ ({finding:.3f}); "
            f"released values from −40γ to 40γ ({releasing:.3f})"
        )
        bound = finding + releasing
        yield _found(form, source, stated(form), epsilon, bound, attack, delta=0.0, factor=factor)


def _random_mask(epsilon: float, delta: float, factor: float) -> Iterator[Finding]:
    mask = RandomMask(SIZE, clip=1.0, multiplier=gaussian_multiplier(epsilon=epsilon, delta=delta))

    def worlds(noise: Noise, world: bool) -> object:
        return mask.select(np.full(SIZE, 10.0 if world else -10.0, np.float32), noise=noise)

    attack = "exact: a change of full length and its opposite, all of it uploaded"
    for source in SPIES:
        bound, guarantee = loss(worlds, delta=delta, factor=factor, source=source), stated("random_mask")
        yield _found("random_mask", source, guarantee, epsilon, bound, attack, delta=delta, factor=factor)


def _statistics(epsilon: float, delta: float, factor: float) -> Iterator[Finding]:
    """Every statistic, with Gaussian and with Laplace noise: one more record, of the worst kind."""
    shares = np.random.default_rng(0).dirichlet(np.ones(SIZE))
    statistics: dict[str, Statistic] = {
        "head": HeadStatistics(SIZE, 4),
        "map moments": MapMoments(4, 5),
        "patch moments": PatchMoments(SIZE),
        "class sums": ClassSums(shares, np.ones(SIZE - 1), 4),
    }
    noises: tuple[tuple[Kind, float, float], ...] = (
        ("gaussian", gaussian_multiplier(epsilon=epsilon, delta=delta), delta),
        ("laplace", epsilon, 0.0),
    )
    for (name, statistic), (kind, value, at), source in product(statistics.items(), noises, SPIES):
        worlds = one_more(statistic, NoiseSpec(kind, value))
        bound = loss(worlds, delta=at, factor=factor, source=source)
        attack = f"exact: one more record, as long as the bound allows; {name}, {kind} noise"
        what, guarantee = f"statistics ({name}, {kind})", stated("statistics")
        yield _found(what, source, guarantee, epsilon, bound, attack, delta=at, factor=factor)


def one_more(statistic: Statistic, noise_spec: NoiseSpec) -> Callable[[Noise, bool], object]:
    """Return what releases a statistic in two worlds, one with one more of its worst records."""
    record = worst_record(statistic)

    def worlds(noise: Noise, world: bool) -> object:
        label = np.zeros(1, np.int64)
        batches = [(record / 100, label), (record, label)]
        return release(statistic, batches[: 2 if world else 1], noise_spec, noise)

    return worlds


def worst_record(statistic: Statistic) -> Values:
    """Return a record, as a statistic takes it, whose part is as large as any: all its numbers are alike."""
    match statistic:
        case HeadStatistics():
            return np.full((1, statistic.features), 10.0)
        case MapMoments():
            return np.full((1, statistic.channels, statistic.positions), 10.0)
        case PatchMoments():
            return np.full((1, 3, statistic.patch), 10.0)
        case ClassSums():
            return np.full((1, len(statistic.shares)), 10.0)
    raise PrivacyError(f"no worst record of {type(statistic).__name__} is known")


def _histogram(form: str, epsilon: float, _: float, factor: float) -> Iterator[Finding]:
    """One more record, which is alone in its cell, or not."""
    for source, alone in product(SPIES, (True, False)):
        bound = loss(histogram_worlds(form, [epsilon], alone=alone), factor=factor, source=source)
        told = "that no other is in" if alone else "with others"
        attack = f"exact: one more record in a cell {told}"
        yield _found(form, source, stated(form), epsilon, bound, attack, delta=0.0, factor=factor)


def histogram_worlds(
    form: str, epsilons: Sequence[float], *, alone: bool = True
) -> Callable[[Noise, bool], object]:
    """Return what counts records in two worlds, one with one more, as often as there are budgets."""
    grid = Grid(attributes=2, bins=3, classes=2)
    rows = np.repeat([[0.9, -0.9]], RECORDS, axis=0)
    rows[0] = [-0.9, 0.0] if alone else rows[1]

    def worlds(noise: Noise, world: bool) -> None:
        cells = grid.cells_of(
            rows[0 if world else 1 :], np.zeros(RECORDS if world else RECORDS - 1, np.int64)
        )
        for epsilon in epsilons:
            if form == "dpme":
                noisy_histogram(cells, grid, expected=10 * RECORDS, epsilon=epsilon, noise=noise)
            else:
                filter_priority(cells, grid, expected=10 * RECORDS, epsilon=epsilon, size=5, noise=noise)

    return worlds


def _psgd(epsilon: float, delta: float, factor: float) -> Iterator[Finding]:
    for path in PATHS:
        yield audit_path(path, epsilon=epsilon, delta=delta, factor=factor)


def _svm(form: str, epsilon: float, delta: float, factor: float) -> Iterator[Finding]:
    """Pairs of equal records with opposite labels, which cancel, and one record that changes its label."""
    noises: tuple[tuple[SvmNoise, float, float], ...] = (("paper", epsilon, 0.0),)
    if form == "svm":
        multiplier = gaussian_multiplier(epsilon=epsilon, delta=delta)
        noises = (("gamma", epsilon, 0.0), ("laplace", epsilon, 0.0), ("gaussian", multiplier, delta))
    solved = [opposed_weights(sign, as_printed=form == "svm_as_printed") for sign in (1.0, -1.0)]
    for kind, noise_value, at in noises:

        def worlds(
            noise: Noise, world: bool, kind: SvmNoise = kind, noise_value: float = noise_value
        ) -> object:
            options = {"cost": COST, "records": RECORDS, "problems": 1}
            return perturbed(solved[world][None], kind=kind, noise_value=noise_value, noise=noise, **options)  # type: ignore[arg-type]

        pairs = f"{RECORDS} records, all but one in pairs that cancel"
        attack = f"exact: {pairs}; that one changes its label; {kind} noise"
        for source in SPIES:
            if (kind, source) == ("gamma", "secure"):  # which is refused
                continue
            bound = loss(worlds, delta=at, factor=factor, source=source)
            what = f"{form} ({kind})"
            yield _found(what, source, stated(form), epsilon, bound, attack, delta=at, factor=factor)


def opposed_weights(sign: float, *, as_printed: bool) -> Values:
    """Return w on records that move it by all they can: the last has the label `sign`.

    All others are in pairs that cancel. `as_printed`: C is not divided by n.
    """
    last = np.full(SIZE, 1 / math.sqrt(SIZE))
    half = np.random.default_rng(0).normal(size=(RECORDS // 2, SIZE))
    half /= np.linalg.norm(half, axis=1, keepdims=True)
    z = np.concatenate([half, half, last[None]])
    signs = np.concatenate([np.ones(len(half)), -np.ones(len(half)), [sign]])
    if as_printed:
        return np.asarray(liblinear(z, signs, cost=COST), np.float64)
    return np.asarray(solve(z, signs[:, None], cost=COST, expected=RECORDS)[0], np.float64)


MECHANISMS: dict[str, Audit] = {
    "laplace": _laplace,
    "gaussian": _gaussian,
    "sparse_vector": partial(_sparse_vector, "sparse_vector"),
    "sparse_vector_paper": partial(_sparse_vector, "sparse_vector_paper"),
    "sparse_vector_as_printed": partial(_sparse_vector, "sparse_vector_as_printed"),
    "random_mask": _random_mask,
    "statistics": _statistics,
    "psgd": _psgd,
    "svm": partial(_svm, "svm"),
    "svm_paper": partial(_svm, "svm_paper"),
    "svm_as_printed": partial(_svm, "svm_as_printed"),
    "dpme": partial(_histogram, "dpme"),
    "filter_priority": partial(_histogram, "filter_priority"),
}
