"""Records of behaviour: one person at one time point with its past, and the influence of friends.

As dPA and pCDBN have them: shape (1, window + 1, d), a row of d attributes for each time point, the last of
them now. One more row holds, first, the influence of friends and, where persons are numbered, second the
person's number, from 1 (0: nobody's). A record of zeros stands for none: encoders of behaviour make no
feature of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fed_dp.data.dataset import DataSet, Floats, Integers, Records
from fed_dp.errors import ConfigError

Reals = NDArray[np.float64]
Marks = NDArray[np.bool_]
WINDOW = 4  # time points in a record: three past, and now
UNKNOWN = 0.5  # ψ of a friend of whom nothing is known now, and the influence on who has no friends


def notes(window: int = WINDOW) -> tuple[str, ...]:
    """Return what must be said of such records."""
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    past, several = (words[n] if n < len(words) else str(n) for n in (window - 1, window))
    return (
        f"a record is one person at one time point with {past} time point{'s' * (window != 2)} before: a "
        f"time point is in up to {several} records of its person and in the label of one more, and shows in "
        "those of friends through their influence; ε is of a record, not of a person, nor of a time point",
    )


def influence(psi: Reals) -> Reals:
    """Return (1/|F_u|) Σ_{v ∈ F_u} ψ_t(v, u) at each time: `psi` has a row for each friend.

    Without any friend it is UNKNOWN.
    """
    if not len(psi):
        return np.full(psi.shape[1:], UNKNOWN)
    total: Reals = psi.sum(0) / len(psi)
    return total


def windows(own: Floats, moved: Reals, target: Reals, window: int) -> tuple[Floats, Integers, Marks]:
    """Return inputs and labels of one person's time points, in order, and which of them are whole.

    A time point is whole where it has `window` − 1 before it and one after it, and the target is known
    (finite) now and then. Label: whether the target is higher then. Without their past, rows are zeros.

    Parameters
    ----------
    own
        Attributes, (time points, d), scaled to [−1, 1].
    moved
        The influence of friends at each time point.
    target
        What the label compares.
    window
        Time points in a record, now included.
    """
    count = len(own)
    rows = np.zeros((count, 1, window + 1, own.shape[1]), np.float32)
    for back in range(min(window, count)):
        rows[back:, 0, window - 1 - back] = own[: count - back]
    rows[:, 0, window, 0] = moved
    rows[: window - 1] = 0
    labels, whole = np.zeros(count, np.int64), np.zeros(count, bool)
    labels[:-1] = target[1:] > target[:-1]
    whole[:-1] = np.isfinite(target[1:]) & np.isfinite(target[:-1])
    whole[: window - 1] = False
    return rows, labels, whole


@dataclass(frozen=True, slots=True)
class Lines:
    """A record for every line of a table, in its order; and which are whole.

    `place` is which of its person's time points a line is, from 0, and `count` how many these are.
    """

    x: Floats
    y: Integers
    whole: Marks
    place: Integers
    count: Integers

    def late(self, share: float) -> Marks:
        """Mark the last share of each person's time points, of those that have a next one."""
        marks: Marks = self.place >= (1 - share) * (self.count - 1)
        return marks

    def of(self, chosen: Marks, owner: NDArray[np.str_] | None) -> Records:
        """Return chosen lines that are whole."""
        return Records(self.x, self.y, owner).part(chosen & self.whole)

    def all(self) -> Records:
        """Return a record for each line: of zeros where the line is not whole.

        Its class is 0 and 1 in turn, by its place: so neither class is preferred, and no cell decides how
        many records there are.
        """
        x, y = self.x.copy(), self.y.copy()
        gone = np.flatnonzero(~self.whole)
        x[gone] = 0
        y[gone] = gone % 2
        return Records(x, y)


def lines_of(
    person: Integers, time: Reals, inputs: Floats, target: Reals, moved: Reals, *, window: int
) -> Lines:
    """Return the record of every line of a table of persons over time.

    Each line is one of its person's time points, in the order of time, and of lines where times are the same.
    A line that is nobody's (−1) or at no time (NaN) is in no record.
    """
    count = len(person)
    x = np.zeros((count, 1, window + 1, inputs.shape[1]), np.float32)
    y, place, of = (np.zeros(count, np.int64) for _ in range(3))
    whole = np.zeros(count, bool)
    for rows in by_person(person, time).values():
        x[rows], y[rows], whole[rows] = windows(inputs[rows], moved[rows], target[rows], window)
        place[rows], of[rows] = np.arange(len(rows)), len(rows)
    return Lines(x, y, whole, place, of)


def by_person(person: Integers, time: Reals) -> dict[int, Integers]:
    """Return each person's lines in the order of time."""
    placed = np.flatnonzero((person >= 0) & np.isfinite(time))
    order = placed[np.lexsort((time[placed], person[placed]))]  # stable
    starts = np.flatnonzero(np.diff(person[order], prepend=-1))
    parts = np.split(order, starts)[1:]  # the first is empty
    return {int(person[rows[0]]): rows for rows in parts}


def influence_of_friends(person: Integers, time: Reals, psi: Reals, friends: Mapping[int, Integers]) -> Reals:
    """Return of every line the influence of its person's friends at its time.

    `psi` is by how much each line's person sways friends at its time, in [0, 1]. Who has no line at that
    time sways by UNKNOWN; of several lines, the first counts. `friends` are summed in their order.
    """
    moments, moment = np.unique(time, return_inverse=True)
    lines = by_person(person, time)
    placed = np.sort(np.concatenate([*lines.values(), np.arange(0)]))
    keys = person[placed] * len(moments) + moment[placed]
    order = np.argsort(keys, kind="stable")
    keys, placed = keys[order], placed[order]
    felt = np.full(len(person), UNKNOWN)
    for someone, rows in lines.items():
        there = friends.get(someone, np.arange(0))
        wanted = there[:, None] * len(moments) + moment[rows]
        found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        felt[rows] = influence(np.where(keys[found] == wanted, psi[placed[found]], UNKNOWN))
    return felt


def with_numbers(x: Floats, numbers: Integers) -> Floats:
    """Return the records with each one's person in it: its number from 1, or 0 where nobody's."""
    if x.shape[-1] < 2:
        raise ConfigError(
            "data.persons: a record with a person's number needs two attributes or more, found 1"
        )
    numbered = x.copy()
    numbered[:, 0, -1, 1] = numbers
    return numbered


def numbered(data: DataSet, persons: int | None) -> DataSet:
    """Return the data set with its owners numbered in sorted order; as it is where `persons` is None."""
    if persons is None:
        return data
    assert data.train.owner is not None
    assert data.test.owner is not None
    known = np.unique(np.concatenate([data.train.owner, data.test.owner]))
    if len(known) > persons:
        raise ConfigError(
            f"data.persons = {persons}: {data.name} has {len(known)}; expected {len(known)} or more"
        )

    def of(records: Records) -> Records:
        assert records.owner is not None
        numbers = np.searchsorted(known, records.owner) + 1
        return Records(with_numbers(np.asarray(records.x, np.float32), numbers), records.y, records.owner)

    return replace(data, train=of(data.train), test=of(data.test))
