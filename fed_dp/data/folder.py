"""A user's own data: idx, npz, CSV or Parquet in a folder, with bounds stated by the user.

Layout: `train.npz|csv|parquet` (and `test.*`, else a fixed share is held out), or idx files
`train-images*`, `train-labels*` (and `test-…`, or MNIST's `t10k-…`). Nothing is learned from the
records: bounds, classes and categories are public statements in the experiment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fed_dp import seeds
from fed_dp.data.dataset import DataSet, Floats, Integers, Records, identity
from fed_dp.data.formats import read_csv, read_idx, read_npz, read_table
from fed_dp.data.tables import Columns, codes, mapped, numbers
from fed_dp.errors import ConfigError, DataCorrupt, DataMissing

TABLES = (".csv", ".parquet")
BLOCK = 4096  # records that are scaled at once


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """What the user states about their own data."""

    path: Path
    bounds: Mapping[str, tuple[float, float]] | tuple[float, float]
    classes: int | tuple[str, ...]
    label: str | None = None
    client: str | None = None
    categories: Mapping[str, tuple[str, ...]] | None = None
    gaps: bool = False
    test_fraction: float = 0.2
    lenient: bool = False  # nothing that stands in a record is an error; see Columns

    @property
    def count(self) -> int:
        """How many classes there are."""
        return self.classes if isinstance(self.classes, int) else len(self.classes)


def read_folder(options: FolderOptions) -> DataSet:
    """Read the folder's training and test records."""
    train = read_part("train", options)
    test = _split("test", options) or _split("t10k", options)
    notes: tuple[str, ...] = ()
    if test is None:
        train, test = _hold_out(train, options.test_fraction)
        share = f"{options.test_fraction:.0%}"
        notes = (f"no test file: {share} of the records held out at random; test records are not protected",)
    return DataSet("folder", train, test, options.count, *identity(), notes=notes)


def read_inputs(options: FolderOptions, path: Path) -> Floats:
    """Read records without labels, as the experiment's own are read: to predict."""
    if path.suffix in TABLES:
        if not isinstance(options.bounds, Mapping):
            raise ConfigError(
                f"data.bounds is one pair for all columns, and does not tell their order: give {path.name} "
                "as an npz file with X, or state bounds column by column"
            )
        table = _read(path, options)
        return _inputs(table.drop(columns=[options.label], errors="ignore"), options, path)
    [x] = read_npz(path, ("X",))
    return _scaled(x, options, path)


def read_part(name: str, options: FolderOptions) -> Records:
    """Read one part of the folder: train, test, or the records that are public."""
    if not options.path.is_dir():
        raise DataMissing(f"data.path = {str(options.path)!r}: no such folder")
    found = _split(name, options)
    if found is None:
        there = ", ".join(sorted(p.name for p in options.path.iterdir())[:8]) or "nothing"
        raise DataMissing(
            f"data.path = {str(options.path)!r}: expected {name}.npz, {name}.csv, {name}.parquet or "
            f"{name}-images*/{name}-labels* (idx), found {there}"
        )
    return found


def has_part(name: str, options: FolderOptions) -> bool:
    """Return whether the folder has such a part."""
    endings = (".npz", *TABLES, "-images*")
    return any(True for ending in endings for _ in options.path.glob(f"{name}{ending}"))


def _split(prefix: str, options: FolderOptions) -> Records | None:
    folder = options.path
    images, labels = (sorted(folder.glob(f"{prefix}-{kind}*")) for kind in ("images", "labels"))
    if images and labels:
        return _arrays(read_idx(images[0]), read_idx(labels[0]), options, images[0])
    if (path := folder / f"{prefix}.npz").is_file():
        x, y = read_npz(path, ("X", "y"))
        return _arrays(x, y, options, path)
    for suffix in TABLES:
        if (path := folder / f"{prefix}{suffix}").is_file():
            return _table(_read(path, options), options, path)
    return None


