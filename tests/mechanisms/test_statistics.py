"""Statistics: sensitivities by search, noise as it is asked for, and what is computed from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fed_dp.errors import PrivacyError
from fed_dp.mechanisms import SimulationNoise, gaussian_epsilon, gaussian_multiplier, statistics
from fed_dp.mechanisms.statistics import (
    HeadStatistics,
    MapMoments,
    NoiseSpec,
    PatchMoments,
    deviation,
    minimiser,
    positive,
    principal,
    release,
)
from tests.mechanisms.privacy_loss import Spy, mutant

LABELS = np.array([2])
ROWS = np.full((1, 3), 5.0)  # targets that are numbers, of too large a norm
SHARES = np.array([0.4, 0.3, 0.1, 0.1, 0.05, 0.05])
KINDS: dict[str, tuple[tuple[Any, ...], tuple[int, ...]]] = {  # how it is made, the shape of a record
    "HeadStatistics": ((7, 3), (7,)),
    "HeadStatistics, cross 2": ((7, 3, 2.0), (7,)),
    "HeadStatistics, rows": ((7, 3, 1.0, True), (7,)),
    "MapMoments": ((4, 6), (4, 6)),
    "MapMoments, one channel": ((1, 9), (1, 9)),
    "PatchMoments": ((5,), (8, 5)),
    "ClassSums": ((SHARES, np.ones(5), 3), (6,)),
}


def make(kind: str, module: ModuleType = statistics) -> Any:
    return getattr(module, kind.split(",")[0])(*KINDS[kind][0])


def records(kind: str) -> Iterator[np.ndarray]:
    """Random records of all sizes, and such as are made to hurt."""
    shape = KINDS[kind][1]
    rng = np.random.default_rng(1)
    yield np.ones((1, *shape)) * 1e30
    yield np.ones((1, *shape), np.float32) * 3e38
    yield np.full((1, *shape), np.inf)
    yield np.full((1, *shape), np.nan)
    yield np.ones((1, *shape)) / math.sqrt(shape[-1])
    single = np.zeros((1, *shape))
    single[..., 0] = 5
    yield single
    signs = rng.choice([-1.0, 1.0], size=shape[-1])
    yield np.broadcast_to(signs, (1, *shape)) * 9
    for _ in range(300):
        yield rng.normal(size=(1, *shape)) * rng.exponential(2)


def lengths(kind: str, module: ModuleType = statistics) -> tuple[list[float], list[float]]:
    """The L1 norm of each record's part, and its L2 norm as Gaussian noise sees it: over the sensitivity."""
    statistic, targets = make(kind, module), ROWS if "rows" in kind else LABELS
    base = [(next(iter(records(kind))) * 0 + 0.1, targets)]
    found: tuple[list[float], list[float]] = ([], [])
    for record in records(kind):
        for spec, norm, lengths in (("laplace", 1, found[0]), ("gaussian", 2, found[1])):
            spy = Spy()
            for batches in (base, [*base, (record, targets)]):
                module.release(statistic, iter(batches), module.NoiseSpec(spec, 1.0), spy)
            (without, scale), (together, _) = spy.calls
            lengths.append(float(np.linalg.norm(together - without, norm) / scale))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_no_record_moves_a_statistic_by_more_than_is_stated_and_some_move_it_by_as_much(kind: str) -> None:
    for found in lengths(kind):
        assert 0.99 < np.max(found) <= 1


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("HeadStatistics", ("exact * (_BELOW_ONE / np.maximum(norms, 1))", "exact")),
        ("HeadStatistics", ("return math.sqrt(1 + self.cross**2)", "return 1.0")),
        ("HeadStatistics, cross 2", ("return math.sqrt(1 + self.cross**2)", "return math.sqrt(2)")),
        ("HeadStatistics", ("+ math.sqrt(self.features * (", "+ 0 * math.sqrt(self.features * (")),
        ("HeadStatistics, rows", ("(self.classes if self.rows else 1)", "1")),
        ("HeadStatistics, rows", ("y = clipped(targets)", "y = targets")),
        ("HeadStatistics", ("return spec.value * statistic", "return spec.value / 2 * statistic")),
        ("HeadStatistics", ("return statistic.l1 / spec.value", "return statistic.l1 / 2 / spec.value")),
        ("MapMoments", ("return math.sqrt(1 + len(self.sides))", "return math.sqrt(2)")),
        ("MapMoments", ("math.sqrt(self.channels * self.positions) + sum", "sum")),
        ("PatchMoments", ("_pack(v.T @ v) / records.shape[1]", "_pack(v.T @ v)")),
        ("PatchMoments", ("return (self.patch + 1) / 2", "return 1.0")),
        ("PatchMoments", ("columns, 1.0, math.sqrt(2))", "columns, 1.0, 2.0)")),
        ("ClassSums", (".clip(-_BELOW_ONE, _BELOW_ONE)", "")),
        ("ClassSums", ("np.sqrt(self.shares)", "self.shares ** 0.25")),
        ("ClassSums", ("each = self.shares if", "each = np.sqrt(self.shares) if")),
        ("MapMoments, one channel", ("np.nan_to_num(rows.astype(np.float64))", "rows.astype(np.float64)")),
    ],
)  # fmt: skip
def test_a_weakened_statistic_is_found(kind: str, change: tuple[str, str]) -> None:
    weakened = mutant(import_module("fed_dp.mechanisms.statistics"), change)
    with np.errstate(over="ignore"):
        assert not all(np.max(found) <= 1 for found in lengths(kind, weakened))


