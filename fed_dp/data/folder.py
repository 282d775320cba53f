"""A user's own data: idx, npz, CSV or Parquet in a folder, with bounds stated by the user.

Layout: `train.npz|csv|parquet` (and `test.*`, else a fixed share is held out), or idx files
`train-images*`, `train-labels*` (and `test-…`, or MNIST's `t10k-…`). Nothing is learned from the
records: bounds, classes and categories are public statements in the experiment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fed_dp import seeds
from fed_dp.data.behaviour import Lines
from fed_dp.data.dataset import DataSet, Floats, Integers, Records, identity
from fed_dp.data.formats import read_csv, read_idx, read_npz, read_table
from fed_dp.data.persons import PersonColumns, check_columns, check_whole, lines
from fed_dp.data.tables import DATES, Columns, check_column, codes, mapped, numbers
from fed_dp.errors import ConfigError, DataCorrupt, DataMissing
from fed_dp.tasks import MAX_TARGET, Targets

TABLES = (".csv", ".parquet")
BLOCK = 4096  # records that are scaled at once


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """What the user states about their own data."""

    path: Path
    bounds: Mapping[str, tuple[float, float]] | tuple[float, float]
    outputs: int | tuple[str, ...]  # the classes; or the columns of other targets, or how many there are
    label: str | None = None
    client: str | None = None
    categories: Mapping[str, tuple[str, ...]] | None = None
    gaps: bool = False
    test_fraction: float = 0.2
    lenient: bool = False  # nothing that stands in a record is an error; see Columns
    targets: Targets = "class"
    ignore: tuple[str, ...] = ()
    persons: PersonColumns | None = None  # of a table of persons over time
    every_line: bool = False  # then whatever stands in its lines, there are as many records

    @property
    def count(self) -> int:
        """How many classes, labels or numbers there are."""
        return self.outputs if isinstance(self.outputs, int) else len(self.outputs)

    @property
    def target_columns(self) -> tuple[str, ...]:
        """The columns of a table that are targets."""
        if self.persons is not None:
            return ()
        if self.targets == "class":
            return () if self.label is None else (self.label,)
        return self.outputs if isinstance(self.outputs, tuple) else ()

    @property
    def no_inputs(self) -> tuple[str, ...]:
        """The columns of a table that are no inputs."""
        of_persons = () if self.persons is None else (self.persons.person, self.persons.time)
        return (
            *self.target_columns,
            *of_persons,
            *self.ignore,
            *(() if self.client is None else (self.client,)),
        )

    def bounds_of(self, name: str) -> tuple[float, float]:
        """Return the bounds of a column of numbers."""
        return self.bounds[name] if isinstance(self.bounds, Mapping) else self.bounds

    def dataset(self, train: Records, test: Records, *, notes: tuple[str, ...] = ()) -> DataSet:
        """Return the data set of these records."""
        notes = (*notes, *(() if self.persons is None else self.persons.notes))
        return DataSet("folder", train, test, self.count, *identity(), notes=notes, targets=self.targets)


def read_folder(options: FolderOptions) -> DataSet:
    """Read the folder's training and test records."""
    if options.persons is not None and not has_part("test", options):
        return _divided_by_time(options)
    train = read_part("train", options)
    test = _split("test", options) or _split("t10k", options)
    notes: tuple[str, ...] = ()
    if test is None:
        train, test = _hold_out(train, options.test_fraction)
        share = f"{options.test_fraction:.0%}"
        notes = (f"no test file: {share} of the records held out at random; test records are not protected",)
    return options.dataset(train, test, notes=notes)


def read_inputs(options: FolderOptions, path: Path) -> Floats:
    """Read records without labels, as the experiment's own are read: to predict."""
    if path.suffix in TABLES:
        if not isinstance(options.bounds, Mapping):
            raise ConfigError(
                f"data.bounds is one pair for all columns, and does not tell their order: give {path.name} "
                "as an npz file with X, or state bounds column by column"
            )
        table = _read(path, options)
        if options.persons is not None:
            return _lines(table, options, path).x
        return _inputs(table.drop(columns=list(options.target_columns), errors="ignore"), options, path)
    [x] = read_npz(path, ("X",))
    return _scaled(x, options, path)


def read_part(name: str, options: FolderOptions) -> Records:
    """Read one part of the folder: train, test, or the records that are public."""
    if not options.path.is_dir():
        raise DataMissing(f"data.path = {str(options.path)!r}: no such folder")
    found = _split(name, options)
    if found is None:
        there = ", ".join(sorted(p.name for p in options.path.iterdir())[:8]) or "nothing"
        tables = " or ".join(f"{name}{suffix}" for suffix in TABLES)
        every = f"{name}.npz, {name}.csv, {name}.parquet or {name}-images*/{name}-labels* (idx)"
        expected = every if options.persons is None else tables
        raise DataMissing(f"data.path = {str(options.path)!r}: expected {expected}, found {there}")
    return found


def has_part(name: str, options: FolderOptions) -> bool:
    """Return whether the folder has such a part."""
    endings = (".npz", *TABLES, "-images*") if options.persons is None else TABLES
    return any(True for ending in endings for _ in options.path.glob(f"{name}{ending}"))


