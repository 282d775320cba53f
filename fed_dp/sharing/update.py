"""A sparse update: some coordinates of a vector, with their values. Everything that is sent is one.

A download holds values of the most updated parameters, an upload the selected changes; a dense
vector is the update of all coordinates. Nothing is sent or used that this class has not checked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fed_dp.errors import UploadRefused

Vector = NDArray[np.float32]
Indices = NDArray[np.int64]

MAX_ABS_VALUE = 1e3  # of a weight or a change; beyond it a network only overflows


@dataclass(frozen=True, slots=True, eq=False)
class SparseUpdate:
    """`values[i]` belongs to coordinate `indices[i]` of a vector of `size` coordinates.

    Indices are sorted, unique and in range; values are finite and within ±`bound`. Anything else is
    an UploadRefused that names what was found. `indices` is None when all coordinates are there.
    """

    indices: Indices | None
    values: Vector
    size: int
    bound: float = MAX_ABS_VALUE

    def __post_init__(self) -> None:
        _check_values(self.values, self.bound)
        if self.indices is None:
            if self.values.size != self.size:
                raise UploadRefused(f"size: expected {self.size} values, found {self.values.size}")
        else:
            _check_indices(self.indices, self.values.size, self.size)

    @classmethod
    def dense(cls, values: Vector, *, bound: float = MAX_ABS_VALUE) -> SparseUpdate:
        """Return the update of all coordinates."""
        return cls(None, values, values.size, bound)

    @classmethod
    def of(cls, vector: Vector, indices: Indices, *, bound: float = MAX_ABS_VALUE) -> SparseUpdate:
        """Return the chosen coordinates of a vector."""
        if indices.size == vector.size:
            return cls.dense(vector, bound=bound)
        return cls(indices, vector[indices], vector.size, bound)

    def __len__(self) -> int:
        return int(self.values.size)

    def add_to(self, vector: Vector) -> None:
        """Add the values to their coordinates, in place."""
        vector[self._where] += self.values

    def overwrite(self, vector: Vector) -> None:
        """Put the values in place of their coordinates."""
        vector[self._where] = self.values

    @property
    def _where(self) -> Indices | slice:
        return slice(None) if self.indices is None else self.indices


def _check_values(values: Vector, bound: float) -> None:
    if values.dtype != np.float32 or values.ndim != 1:
        found = f"{values.dtype} of shape {values.shape}"
        raise UploadRefused(f"values: expected a float32 vector, found {found}")
    if values.size and not -bound <= values.min() <= values.max() <= bound:  # false for NaN, too
        position = int(np.flatnonzero(~(np.abs(values) <= bound))[0])
        raise UploadRefused(
            f"values: {values[position]} at position {position}, expected finite values within ±{bound:g}"
        )


def _check_indices(indices: Indices, values: int, size: int) -> None:
    if indices.dtype != np.int64 or indices.shape != (values,):
        raise UploadRefused(
            f"indices: expected {values} of type int64, one per value; "
            f"found {indices.dtype} of shape {indices.shape}"
        )
    if not values:
        return
    steps = np.diff(indices)
    if values > 1 and steps.min() <= 0:
        position = int(np.flatnonzero(steps <= 0)[0]) + 1
        what = "repeated" if steps[position - 1] == 0 else "not sorted"
        raise UploadRefused(f"indices: {indices[position]} at position {position} is {what}")
    if indices[0] < 0 or indices[-1] >= size:  # sorted: the ends are the extremes
        wrong = indices[0] if indices[0] < 0 else indices[-1]
        raise UploadRefused(f"indices: {wrong} is out of range, expected 0 to {size - 1}")