def test_the_noise_is_what_the_amount_says_entry_by_entry() -> None:
    head, spec = HeadStatistics(20, 4, 2.0), NoiseSpec("gaussian", 3.0)
    noise = SimulationNoise(np.random.default_rng(0))
    drawn = np.stack([release(head, [], spec, noise) for _ in range(400)])
    gram, cross = head.unpack(drawn.std(0))
    sigma = 3.0 * math.sqrt(5)
    assert deviation(head, spec) == pytest.approx(sigma, rel=1e-3)
    assert np.diag(gram).mean() == pytest.approx(sigma, rel=0.05)
    assert gram[np.triu_indices(20, 1)].mean() == pytest.approx(sigma / math.sqrt(2), rel=0.02)
    assert cross.mean() == pytest.approx(sigma / 2, rel=0.02)
    pure = NoiseSpec("laplace", 0.5)
    drawn = np.stack([release(head, [], pure, noise) for _ in range(400)])
    assert drawn.std(0).mean() == pytest.approx(deviation(head, pure), rel=0.05)


def test_without_noise_statistics_are_the_plain_sums_whatever_the_batches() -> None:
    rng = np.random.default_rng(0)
    h = rng.normal(size=(50, 6))
    h /= np.linalg.norm(h, axis=1, keepdims=True) * 1.0000001
    y = rng.integers(3, size=50)
    head = HeadStatistics(6, 3)
    whole, parts = (
        release(head, ((h[i : i + n], y[i : i + n]) for i in range(0, 50, n)), None, None) for n in (50, 7)
    )
    assert parts == pytest.approx(whole)
    gram, cross = head.unpack(whole)
    assert gram == pytest.approx(h.T @ h)
    assert cross == pytest.approx(h.T @ np.eye(3)[y])
    assert len(whole) == head.size
    maps = rng.normal(size=(40, 3, 5)) / 10
    moments = MapMoments(3, 5)
    mean, channels, positions = moments.unpack(release(moments, [(maps, y[:40])], None, None) / 40)
    centred = maps - maps.mean(0)
    assert mean == pytest.approx(maps.mean(0))
    assert channels == pytest.approx(np.einsum("ncs,nds->cd", centred, centred) / 40, abs=1e-9)
    assert positions == pytest.approx(np.einsum("ncs,nct->st", centred, centred) / 40, abs=1e-9)


