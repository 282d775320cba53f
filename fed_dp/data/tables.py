"""Turning a table into numbers with public knowledge only: stated bounds, stated categories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fed_dp.data.dataset import Floats
from fed_dp.errors import DataCorrupt


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
        values = pd.to_numeric(column, errors="coerce").to_numpy(np.float64, na_value=np.nan)
        missing = ~np.isfinite(values)
        strange = missing & column.notna().to_numpy()
        refused = strange if self.gaps else missing
        if refused.any() and not self.lenient:
            row = int(np.flatnonzero(refused)[0])
            raise DataCorrupt(
                f"{where}: column {column.name!r}, record {row}: {column.iloc[row]!r} is not a finite number"
            )
        scaled = 2 * (np.clip(values, low, high) - low) / (high - low) - 1
        scaled[missing] = 0
        columns = [scaled, missing] if self.gaps else [scaled]
        return np.stack(columns, axis=1).astype(np.float32)

    def _category(self, column: pd.Series[str], values: Sequence[str], where: str) -> Floats:
        codes = pd.Index(list(values)).get_indexer(pd.Index(column.astype("string")))
        unknown = (codes < 0) & ~(column.isna().to_numpy() if self.gaps else np.zeros(len(column), bool))
        if unknown.any() and not self.lenient:
            row = int(np.flatnonzero(unknown)[0])
            raise DataCorrupt(
                f"{where}: column {column.name!r}, record {row}: {column.iloc[row]!r} is not one of "
                f"{', '.join(values)}"
            )
        chosen = np.zeros((len(column), len(values)), np.float32)
        known = codes >= 0
        chosen[np.flatnonzero(known), codes[known]] = 1
        return chosen


def every_nth(count: int, n: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Mark every n-th row: a fixed test split that depends on no record's value."""
    marks: np.ndarray[tuple[int], np.dtype[np.bool_]] = np.arange(count) % n == n - 1
    return marks
