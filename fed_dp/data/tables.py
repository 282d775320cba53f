"""Turning a table into numbers with public knowledge only: stated bounds, stated categories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fed_dp.data.dataset import Floats, Integers
from fed_dp.errors import ConfigError, DataCorrupt

if TYPE_CHECKING:
    import pandas as pd


DATES = (
    "dates are no inputs as they are: make numbers of them (days since a public date, the hour, the weekday) "
    "and state their bounds, or ignore the column"
)


def is_date(cell: Any) -> bool:
    """Return whether a cell is a date, or reads as one."""
    if isinstance(cell, date):
        return True
    try:
        return len(str(cell)) >= 8 and bool(datetime.fromisoformat(str(cell)))
    except ValueError:
        return False


def numbers(column: pd.Series[Any]) -> NDArray[np.float64]:
    """Return every cell as a number, by itself; NaN where it is none."""
    import pandas as pd

    if pd.api.types.is_numeric_dtype(column.dtype) and not pd.api.types.is_complex_dtype(column.dtype):
        return column.to_numpy(np.float64, na_value=np.nan)
    stored = cells(column)
    try:
        return stored.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        return np.array([_number(cell) for cell in stored], np.float64)


def _number(cell: Any) -> float:
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return np.nan


def codes(column: pd.Series[Any], words: Sequence[str]) -> Integers:
    """Return which of the words every cell is, by itself; −1 where it is none.

    A cell that is stored as a number is a word that reads as the same number: 1 and 1.0 are both "1".
    """
    import pandas as pd

    kind = column.dtype
    if pd.api.types.is_numeric_dtype(kind) and not pd.api.types.is_bool_dtype(kind):
        values, found = numbers(column), np.full(len(column), -1)
        for code, word in reversed(list(enumerate(words))):
            found[values == _number(word)] = code
        return found
    known = {word: code for code, word in enumerate(words)}
    missing = column.isna().to_numpy()
    return np.array(
        [
            -1 if gone or cell is None else known.get(str(cell), -1)
            for cell, gone in zip(cells(column), missing, strict=True)
        ],
        np.int64,
    )


def cells(column: pd.Series[Any]) -> NDArray[Any]:
    """Return every cell as Python has it; None where it cannot be had, whatever is stored there.

    A column that is stored in Arrow's types is never converted as a whole: one date beyond Python's, or one
    text that is not UTF-8, would decide whether all others can be read.
    """
    stored = column.array
    if not hasattr(stored, "__arrow_array__"):
        return column.to_numpy(object, na_value=np.nan)
    found = np.empty(len(column), object)
    for place, scalar in enumerate(stored.__arrow_array__()):
        try:
            found[place] = scalar.as_py()
        except Exception:
            found[place] = None
    return found


def check_column(key: str, name: str, table: pd.DataFrame, path: Path) -> None:
    """Refuse a table without the column that a key of the experiment names."""
    if name not in table.columns:
        raise ConfigError(
            f"data.{key} = {name!r}: {path.name} has no such column; found: "
            f"{', '.join(map(str, table.columns))}"
        )


@dataclass(frozen=True, slots=True)
class Columns:
    """How each column becomes inputs.

    A number is clipped to its public bounds and mapped to [−1, 1]; a category becomes one 0/1
    input per stated value. Where `gaps` is set, a missing number becomes 0 with a 0/1 input
    beside it that says so, and a missing category becomes all zeros; otherwise missing is an error.
    Where `lenient` is set, nothing that stands in a record is an error: what is not as stated counts as
    missing, so that whether a table can be read says nothing about its records.
    """

    bounds: Mapping[str, tuple[float, float]]
    categories: Mapping[str, Sequence[str]]
    gaps: bool = False
    lenient: bool = False

    def encode(self, table: pd.DataFrame, *, where: str) -> Floats:
        """Encode the stated columns, in the stated order: numbers first, then categories."""
        if absent := [c for c in (*self.bounds, *self.categories) if c not in table.columns]:
            raise DataCorrupt(
                f"{where} has no column {absent[0]!r}; found: {', '.join(map(str, table.columns))}"
            )
        parts = [self._number(table[name], *self.bounds[name], where=where) for name in self.bounds]
        parts += [self._category(table[name], self.categories[name], where) for name in self.categories]
        return np.concatenate(parts, axis=1)

    def _number(self, column: pd.Series[float], low: float, high: float, *, where: str) -> Floats:
        if not low < high:
            raise DataCorrupt(f"bounds of {column.name!r}: expected low < high, got [{low}, {high}]")
        values = numbers(column)
        missing = ~np.isfinite(values)
        strange = missing & column.notna().to_numpy()
        refused = strange if self.gaps else missing
        if refused.any() and not self.lenient:
            row = int(np.flatnonzero(refused)[0])
            raise DataCorrupt(
                f"{where}: column {column.name!r}, record {row}: {column.iloc[row]!r} is not a finite number"
                + (f"; {DATES}" if is_date(column.iloc[row]) else "")
            )
        scaled = mapped(np.where(missing, low, values), low, high)
        scaled[missing] = 0
        columns = [scaled, missing] if self.gaps else [scaled]
        return np.stack(columns, axis=1).astype(np.float32)

    def _category(self, column: pd.Series[str], values: Sequence[str], where: str) -> Floats:
        found = codes(column, values)
        unknown = (found < 0) & ~(column.isna().to_numpy() if self.gaps else np.zeros(len(column), bool))
        if unknown.any() and not self.lenient:
            row = int(np.flatnonzero(unknown)[0])
            raise DataCorrupt(
                f"{where}: column {column.name!r}, record {row}: {column.iloc[row]!r} is not one of "
                f"{', '.join(values)}"
            )
        chosen = np.zeros((len(column), len(values)), np.float32)
        known = found >= 0
        chosen[np.flatnonzero(known), found[known]] = 1
        return chosen


def mapped(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    """Clip to [low, high] and map to [−1, 1].

    In double precision and with bounds within ±1e30, every number but NaN becomes a finite one.
    """
    result: NDArray[np.float64] = 2 * ((np.clip(values, low, high) - low) / (high - low)) - 1
    return result