def test_the_truncated_cross_entropy_has_the_minimiser_of_least_squares() -> None:
    rng = np.random.default_rng(3)
    h, y = rng.normal(size=(200, 5)) / 5, rng.integers(2, size=200)
    head = HeadStatistics(5, 2)
    gram, cross = head.unpack(release(head, [(h, y)], None, None))
    target = (cross[:, 1] - cross.sum(1) / 2)[:, None]  # Σ (y − ½) h
    w = minimiser(gram / 4, target, ridge=1e-12)  # of Σ (½ − y) z + z²/8
    gradient = h.T @ ((0.5 - y) + (h @ w[:, 0]) / 4)
    assert gradient == pytest.approx(np.zeros(5), abs=1e-8)
    assert w == pytest.approx(4 * minimiser(gram, target, ridge=1e-12))


def test_an_indefinite_objective_is_projected_and_never_drawn_again() -> None:
    rng = np.random.default_rng(0)
    noisy = rng.normal(size=(30, 30))
    noisy = noisy + noisy.T
    projected = positive(noisy)
    assert np.linalg.eigvalsh(noisy)[0] < -1
    assert np.linalg.eigvalsh(projected)[0] > -1e-9
    values = np.linalg.eigvalsh(noisy)
    assert np.linalg.norm(projected - noisy) == pytest.approx(np.linalg.norm(values[values < 0]))
    cross = rng.normal(size=(30, 2))
    w = minimiser(noisy, cross, ridge=0.5)
    assert (projected + 0.5 * np.eye(30)) @ w == pytest.approx(cross)
    spy = Spy()
    release(HeadStatistics(3, 2), [(-np.eye(3), np.zeros(3, int))], NoiseSpec("gaussian", 1.0), spy)
    assert len(spy.calls) == 1


def test_directions_do_not_depend_on_who_computes_them() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(size=(12, 12))
    values, vectors = principal(a @ a.T)
    assert (np.diff(values) <= 0).all()
    order = rng.permutation(12)  # another way to the same decomposition
    other_values, other = principal((a @ a.T)[np.ix_(order, order)])
    assert other_values == pytest.approx(values)
    back = np.empty_like(other)
    back[order] = other
    assert np.abs((back * vectors).sum(0)) == pytest.approx(np.ones(12))
    noisy = a + a.T  # indefinite: its negative directions must be as sure as the others
    values, vectors = principal(noisy)
    again, nearly = principal(noisy + 1e-13 * rng.normal(size=(12, 12)))
    assert (values[-3:] == 0).all()
    assert nearly == pytest.approx(vectors, abs=1e-9)
    assert again == pytest.approx(values)


@pytest.mark.parametrize("shares", [(0.05, 0.95), (0.05, 0.05, 0.9), (1.0,)])
def test_shares_of_a_budget_add_up_to_it(shares: tuple[float, ...]) -> None:
    one = gaussian_multiplier(epsilon=2.0, delta=1e-5)
    parts = [one / math.sqrt(share) for share in shares]
    together = 1 / math.sqrt(sum(1 / part**2 for part in parts))
    assert gaussian_epsilon(multiplier=together, delta=1e-5) == pytest.approx(2.0)


def test_an_amount_that_is_none_is_refused() -> None:
    for value in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(PrivacyError, match="expected a number above 0"):
            NoiseSpec("gaussian", value)


def test_patch_moments_are_the_mean_over_a_records_patches() -> None:
    rng = np.random.default_rng(0)
    patches = rng.normal(size=(6, 10, 4)) / 9
    found = PatchMoments(4).unpack(release(PatchMoments(4), [(patches, np.zeros(6, int))], None, None))
    assert found == pytest.approx(np.einsum("npi,npj->ij", patches, patches) / 10)
