"""Sufficient statistics of bounded records, released once; whatever is computed from them is free.

The functional mechanism with a data-independent (or already private) encoder: for features h and labels
y, the truncated cross-entropy Σ [log 2 + (½ − y) z + z²/8], z = w·h, is a polynomial in w whose
coefficients are linear in Σ h hᵀ and Σ h yᵀ. Its minimiser is that of least squares, so the same two
sums serve both. Moments of maps and of patches give an encoder in the same way.

Every class bounds each record's contribution itself and derives both sensitivities from that bound.
Neighbours of a sum: add or remove one record. It is divided, later, by a public number.

References: Zhang et al., "Functional Mechanism", PVLDB 2012; Dwork et al., "Analyze Gauss", STOC 2014.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fed_dp.errors import PrivacyError
from fed_dp.mechanisms.laplace import check
from fed_dp.mechanisms.noise import FINENESS, ExactSum, Noise, Reals, SecureNoise

Exact = NDArray[np.float64]
Kind = Literal["gaussian", "laplace"]
# Records as the statistic takes them, and of each its class, or a row of targets of norm at most 1.
Batch = tuple[Reals, NDArray[Any]]
ROUNDING = 1e-4  # of the scale
MIN_RIDGE = 1e-6  # of a mean of matrices of norm 1
SOFTENING = 0.005  # of scores, which count every pixel as if it were alone
_BELOW_ONE = 1 - 1e-12  # no rounding error lifts a clipped norm over 1


@dataclass(frozen=True, slots=True)
class NoiseSpec:
    """How much noise: Gaussian with σ = value · Δ₂, or Laplace of scale Δ₁ / value (value = ε)."""

    kind: Kind
    value: float

    def __post_init__(self) -> None:
        check(**{"multiplier" if self.kind == "gaussian" else "epsilon": self.value})


class Statistic(Protocol):
    """A sum over records of vectors of bounded norm."""

    @property
    def size(self) -> int:
        """How many numbers it is."""
        ...

    @property
    def l1(self) -> float:
        """The largest L1 norm of one record's part, as weighted: the sensitivity of Laplace noise."""
        ...

    @property
    def l2(self) -> float:
        """The largest L2 norm of one record's part, as weighted: the sensitivity of Gaussian noise."""
        ...

    def weights(self, kind: Kind) -> Exact:
        """By what each number is multiplied before noise of a kind, and divided after."""
        ...

    def sums(self, batch: Batch) -> Exact:
        """Return the sum over a batch, each record's part bounded."""
        ...


class OfHead(Statistic, Protocol):
    """A statistic that a linear head is made of."""

    def head(self, mean: Reals, *, noise: float, kind: Kind, ridge: float) -> Exact:
        """Return the head (features × classes) that a mean over records asks for.

        `noise` is the standard deviation, in that mean, of a number of weight 1.
        """
        ...


@dataclass(frozen=True, slots=True)
class HeadStatistics:
    """Σ h hᵀ (upper triangle) and Σ h yᵀ, for ‖h‖₂ clipped to 1, and y one-hot or (`rows`) ‖y‖₂ clipped to 1.

    Gaussian: off-diagonal entries are weighted by √2, so that a record's part of the triangle has the
    norm of its whole matrix, ‖h hᵀ‖_F = ‖h‖² ≤ 1: the same sensitivity as without weights, and
    noise smaller by √2 where nearly all entries are. Σ h yᵀ is weighted by `cross`: Δ₂ = √(1 + cross²).
    Laplace: Δ₁ = (b + 1)/2 + √b, reached by h = (1, …, 1)/√b; with rows of k numbers, (b + 1)/2 + √(b·k).
    """

    features: int  # b
    classes: int  # or how many numbers a row of targets has, k
    cross: float = 1.0
    rows: bool = False
    scale: float = 1.0  # of outputs, over targets: what the head is multiplied by

    @property
    def size(self) -> int:
        """b(b + 1)/2 + b · classes."""
        return _triangle(self.features) + self.features * self.classes

    @property
    def l1(self) -> float:
        """(b + 1)/2 + √b, or with rows √(b·k)."""
        return (self.features + 1) / 2 + math.sqrt(self.features * (self.classes if self.rows else 1))

    @property
    def l2(self) -> float:
        """√(1 + cross²)."""
        return math.sqrt(1 + self.cross**2)

    def weights(self, kind: Kind) -> Exact:
        """Weigh, for Gaussian noise, the triangle by √2 off the diagonal, the rest by `cross`."""
        if kind == "laplace":
            return np.ones(1)
        return np.concatenate(
            [_root_two(self.features), np.full(self.features * self.classes, float(self.cross))]
        )

    def sums(self, batch: Batch) -> Exact:
        """Return both sums."""
        rows, targets = batch
        h = clipped(rows.reshape(len(rows), -1))
        y = clipped(targets) if self.rows else _one_hot(targets, self.classes)
        return np.concatenate([_pack(h.T @ h), (h.T @ y).ravel()])

    def unpack(self, vector: Reals) -> tuple[Exact, Exact]:
        """Return Σ h hᵀ as a symmetric matrix, and Σ h yᵀ on the scale of outputs."""
        cut = _triangle(self.features)
        exact = np.asarray(vector, np.float64)
        return _symmetric(exact[:cut]), self.scale * exact[cut:].reshape(self.features, self.classes)

    def head(self, mean: Reals, *, noise: float, kind: Kind, ridge: float) -> Exact:
        """Return the minimiser of least squares with a ridge."""
        gram, cross = self.unpack(mean)
        return minimiser(gram, cross, ridge=self.ridge(ridge, noise))

    def ridge(self, factor: float, noise: float) -> float:
        """Return `factor` times the size of the noise in Σ h hᵀ, and never nothing.

        A symmetric random matrix has a spectral norm of about √b of its entries' standard deviation.
        """
        return max(factor * noise * math.sqrt(self.features), MIN_RIDGE)


