"""A user's own table of persons over time: whose each line is, when it was, and who sways its person.

Every line is read by itself: one whose person or time cannot be read is in no record. Who is a friend stands
in a file of its own, whether or not they have lines here. So a line changes the records that it is in and
those of its person's friends at its time, and no others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fed_dp.data import behaviour
from fed_dp.data.behaviour import Lines, Reals
from fed_dp.data.dataset import Floats, Integers
from fed_dp.data.tables import cells, check_column, codes, mapped, numbers
from fed_dp.errors import DataCorrupt, DataMissing

if TYPE_CHECKING:
    import pandas as pd

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Bounds = tuple[float, float]


@dataclass(frozen=True, slots=True)
class PersonColumns:
    """What a user states about a table of persons over time.

    Parameters
    ----------
    person, time
        The columns that say whose a line is, and when: a number, or a date or time in ISO 8601.
    rises
        The column that the label compares: whether it is higher at the person's next line.
    window
        Time points in a record, now included.
    friends
        A file of two columns in the same folder; each line makes two persons friends.
    influence
        The column by which a friend sways others, `rises` by default.
    persons
        How many there are, numbered from 0 in `person`, or their names: public, and the same at every site.
    """

    person: str
    time: str
    rises: str
    window: int = behaviour.WINDOW
    friends: str | None = None
    influence: str | None = None
    persons: int | tuple[str, ...] | None = None

    @property
    def columns(self) -> dict[str, str]:
        """The columns by the key that names them."""
        named = {"person": self.person, "time": self.time, "rises": self.rises, "influence": self.influence}
        return {key: name for key, name in named.items() if name is not None}

    @property
    def notes(self) -> tuple[str, ...]:
        """What must be said of the records."""
        label = f"label: {self.rises} is higher at the person's next time point"
        if self.friends is None:
            friends = "no friends are stated: their influence is 0 throughout"
        else:
            friends = (
                f"a friend's influence is where {self.influence or self.rises} lies between its bounds at "
                "the same time; who is friends with whom shows in all records of both, and no ε protects it"
            )
        return (label, friends, *behaviour.notes(self.window))


def lines(
    table: pd.DataFrame,
    x: Floats,
    stated: PersonColumns,
    *,
    bounds: Callable[[str], Bounds],
    read: Callable[[Path], pd.DataFrame],
    path: Path,
    lenient: bool,
) -> Lines:
    """Return the record of each line of a table.

    Parameters
    ----------
    table, x
        The table, and its inputs, scaled to [−1, 1].
    bounds
        The public bounds of a column of numbers.
    read
        Reads another table of the same folder.
    path
        The table's file.
    lenient
        Whether nothing that stands in a line is an error.
    """
    names, time = _names(table[stated.person]), _times(table[stated.time])
    known = {name: code for code, name in enumerate(dict.fromkeys(names)) if name is not None}
    person = np.array([-1 if name is None else known[name] for name in names], np.int64)
    if not lenient:
        _refuse_odd(table, person, time, stated, path)
    target = numbers(table[stated.rises])
    target = np.where(np.isfinite(target), target, np.nan)
    moved = np.zeros(len(table))
    if stated.friends is not None:
        friends = _friends(path.parent / stated.friends, known, read, lenient=lenient)
        psi = _psi(table[stated.influence or stated.rises], bounds)
        moved = behaviour.influence_of_friends(person, time, psi, friends)
    found = behaviour.lines_of(person, time, x, target, moved, window=stated.window)
    if stated.persons is None:
        return found
    numbered = _numbers_of(table[stated.person], stated.persons, path, lenient=lenient)
    return replace(found, x=behaviour.with_numbers(found.x, numbered + 1))


def _names(column: pd.Series[Any]) -> list[str | None]:
    """Return each cell as a name, by itself: 1 and 1.0 are both "1"; None where there is none."""

    def name(cell: Any) -> str | None:
        if cell is None or (isinstance(cell, float) and cell != cell):
            return None
        return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)

    return [name(cell) for cell in cells(column)]


def _times(column: pd.Series[Any]) -> Reals:
    """Return each cell as a time, by itself; NaN where it is none."""
    return np.array([_moment(cell) for cell in cells(column)], np.float64)


def _moment(cell: Any) -> float:
    """Return a number as it is, and a date or time as seconds since 1970; where no zone is given, in UTC."""
    try:
        value = float(cell)
    except Exception:
        try:
            when = cell if isinstance(cell, date) else datetime.fromisoformat(str(cell))
            if not isinstance(when, datetime):
                when = datetime(when.year, when.month, when.day)
            when = when.replace(tzinfo=UTC) if when.tzinfo is None else when
            value = (when - EPOCH).total_seconds()
        except Exception:  # whatever it is, it is no time
            return nan
    return value if isfinite(value) else nan


def _psi(column: pd.Series[Any], bounds: Callable[[str], Bounds]) -> Reals:
    """Return ψ of each line: where between its column's bounds a value is; UNKNOWN where there is none."""
    values, (low, high) = numbers(column), bounds(str(column.name))
    there = np.isfinite(values)
    psi: Reals = np.where(there, (mapped(np.where(there, values, low), low, high) + 1) / 2, behaviour.UNKNOWN)
    return psi