def _read(path: Path, options: FolderOptions) -> pd.DataFrame:
    return read_csv(path, lenient=options.lenient) if path.suffix == ".csv" else read_table(path)


def _arrays(x: NDArray[Any], y: NDArray[Any], options: FolderOptions, path: Path) -> Records:
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or x.ndim < 2:
        raise DataCorrupt(
            f"{path}: expected X of shape (N, …) and y of shape (N,), found {x.shape}, {y.shape}"
        )
    if len(x) != len(y):
        raise DataCorrupt(f"{path}: {len(x)} inputs but {len(y)} labels")
    return Records(_scaled(x, options, path), _labels(pd.Series(y), options, path))


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


def _table(table: pd.DataFrame, options: FolderOptions, path: Path) -> Records:
    for key, name in (("label", options.label), ("client", options.client)):
        if name is None and key == "label":
            raise ConfigError(f"data.label is missing: which column of {path.name} is the label?")
        if name is not None and name not in table.columns:
            raise ConfigError(
                f"data.{key} = {name!r}: {path.name} has no such column; found: "
                f"{', '.join(map(str, table.columns))}"
            )
    owner = None
    if options.client is not None and not options.lenient:
        owner = _owners(table[options.client], path)
    x = _inputs(table, options, path)
    return Records(x, _labels(table[options.label], options, path), owner)


def _inputs(table: pd.DataFrame, options: FolderOptions, path: Path) -> Floats:
    categories = dict(options.categories or {})
    stated = list(options.bounds) if isinstance(options.bounds, Mapping) else []
    for name in (*stated, *categories):
        if name in (options.label, options.client):
            raise ConfigError(f"data.bounds or data.categories names {name!r}, which is not an input")
        if name in stated and name in categories:
            raise ConfigError(f"column {name!r} stands in data.bounds and in data.categories: state it once")
    inputs = [c for c in map(str, table.columns) if c not in (options.label, options.client)]
    if isinstance(options.bounds, Mapping):
        bounds = dict(options.bounds)
    else:
        bounds = {name: options.bounds for name in inputs if name not in categories}
    if unstated := [name for name in inputs if name not in bounds and name not in categories]:
        raise ConfigError(
            f"data.bounds has no entry for column {unstated[0]!r} of {path.name}: state its bounds "
            "(or its categories); they are never taken from the data"
        )
    if not inputs:
        raise ConfigError(f"{path.name} has no column but {options.label!r}: there is nothing to learn from")
    return Columns(bounds, categories, options.gaps, options.lenient).encode(table, where=str(path))


def _owners(column: pd.Series[Any], path: Path) -> NDArray[np.str_]:
    if column.isna().any():
        row = int(np.flatnonzero(column.isna())[0])
        raise DataCorrupt(f"{path}: column {column.name!r}, record {row}: the client is missing")
    return np.array([str(value) for value in column], dtype=np.str_)


def _labels(column: pd.Series[Any], options: FolderOptions, path: Path) -> Integers:
    if isinstance(options.classes, tuple):
        found = codes(column, options.classes)
        wrong = found < 0
        allowed = ", ".join(options.classes)
    else:
        values = numbers(column)
        wrong = (
            ~np.isfinite(values) | (values != np.floor(values)) | (values < 0) | (values >= options.classes)
        )
        found = np.where(wrong, 0, values).astype(np.int64)
        allowed = f"0..{options.classes - 1}"
    if options.lenient:
        found = np.where(wrong, 0, found)
    elif wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise DataCorrupt(
            f"{path}: label of record {row} is {column.iloc[row]!r}, data.classes allows {allowed}"
        )
    return found


def _hold_out(records: Records, fraction: float) -> tuple[Records, Records]:
    count = min(max(1, round(len(records) * fraction)), len(records) - 1)
    order = seeds.generator(0, "hold-out").permutation(len(records))
    return records.part(np.sort(order[count:])), records.part(np.sort(order[:count]))