@dataclass(frozen=True, slots=True, eq=False)
class ClassSums:
    """Σ_i y_il h_ij for features |h_ij| ≤ 1: of each class, the sum of each feature (AdLM, proved).

    Feature j has `shares`_j of the budget; shares add up to 1. Laplace: number (j, l) gets noise of scale
    1/ε_j with ε_j = shares_j ε, since one record adds at most 1 to it, in one class alone: Σ_j ε_j = ε,
    reached by |h| = 1 everywhere. Gaussian: features are scaled by √shares_j, so that Δ₂ = 1.
    `prior`_j is how much the classes' means are expected to differ in feature j: from public records.
    The last feature is the constant 1, so that its sums are the classes' counts.
    """

    shares: Exact
    prior: Exact
    classes: int

    def __post_init__(self) -> None:
        if not (self.shares > 0).all() or not math.isclose(self.shares.sum(), 1, rel_tol=1e-9):
            raise PrivacyError(
                f"shares of the budget add up to {self.shares.sum():g}: expected 1, all above 0"
            )

    @property
    def size(self) -> int:
        """Features · classes."""
        return len(self.shares) * self.classes

    @property
    def l1(self) -> float:
        """1."""
        return 1.0

    @property
    def l2(self) -> float:
        """1."""
        return 1.0

    def weights(self, kind: Kind) -> Exact:
        """Weigh by shares, or by their roots."""
        each = self.shares if kind == "laplace" else np.sqrt(self.shares)
        return np.repeat(each, self.classes)

    def sums(self, batch: Batch) -> Exact:
        """Return the sums."""
        rows, labels = batch
        h = np.nan_to_num(rows.reshape(len(rows), -1).astype(np.float64)).clip(-_BELOW_ONE, _BELOW_ONE)
        return np.asarray((h.T @ _one_hot(labels, self.classes)).ravel())

    def head(self, mean: Reals, *, noise: float, kind: Kind, ridge: float) -> Exact:
        """Return the head of the nearest class mean, features weighed by prior/(prior + noise variance).

        A record is as near to class l as Σ_j s_j (h_j m_lj − m_lj²/2), with means m and s_j ≤ 1.
        """
        sums = np.asarray(mean, np.float64).reshape(-1, self.classes)
        counts = np.maximum(sums[-1], 0.1 / self.classes)  # of a share of records that noise may have hidden
        means = sums[:-1] / counts
        spread = (noise * self.classes / self.weights(kind)[:: self.classes][:-1]) ** 2
        kept = (self.prior / (self.prior + spread))[:, None] * means
        return np.concatenate([kept, -(kept * means).sum(0, keepdims=True) / 2]) * SOFTENING