def _friends(
    path: Path, known: dict[str, int], read: Callable[[Path], pd.DataFrame], *, lenient: bool
) -> dict[int, Integers]:
    """Return everybody's friends, in the file's order. `known` are those with lines; others count, too.

    Friendship is mutual. A line that names one person twice, or none, makes no friends.
    """
    if not path.is_file():
        raise DataMissing(f"data.friends = {path.name!r}: no such file in {path.parent}")
    table = read(path)
    if len(table.columns) != 2:
        raise DataCorrupt(
            f"{path}: expected two columns, a person and a friend; found: "
            f"{', '.join(map(str, table.columns))}"
        )
    first, second = (_names(table[name]) for name in table.columns)
    everybody = dict(known)
    of: dict[int, dict[int, None]] = {}
    for row, (one, other) in enumerate(zip(first, second, strict=True)):
        if one is None or other is None or one == other:
            if not lenient:
                raise DataCorrupt(
                    f"{path}: record {row}: {one!r} and {other!r}, expected two different persons"
                )
            continue
        pair = [everybody.setdefault(name, len(everybody)) for name in (one, other)]
        for someone, friend in (pair, pair[::-1]):
            of.setdefault(someone, {})[friend] = None
    return {someone: np.array(list(friends), np.int64) for someone, friends in of.items()}


def _numbers_of(
    column: pd.Series[Any], persons: int | tuple[str, ...], path: Path, *, lenient: bool
) -> Integers:
    """Return each cell's person as a number from 0, by itself; −1 where it is none of those stated."""
    if isinstance(persons, tuple):
        found, allowed = codes(column, persons), "one of data.persons"
    else:
        values, allowed = numbers(column), f"a whole number from 0, below data.persons = {persons}"
        good = np.isin(values, np.arange(persons))
        found = np.where(good, values, -1).astype(np.int64)
    if (found < 0).any() and not lenient:
        row = int(np.flatnonzero(found < 0)[0])
        raise DataCorrupt(
            f"{path}: column {column.name!r}, record {row}: {column.iloc[row]!r} is not {allowed}"
        )
    return found


def _refuse_odd(
    table: pd.DataFrame, person: Integers, time: Reals, stated: PersonColumns, path: Path
) -> None:
    """Refuse lines that are nobody's, at no time, or of a person at a time that has another."""

    def refuse(rows: NDArray[Any], name: str, says: str) -> None:
        if len(rows):
            cell = table[name].iloc[int(rows[0])]
            raise DataCorrupt(f"{path}: column {name!r}, record {int(rows[0])}: {says.format(repr(cell))}")

    refuse(np.flatnonzero(person < 0), stated.person, "the person is missing")
    refuse(
        np.flatnonzero(np.isnan(time)),
        stated.time,
        "{} is no time; expected a number, or a date or time such as 2024-01-31 (ISO 8601)",
    )
    _, first = np.unique(np.stack([person.astype(np.float64), time]), axis=1, return_index=True)
    refuse(
        np.setdiff1d(np.arange(len(person)), first),
        stated.time,
        "its person has a record at {} already; expected one for each time",
    )


def check_columns(table: pd.DataFrame, stated: PersonColumns, path: Path) -> None:
    """Refuse a table without a column that is named."""
    for key, name in stated.columns.items():
        check_column(key, name, table, path)


def check_whole(found: Lines, stated: PersonColumns, path: Path) -> None:
    """Refuse a table in which nobody has a whole record."""
    if not found.whole.any():
        raise DataCorrupt(
            f"{path}: nobody has {stated.window + 1} records with {stated.rises!r}, as data.window = "
            f"{stated.window} needs; there is nothing to learn from"
        )