def _split(prefix: str, options: FolderOptions) -> Records | None:
    folder = options.path
    if options.persons is not None:
        found = _table_of(prefix, options)
        return None if found is None else _of_persons(*found, options)
    images, labels = (sorted(folder.glob(f"{prefix}-{kind}*")) for kind in ("images", "labels"))
    if images and labels:
        return _arrays(read_idx(images[0]), read_idx(labels[0]), options, images[0])
    if (path := folder / f"{prefix}.npz").is_file():
        x, y = read_npz(path, ("X", "y"))
        records = _arrays(x, y, options, path)
        return replace(records, owner=_owner(path, len(records), options))
    found = _table_of(prefix, options)
    return None if found is None else _table(*found, options)


def _table_of(prefix: str, options: FolderOptions) -> tuple[pd.DataFrame, Path] | None:
    for suffix in TABLES:
        if (path := options.path / f"{prefix}{suffix}").is_file():
            return _read(path, options), path
    return None


def _lines(table: pd.DataFrame, options: FolderOptions, path: Path) -> Lines:
    """Return the record of each line of a table of persons over time."""
    stated = options.persons
    assert stated is not None
    check_columns(table, stated, path)
    return lines(
        table,
        _inputs(table, options, path),
        stated,
        bounds=options.bounds_of,
        read=lambda other: _read(other, options),
        path=path,
        lenient=options.lenient,
    )


def _of_persons(table: pd.DataFrame, path: Path, options: FolderOptions) -> Records:
    """Return the whole records of a table of persons over time, or a record for each line."""
    assert options.persons is not None
    found = _lines(table, options, path)
    if not options.lenient:
        check_whole(found, options.persons, path)
    if (options.every_line and path.stem == "train") or not found.whole.any():
        return found.all()
    return found.of(found.whole, _owner_column(table, options, path))


def _divided_by_time(options: FolderOptions) -> DataSet:
    """Read a table of persons over time; the last share of each one's time is the test set."""
    stated, found = options.persons, _table_of("train", options)
    assert stated is not None
    if found is None:
        read_part("train", options)  # which says what is missing
    assert found is not None
    table, path = found
    records, owner = _lines(table, options, path), _owner_column(table, options, path)
    check_whole(records, stated, path)
    late = records.late(options.test_fraction)
    if not (late & records.whole).any() or not (~late & records.whole).any():
        raise ConfigError(
            f"data.test_fraction = {options.test_fraction:g}: {path.name} has whole records on one side "
            "of it only; expected some to train on, and some to test on"
        )
    share = f"{options.test_fraction:.0%}"
    note = f"no test file: the last {share} of everybody's time held out; test records are unprotected"
    return options.dataset(records.of(~late, owner), records.of(late, owner), notes=(note,))


def _read(path: Path, options: FolderOptions) -> pd.DataFrame:
    return read_csv(path, lenient=options.lenient) if path.suffix == ".csv" else read_table(path)


def _owner(path: Path, count: int, options: FolderOptions) -> NDArray[np.str_] | None:
    """Return whose each record is: the array that data.client names, or `owner`. A site's are all its own."""
    with np.load(path, allow_pickle=False) as archive:  # which has just been read
        there = archive.files
    name = options.client or "owner"
    if options.lenient or (options.client is None and name not in there):
        return None
    [owner] = read_npz(path, (name,))
    if owner.shape != (count,):
        raise DataCorrupt(
            f"{path}: {name} has shape {owner.shape}, expected ({count},): whose each record is"
        )
    return owner.astype(np.str_)


def _arrays(x: NDArray[Any], y: NDArray[Any], options: FolderOptions, path: Path) -> Records:
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    shape = (len(y),) if options.targets == "class" or options.count == 1 else (len(y), options.count)
    if y.shape != shape or x.ndim < 2:
        expected = "(N,)" if len(shape) == 1 else f"(N, {options.count})"
        raise DataCorrupt(
            f"{path}: expected X of shape (N, …) and y of shape {expected}, found {x.shape}, {y.shape}"
        )
    if len(x) != len(y):
        raise DataCorrupt(f"{path}: {len(x)} inputs but {len(y)} labels")
    if options.targets == "class":
        return Records(_scaled(x, options, path), _labels(pd.Series(y), options, path))
    columns = [pd.Series(column, name=f"y[{k}]") for k, column in enumerate(y.reshape(len(y), -1).T)]
    return Records(_scaled(x, options, path), _rows(columns, options, path))


