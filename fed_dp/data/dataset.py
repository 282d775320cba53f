"""Records and data sets: what a reader returns and a client slices."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fed_dp.errors import DataCorrupt
from fed_dp.tasks import MAX_TARGET, Targets

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Records:
    """Inputs, targets and, where records have a natural owner, the owner of each.

    Targets are a class each (integers), or a row each of zeros and ones, or of numbers (float32).
    """

    x: NDArray[np.uint8] | Floats
    y: NDArray[Any]
    owner: NDArray[np.str_] | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.x), len(self.y), len(self.y if self.owner is None else self.owner)}
        if len(lengths) > 1:
            raise DataCorrupt(f"inputs, labels and owners differ in length: {sorted(lengths)}")

    def __len__(self) -> int:
        return len(self.y)

    def part(self, rows: Integers | NDArray[np.bool_]) -> Records:
        """Return some of the records."""
        return Records(self.x[rows], self.y[rows], None if self.owner is None else self.owner[rows])


@dataclass(frozen=True, slots=True)
class DataSet:
    """Training and test records with the public constants that turn stored bytes into inputs.

    `inputs` = stored · scale + shift. The constants are public (published or fixed by a bound);
    they are not computed from the records at hand, so applying them costs no privacy.
    """

    name: str
    train: Records
    test: Records
    classes: int
    scale: Floats
    shift: Floats
    notes: tuple[str, ...] = ()
    targets: Targets = "class"  # where not, `classes` is how many labels or numbers each record has

    def __post_init__(self) -> None:
        for split, records in (("train", self.train), ("test", self.test)):
            if len(records) == 0:
                raise DataCorrupt(f"{self.name}: no {split} records")
            self._check_targets(split, records.y)
            if records.x.dtype != np.uint8 and not np.isfinite(records.x).all():
                raise DataCorrupt(f"{self.name}: {split} inputs hold NaN or infinity")
        if self.train.x.shape[1:] != self.test.x.shape[1:]:
            raise DataCorrupt(
                f"{self.name}: train inputs have shape {self.train.x.shape[1:]}, "
                f"test inputs {self.test.x.shape[1:]}"
            )

    def _check_targets(self, split: str, y: NDArray[Any]) -> None:
        if self.targets == "class":
            low, high = int(y.min()), int(y.max())
            if low < 0 or high >= self.classes:
                raise DataCorrupt(
                    f"{self.name}: {split} labels lie in {low}..{high}, expected 0..{self.classes - 1}"
                )
        elif y.shape[1:] != (self.classes,):
            raise DataCorrupt(
                f"{self.name}: {split} targets have shape {y.shape}, expected (n, {self.classes})"
            )
        elif self.targets == "labels" and not np.isin(y, (0, 1)).all():
            raise DataCorrupt(f"{self.name}: {split} labels hold other values than 0 and 1")
        elif not (np.abs(y) <= MAX_TARGET).all():
            raise DataCorrupt(
                f"{self.name}: {split} targets hold NaN, infinity or values beyond ±{MAX_TARGET:g}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(int(n) for n in self.train.x.shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        arrays = (array for part in (self.train, self.test) for array in (part.x, part.y, part.owner))
        return sum(array.nbytes for array in arrays if array is not None)

    def fingerprint(self) -> str:
        """SHA-256 of all records: what a resumed run must find again."""
        digest = hashlib.sha256()
        for records in (self.train, self.test):
            for array in (records.x, records.y, records.owner):
                if array is not None:
                    digest.update(f"{array.dtype}{array.shape}".encode())
                    digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def inputs(self, records: Records, indices: Integers | slice = slice(None)) -> Floats:
        """Return the chosen records' inputs as float32, ready for a network."""
        values: Floats = np.multiply(records.x[indices], self.scale, dtype=np.float32)
        values += self.shift
        return values


def divided(
    name: str,
    records: Records,
    test: NDArray[np.bool_],
    *,
    classes: int,
    notes: tuple[str, ...] = (),
) -> DataSet:
    """Return a data set of inputs that are stored as they are used; `test` marks its test records."""
    return DataSet(name, records.part(~test), records.part(test), classes, *identity(), notes=notes)


def standardised(mean: tuple[float, ...], deviation: tuple[float, ...]) -> tuple[Floats, Floats]:
    """Return (scale, shift) that map bytes 0..255 to (x/255 − mean)/deviation, per channel."""
    means = np.asarray(mean, np.float32).reshape(-1, 1, 1)
    deviations = np.asarray(deviation, np.float32).reshape(-1, 1, 1)
    return (1 / (255 * deviations)).astype(np.float32), (-means / deviations).astype(np.float32)


def identity() -> tuple[Floats, Floats]:
    """Return (scale, shift) for inputs that are stored as they are used."""
    return np.ones(1, np.float32), np.zeros(1, np.float32)


def every_nth(count: int, n: int) -> NDArray[np.bool_]:
    """Mark every n-th row: a fixed test split that depends on no record's value."""
    marks: NDArray[np.bool_] = np.arange(count) % n == n - 1
    return marks