@dataclass(frozen=True, slots=True)
class MapMoments:
    """First and second moments of maps u (channels × positions) with ‖u‖_F clipped to 1.

    Σ u, Σ u uᵀ over channels and Σ uᵀ u over positions: enough for an approximate principal component
    analysis whose axes are products of one direction among channels and one among positions, at a
    fraction of the noise of all (C·S)² second moments. With one channel it is the whole analysis.
    Gaussian: Δ₂ = √3 (√2 with one channel), reached by every u of rank one.
    Laplace: Δ₁ = √(C·S) + (C + 1)/2 + (S + 1)/2 (without the middle term), reached by a constant u.
    """

    channels: int  # C
    positions: int  # S

    @property
    def size(self) -> int:
        """C·S numbers and the triangles."""
        return self.channels * self.positions + sum(map(_triangle, self.sides))

    @property
    def l1(self) -> float:
        """√(C·S) plus half of each side and one."""
        return math.sqrt(self.channels * self.positions) + sum((side + 1) / 2 for side in self.sides)

    @property
    def l2(self) -> float:
        """√(1 + number of triangles)."""
        return math.sqrt(1 + len(self.sides))

    @property
    def sides(self) -> tuple[int, ...]:
        """The sides of its matrices of second moments."""
        return (self.positions,) if self.channels == 1 else (self.channels, self.positions)

    def weights(self, kind: Kind) -> Exact:
        """Weigh, for Gaussian noise, the triangles by √2 off their diagonals."""
        if kind == "laplace":
            return np.ones(1)
        return np.concatenate([np.ones(self.channels * self.positions), *map(_root_two, self.sides)])

    def sums(self, batch: Batch) -> Exact:
        """Return the three sums."""
        u = clipped(batch[0].reshape(len(batch[0]), -1)).reshape(-1, self.channels, self.positions)
        across = u.transpose(1, 0, 2).reshape(self.channels, -1)
        along = u.reshape(-1, self.positions)
        triangles = [_pack(along.T @ along)]
        if self.channels > 1:
            triangles.insert(0, _pack(across @ across.T))
        return np.concatenate([u.sum(0).ravel(), *triangles])

    def unpack(self, vector: Reals) -> tuple[Exact, Exact, Exact]:
        """Return the mean map and the centred second moments of channels and positions, noisy as they are.

        `vector` is a mean over records.
        """
        exact = np.asarray(vector, np.float64)
        cut = self.channels * self.positions
        mean = exact[:cut].reshape(self.channels, self.positions)
        parts, triangles = [], exact[cut:]
        for side in self.sides:
            parts.append(_symmetric(triangles[: _triangle(side)]))
            triangles = triangles[_triangle(side) :]
        positions = parts[-1] - mean.T @ mean
        channels = parts[0] - mean @ mean.T if self.channels > 1 else np.ones((1, 1))
        return mean, channels, positions


@dataclass(frozen=True, slots=True)
class PatchMoments:
    """Σ over records of the mean of v vᵀ over a record's patches v, each with ‖v‖₂ clipped to 1.

    It is what the energy of a convolutional RBM, truncated at degree 1 with a fixed normaliser, asks of
    the records: the same for every filter. Gaussian: Δ₂ = 1, reached when all patches are one unit
    vector. Laplace: Δ₁ = (p + 1)/2.
    """

    patch: int  # p, numbers in a patch

    @property
    def size(self) -> int:
        """p(p + 1)/2."""
        return _triangle(self.patch)

    @property
    def l1(self) -> float:
        """(p + 1)/2."""
        return (self.patch + 1) / 2

    @property
    def l2(self) -> float:
        """1."""
        return 1.0

    def weights(self, kind: Kind) -> Exact:
        """Weigh, for Gaussian noise, by √2 off the diagonal."""
        return np.ones(1) if kind == "laplace" else _root_two(self.patch)

    def sums(self, batch: Batch) -> Exact:
        """Return the sum; a record is (patches, p)."""
        records = batch[0]
        v = clipped(records.reshape(-1, self.patch))
        return np.asarray(_pack(v.T @ v) / records.shape[1])

    def unpack(self, vector: Reals) -> Exact:
        """Return the second moments, noisy as they are."""
        return _symmetric(np.asarray(vector, np.float64))


