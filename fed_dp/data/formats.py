"""File formats: idx, npz, CIFAR's binary rows, CSV and Parquet. Wrong files are refused by name."""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.io
from numpy.typing import NDArray
from scipy.io.matlab import MatReadError

from fed_dp.errors import DataCorrupt, DataError, DataMissing

_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_bytes(path: Path) -> bytes:
    """Read a file, decompressing .gz and .xz."""
    try:
        if path.suffix == ".gz":
            return gzip.decompress(path.read_bytes())
        if path.suffix == ".xz":
            return lzma.decompress(path.read_bytes())
        return path.read_bytes()
    except FileNotFoundError:
        raise DataMissing(f"{path} is missing") from None
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataCorrupt(f"{path} is truncated or not a {path.suffix[1:]} file: {error}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def read_idx(path: Path) -> NDArray[Any]:
    """Read an idx file (LeCun's format: two zero bytes, type, rank, big-endian shape, values)."""
    raw = read_bytes(path)
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _IDX_TYPES or not 1 <= raw[3] <= 4:
        raise DataCorrupt(f"{path} is not an idx file: it starts with {raw[:4].hex() or 'nothing'}")
    dtype, rank = np.dtype(_IDX_TYPES[raw[2]]), raw[3]
    start = 4 + 4 * rank
    shape = tuple(int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(rank))
    expected = start + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if len(raw) != expected:
        raise DataCorrupt(f"{path} holds {len(raw)} bytes, its header {shape} promises {expected}")
    return np.frombuffer(raw, dtype, offset=start).reshape(shape)


def read_npz(path: Path, names: tuple[str, ...]) -> tuple[NDArray[Any], ...]:
    """Read named arrays of an npz file; pickled objects are refused."""
    try:
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as archive:
            if missing := [name for name in names if name not in archive.files]:
                raise DataCorrupt(
                    f"{path} has no array {missing[0]!r}; expected {', '.join(names)}, "
                    f"found {', '.join(archive.files) or 'none'}"
                )
            return tuple(archive[name] for name in names)
    except FileNotFoundError:
        raise DataMissing(f"{path} is missing") from None
    except (zipfile.BadZipFile, ValueError, EOFError, zlib.error, OSError) as error:
        raise DataCorrupt(f"{path} is truncated or not an npz file of plain arrays: {error}") from None


def read_mat(path: Path, names: tuple[str, ...]) -> tuple[NDArray[Any], ...]:
    """Read named arrays of a MATLAB file (version 7 or older)."""
    try:
        found = scipy.io.loadmat(path, variable_names=names)
        return tuple(np.asarray(found[name]) for name in names)
    except KeyError as error:
        raise DataCorrupt(f"{path} has no array {error}; expected {', '.join(names)}") from None
    except (MatReadError, ValueError, TypeError, OSError, NotImplementedError) as error:
        raise DataCorrupt(f"{path} is truncated or not a MATLAB file: {error}") from None


def read_tar(path: Path, names: tuple[str, ...]) -> tuple[bytes, ...]:
    """Read named members of a gzipped tar archive; nothing is extracted to disk."""
    try:
        with tarfile.open(path, "r:gz") as archive:
            found = {m.name: archive.extractfile(m) for m in archive.getmembers() if m.name in names}
            return tuple(handle.read() if (handle := found[name]) else b"" for name in names)
    except KeyError as error:
        raise DataCorrupt(f"{path} has no member {error}") from None
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataCorrupt(f"{path} is truncated or not a tar.gz archive: {error}") from None


def read_cifar(raw: bytes, *, where: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read CIFAR-10's binary rows: one label byte, then 3 × 32 × 32 bytes."""
    if not raw or len(raw) % 3073:
        raise DataCorrupt(f"{where} holds {len(raw)} bytes, expected a multiple of 3,073")
    rows = np.frombuffer(raw, np.uint8).reshape(-1, 3073)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64)


def read_csv(path: Path, *, lenient: bool = False) -> pd.DataFrame:
    """Read a CSV table of texts; an empty cell is None.

    No cell's type is guessed from others, for then one record would change how all others are read. Where
    `lenient` is set, one line is one record, whatever it holds: cells that it has too few of are None, those
    that it has too many of are left out, and bytes that are not UTF-8 are replaced.
    """
    try:
        text = read_bytes(path).decode("utf-8-sig", "replace" if lenient else "strict")
    except UnicodeDecodeError as error:
        raise DataCorrupt(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    lines = text.split("\n")
    if lines[-1] == "":
        del lines[-1]
    if not lines:
        raise DataCorrupt(f"{path} is empty: expected a line with the columns' names")
    header = _cells(lines[0])
    if twice := [name for name in header if header.count(name) > 1]:
        raise DataCorrupt(f"{path} has the column {twice[0]!r} twice")
    rows = [_cells(line) for line in lines[1:]] if lenient else _strict_rows(path, text, len(header))
    width = len(header)
    full = [(row + [""] * (width - len(row)))[:width] if len(row) != width else row for row in rows]
    columns: list[Any] = list(zip(*full, strict=True)) if full else [()] * width
    return pd.DataFrame(
        {
            name: pd.Series([cell or None for cell in cells], dtype=object)
            for name, cells in zip(header, columns, strict=True)
        }
    )


def _cells(line: str) -> list[str]:
    """Return the cells of one line, by itself. One that is too long for a CSV reader has none."""
    line = line.removesuffix("\r").replace("\r", " ")
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


def _strict_rows(path: Path, text: str, width: int) -> list[list[str]]:
    reader, rows = csv.reader(io.StringIO(text, newline=""), strict=True), list[list[str]]()
    try:
        for row in reader:
            if len(row) > width:
                raise DataCorrupt(
                    f"{path}, line {reader.line_num}: {len(row)} cells, but {width} columns have names"
                )
            if row:  # a blank line is no record
                rows.append(row)
    except csv.Error as error:
        raise DataCorrupt(f"{path}, line {reader.line_num}: a quote does not close ({error})") from None
    return rows[1:]


def read_table(path: Path, **options: Any) -> pd.DataFrame:
    """Read a CSV or Parquet table; a Parquet column keeps the type it is stored with."""
    try:
        if path.suffix == ".parquet":
            return pd.read_parquet(path, dtype_backend="pyarrow")
        table: pd.DataFrame = pd.read_csv(path, **options)
        return table
    except ImportError:
        raise DataError(f"{path}: Parquet needs the extra: pip install 'fed_dp[parquet]'") from None
    except FileNotFoundError:
        raise DataMissing(f"{path} is missing") from None
    except (ValueError, OSError) as error:  # pandas' and pyarrow's parse errors are ValueErrors
        reason = str(error).strip().splitlines()[0]
        raise DataCorrupt(f"{path} is not a readable {path.suffix[1:]} table: {reason}") from None