def _scaled(x: NDArray[Any], options: FolderOptions, path: Path) -> Floats:
    if isinstance(options.bounds, Mapping):
        raise ConfigError(f"data.bounds: {path.name} is an array; expected one pair, as in [0, 255]")
    low, high = options.bounds
    if not low < high:
        raise ConfigError(f"data.bounds = [{low:g}, {high:g}]: expected low < high")
    if x.dtype.kind == "U" and options.lenient:
        x = numbers(pd.Series(x.ravel(), dtype=object)).reshape(x.shape)
    if x.dtype.kind not in "biuf" or not (options.lenient or np.isfinite(x).all()):
        raise DataCorrupt(
            f"{path}: inputs must be finite numbers, found {x.dtype} with NaN, infinity or text"
        )
    if x.ndim == 3:  # grey images: one channel
        x = x[:, None]
    elif x.ndim == 4 and x.shape[-1] in (1, 3):  # channels last, as images are usually stored
        x = x.transpose(0, 3, 1, 2)
    scaled = np.empty(x.shape, np.float32)
    for start in range(0, len(x), BLOCK):
        values = x[start : start + BLOCK].astype(np.float64)
        scaled[start : start + BLOCK] = mapped(np.where(np.isnan(values), low, values), low, high)
    return scaled


def _table(table: pd.DataFrame, path: Path, options: FolderOptions) -> Records:
    key = "label" if options.targets == "class" else "outputs"
    if not options.target_columns:
        raise ConfigError(f"data.{key} is missing: which column of {path.name} is the label?")
    for name in options.target_columns:
        check_column(key, name, table, path)
    owner = _owner_column(table, options, path)
    x = _inputs(table, options, path)
    if options.targets == "class":
        return Records(x, _labels(table[options.target_columns[0]], options, path), owner)
    return Records(x, _rows([table[name] for name in options.target_columns], options, path), owner)


def _inputs(table: pd.DataFrame, options: FolderOptions, path: Path) -> Floats:
    categories = dict(options.categories or {})
    stated = list(options.bounds) if isinstance(options.bounds, Mapping) else []
    for name in (*stated, *categories):
        if name in options.no_inputs:
            raise ConfigError(f"data.bounds or data.categories names {name!r}, which is not an input")
        if name in stated and name in categories:
            raise ConfigError(f"column {name!r} stands in data.bounds and in data.categories: state it once")
    inputs = [name for name in map(str, table.columns) if name not in options.no_inputs]
    if isinstance(options.bounds, Mapping):
        bounds = dict(options.bounds)
    else:
        bounds = {name: options.bounds for name in inputs if name not in categories}
    if unstated := [name for name in inputs if name not in bounds and name not in categories]:
        advice = f"; {DATES}" if pd.api.types.is_datetime64_any_dtype(table[unstated[0]].dtype) else ""
        raise ConfigError(
            f"data.bounds has no entry for column {unstated[0]!r} of {path.name}: state its bounds "
            f"(or its categories), which are never taken from the data, or name it in data.ignore{advice}"
        )
    if not inputs:
        raise ConfigError(
            f"{path.name} has no column but {', '.join(map(repr, options.no_inputs))}: there is nothing to "
            "learn from"
        )
    return Columns(bounds, categories, options.gaps, options.lenient).encode(table, where=str(path))


def _owner_column(table: pd.DataFrame, options: FolderOptions, path: Path) -> NDArray[np.str_] | None:
    """Return whose each record is, by the column that data.client names. A site's are all its own."""
    if options.client is None:
        return None
    check_column("client", options.client, table, path)
    column = table[options.client]
    if options.lenient:
        return None
    if column.isna().any():
        row = int(np.flatnonzero(column.isna())[0])
        raise DataCorrupt(f"{path}: column {column.name!r}, record {row}: the client is missing")
    return np.array([str(value) for value in column], dtype=np.str_)


def _labels(column: pd.Series[Any], options: FolderOptions, path: Path) -> Integers:
    if isinstance(options.outputs, tuple):
        found = codes(column, options.outputs)
        wrong = found < 0
        allowed = ", ".join(options.outputs)
    else:
        values = numbers(column)
        wrong = (
            ~np.isfinite(values) | (values != np.floor(values)) | (values < 0) | (values >= options.outputs)
        )
        found = np.where(wrong, 0, values).astype(np.int64)
        allowed = f"0..{options.outputs - 1}"
    if options.lenient:
        found = np.where(wrong, 0, found)
    elif wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise DataCorrupt(
            f"{path}: label of record {row} is {column.iloc[row]!r}, data.classes allows {allowed}"
        )
    return found


def _rows(columns: Sequence[pd.Series[Any]], options: FolderOptions, path: Path) -> Floats:
    """Return targets that are labels (0 or 1) or numbers, a column for each."""
    rows = np.stack([numbers(column) for column in columns], axis=1)
    if options.targets == "labels":
        wrong, allowed = ~np.isin(rows, (0, 1)), "0 or 1"
    else:
        wrong, allowed = ~(np.abs(rows) <= MAX_TARGET), f"a number within ±{MAX_TARGET:g}"
    if wrong.any() and not options.lenient:
        row, column = (int(place) for place in np.argwhere(wrong)[0])
        name, found = columns[column].name, columns[column].iloc[row]
        raise DataCorrupt(f"{path}: target {name!r} of record {row} is {found!r}, expected {allowed}")
    return np.where(wrong, 0, rows).astype(np.float32)


def _hold_out(records: Records, fraction: float) -> tuple[Records, Records]:
    count = min(max(1, round(len(records) * fraction)), len(records) - 1)
    order = seeds.generator(0, "hold-out").permutation(len(records))
    return records.part(np.sort(order[count:])), records.part(np.sort(order[:count]))