def release(
    statistic: Statistic,
    batches: Iterable[Batch],
    spec: NoiseSpec | None,
    noise: Noise | None,
    *,
    records: int = 0,
) -> Exact:
    """Return the statistic of all batches together, with noise; without, where `spec` is None.

    Guarantee: that of one Gaussian release with σ/Δ₂ = spec.value, or pure ε = spec.value; proved.
    Neighbours: add or remove one record. The scale is larger than that by ROUNDING, for a record's part
    is computed in floating point. With a secure source every batch is one record, whose part is cut to whole
    multiples of a grid; these are added without rounding. `records`, which is public, tells whether noise can
    be added to a sum of so many; whatever the records are, it does not wrap.
    """
    weights = np.ones(1) if spec is None else statistic.weights(spec.kind)
    scale = 0.0 if spec is None else _scale(statistic, spec)
    if isinstance(noise, SecureNoise) and spec is not None:
        noise.check(records * float(weights.max()), scale=scale)
        exact = ExactSum(statistic.size)
        for rows, labels in batches:
            if len(labels) != 1:
                raise PrivacyError(f"a batch of {len(labels)} records: expected 1, so that sums are exact")
            exact.add(noise.whole(statistic.sums((rows, labels)) * weights, scale=scale))
        add_to = noise.laplace_on_whole if spec.kind == "laplace" else noise.gaussian_on_whole
        return np.asarray(add_to(exact.taken(), scale=scale) / weights)
    total = np.zeros(statistic.size)
    for batch in batches:
        total += statistic.sums(batch)
    if spec is None or noise is None:
        return total
    add = noise.laplace if spec.kind == "laplace" else noise.gaussian
    return add(total * weights, scale=scale) / weights


def _scale(statistic: Statistic, spec: NoiseSpec) -> float:
    if spec.kind == "laplace":
        on_grid = 2 * statistic.size * FINENESS / spec.value
        return statistic.l1 / spec.value * (1 + ROUNDING + on_grid)
    return spec.value * statistic.l2 * (1 + ROUNDING)


def deviation(statistic: Statistic, spec: NoiseSpec | None) -> float:
    """Return the standard deviation of the noise on one number of weight 1."""
    if spec is None:
        return 0.0
    return _scale(statistic, spec) * (math.sqrt(2) if spec.kind == "laplace" else 1.0)


def positive(matrix: Reals) -> Exact:
    """Return the nearest positive semidefinite matrix. Post-processing: free.

    Drawing noise again until the matrix is positive is not, and is not done.
    """
    values, vectors = np.linalg.eigh(np.asarray(matrix, np.float64))
    return np.asarray((vectors * np.maximum(values, 0)) @ vectors.T)


def minimiser(gram: Reals, cross: Reals, *, ridge: float) -> Exact:
    """Return argmin ½ tr Wᵀ (G₊ + ridge) W − tr Wᵀ C: the head that a noisy objective asks for."""
    values, vectors = np.linalg.eigh(np.asarray(gram, np.float64))
    return np.asarray((vectors / (np.maximum(values, 0) + ridge)) @ (vectors.T @ cross))


def principal(matrix: Reals) -> tuple[Exact, Exact]:
    """Return eigenvalues, largest first and none below 0, and eigenvectors with a fixed sign.

    All sites must come to the same vectors. So a matrix that noise has made indefinite is not projected
    first: that would leave its negative directions all alike, to be told apart by rounding alone.
    """
    values, vectors = np.linalg.eigh(np.asarray(matrix, np.float64))
    values, vectors = values[::-1], vectors[:, ::-1]
    anchor = np.sin(1 + np.arange(len(values)))  # no direction that eigenvectors are orthogonal to
    return np.maximum(values, 0), vectors * np.where(anchor @ vectors < 0, -1.0, 1.0)


def _one_hot(labels: NDArray[np.int64], classes: int) -> Exact:
    one_hot = np.zeros((len(labels), classes))
    one_hot[np.arange(len(labels)), labels] = 1
    return one_hot


def clipped(rows: Reals) -> Exact:
    """Return rows of norm at most 1; what is no number counts as 0."""
    exact = np.clip(np.nan_to_num(rows.astype(np.float64)), -1e100, 1e100)
    norms = np.linalg.norm(exact, axis=1, keepdims=True)
    return np.asarray(exact * (_BELOW_ONE / np.maximum(norms, 1)))


def _triangle(side: int) -> int:
    return side * (side + 1) // 2


@lru_cache(maxsize=16)
def _upper(side: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    return np.triu_indices(side)


def _pack(matrix: Exact) -> Exact:
    return matrix[_upper(len(matrix))]


def _symmetric(triangle: Exact) -> Exact:
    side = int((math.isqrt(8 * len(triangle) + 1) - 1) // 2)
    matrix = np.zeros((side, side))
    matrix[_upper(side)] = triangle
    return matrix + np.triu(matrix, 1).T


def _root_two(side: int) -> Exact:
    rows, columns = _upper(side)
    return np.where(rows == columns, 1.0, math.sqrt(2))
