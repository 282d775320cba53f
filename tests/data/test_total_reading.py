"""A deployed site's reading is total and cell by cell: no record decides whether, or how, others are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fed_dp.data import FolderOptions, read_part
from fed_dp.errors import ConfigError, DataCorrupt
from fed_dp.experiment import build

OPTIONS = FolderOptions(
    Path(), {"a": (0.0, 9.0)}, ("0", "1", "2"), "y", categories={"b": ("1", "2")}, gaps=True, lenient=True
)
Row = tuple[Any, Any, Any]
GOOD: list[Row] = [(1, 1, 0), (2, 2, 1), (3, 1, 2), (9, 2, 0)]


def encoded(path: Path, options: FolderOptions = OPTIONS) -> list[bytes]:
    """Return each record as it is read."""
    found = read_part("train", replace(options, path=path))
    return [x.tobytes() + y.tobytes() for x, y in zip(found.x, found.y, strict=True)]


def as_csv(path: Path, rows: list[Row]) -> None:
    pd.DataFrame(rows, columns=list("aby"), dtype=object).to_csv(path / "train.csv", index=False)


def as_parquet(path: Path, rows: list[Row]) -> None:
    pd.DataFrame(rows, columns=list("aby")).to_parquet(path / "train.parquet")


def as_typed_parquet(path: Path, rows: list[Row]) -> None:
    """The columns' types are stored: nullable integers."""
    pd.DataFrame(rows, columns=list("aby"), dtype="Int64").to_parquet(path / "train.parquet")


def as_npz(path: Path, rows: list[Row]) -> None:
    table = pd.DataFrame(rows, columns=list("aby"))
    np.savez(path / "train.npz", X=table[["a", "b"]].to_numpy(float), y=table["y"].to_numpy())


ARRAY = FolderOptions(Path(), (0.0, 9.0), ("0", "1", "2"), lenient=True)
FORMS: dict[str, tuple[Callable[[Path, list[Row]], None], FolderOptions]] = {
    "csv": (as_csv, OPTIONS),
    "parquet": (as_parquet, OPTIONS),
    "typed parquet": (as_typed_parquet, OPTIONS),
    "npz": (as_npz, ARRAY),
}


cells = st.one_of(st.none(), st.integers(-(2**40), 2**40), st.integers(0, 3))


@pytest.mark.parametrize("form", FORMS)
@given(row=st.tuples(cells, cells, cells), place=st.integers(0, len(GOOD) - 1))
def test_changing_one_record_changes_one_encoded_record(
    form: str, row: Row, place: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    write, options = FORMS[form]
    before, after = tmp_path_factory.mktemp("before"), tmp_path_factory.mktemp("after")
    write(before, GOOD)
    write(after, [*GOOD[:place], row, *GOOD[place + 1 :]])
    one, other = encoded(before, options), encoded(after, options)
    assert len(one) == len(other)
    assert all(a == b for k, (a, b) in enumerate(zip(one, other, strict=True)) if k != place)


ODD = [
    b'"', b'",', b'1,"2', b'1"2,"3"4,5', b",,,,,,,,", b"", b"\xe9\xff", b"1\r2", b"1,2\r", b"\x00", b"1,1",
    b'"a""', b"'", b"\xef\xbb\xbf", b"1,1,0,7", b"," * 200_000, b'"' + b"x" * 200_000, b"\xc3", b"2e400,1,0",
    "１,１,０".encode(), b"nan,nan,nan", b"1_0,1,0", b"\x0c", b"\xe2\x80\xa8", b"\x1c",
]  # fmt: skip


def line_by_line(path: Path, line: bytes, place: int) -> list[bytes]:
    lines = [b",".join(str(cell).encode() for cell in row) for row in GOOD]
    lines[place] = line
    (path / "train.csv").write_bytes(b"\n".join([b"a,b,y", *lines]) + b"\n")
    return encoded(path)


@pytest.mark.parametrize("line", ODD)
@pytest.mark.parametrize("place", range(len(GOOD)))
def test_whatever_a_line_of_a_csv_file_holds_it_is_one_record(
    line: bytes, place: int, tmp_path: Path
) -> None:
    honest = line_by_line(tmp_path, b"1,1,0", place)
    found = line_by_line(tmp_path, line, place)
    assert len(found) == len(honest)
    assert all(a == b for k, (a, b) in enumerate(zip(honest, found, strict=True)) if k != place)


@given(line=st.binary(max_size=40).filter(lambda line: b"\n" not in line), place=st.integers(0, 3))
def test_and_so_does_any_other_line(
    line: bytes, place: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("any")
    honest = line_by_line(path, b"1,1,0", place)
    found = line_by_line(path, line, place)
    assert [a for k, a in enumerate(honest) if k != place] == [a for k, a in enumerate(found) if k != place]


def test_a_site_that_checks_its_data_is_told_what_is_odd(tmp_path: Path) -> None:
    strict = replace(OPTIONS, path=tmp_path, lenient=False)
    for text, says in (
        (b"a,b,y\n1,1,0\n2,2,1,7\n", "line 3"),
        (b"a,b,y\n1,1,0\n2,\xe9,1\n", "UTF-8"),
        (b'a,b,y\n1,1,0\n2,"2,1\n', "quote"),
        (b"a,a,y\n1,1,0\n", "'a' twice"),
    ):
        (tmp_path / "train.csv").write_bytes(text)
        with pytest.raises(DataCorrupt, match=says):
            read_part("train", strict)


@pytest.mark.parametrize("kind", ["<U8", "float64", "int8", "bool", "float16"])
def test_an_array_of_any_type_is_read_cell_by_cell(kind: str, tmp_path: Path) -> None:
    x = np.array([[0, 1], [1, 1], [1, 0]]).astype(kind)
    np.savez(tmp_path / "train.npz", X=x, y=[0, 1, 2])
    found = read_part("train", replace(ARRAY, path=tmp_path))
    np.testing.assert_array_equal(found.x, np.float32(2 * np.array([[0, 1], [1, 1], [1, 0]]) / 9 - 1))


@pytest.mark.parametrize("bounds", [[-1.5e308, 1.5e308], [0.0, 1e31], {"a": [-1e31, 0.0]}])
def test_bounds_beyond_what_can_be_scaled_are_refused(bounds: Any) -> None:
    data = {"name": "folder", "path": "/x", "label": "y", "classes": 2, "bounds": bounds}
    with pytest.raises(ConfigError, match=r"data\.bounds of .*±1e\+30"):
        build({"data": data})


@pytest.mark.parametrize("bounds", [(-1e30, 1e30), (0.0, 5e-324), (1e30, 1.0000000000000002e30)])
def test_within_them_every_value_has_a_number(bounds: tuple[float, float], tmp_path: Path) -> None:
    values = [-np.inf, -1.7e308, bounds[0], 0.0, bounds[1], 1.7e308, np.inf, np.nan]
    np.savez(tmp_path / "train.npz", X=np.array([values]).T, y=[0] * len(values))
    x = read_part("train", replace(ARRAY, path=tmp_path, bounds=bounds)).x
    assert np.isfinite(x).all()
    assert np.abs(x).max() <= 1


COLUMNS = {
    "text that is not UTF-8": (pa.utf8(), [b"1", b"2", b"1", b"2"], b"M\xfcller HIV+"),
    "a date beyond Python's": (pa.date32(), [0, 1, 2, 3], 2**31 - 1),
    "the end of time": (pa.timestamp("us", "Europe/Berlin"), [0, 1, 2, 3], 253402300740 * 10**6),
    "a number in a list": (pa.list_(pa.int64()), [[1], [2], [], [3]], None),
}


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("as_category", [False, True])
def test_whatever_a_parquet_cell_holds_the_others_are_read(
    kind: str, as_category: bool, tmp_path: Path
) -> None:
    """One cell decided whether a deployed site answered, and was quoted in its error."""
    arrow, good, odd = COLUMNS[kind]
    seen = []
    for values in (good, [odd, *good[1:]]):
        if arrow == pa.utf8():
            cells = pa.Array.from_buffers(arrow, len(values), pa.array(values, pa.binary()).buffers())
        elif pa.types.is_list(arrow):
            cells = pa.array(values, arrow)
        else:
            width = pa.int32() if arrow.bit_width == 32 else pa.int64()
            cells = pa.array(values, width).view(arrow)
        table = pa.table({"a": pa.array([1.0, 2.0, 3.0, 4.0]), "b": cells, "y": pa.array([0, 1, 2, 0])})
        pq.write_table(table, tmp_path / "train.parquet")
        options = replace(OPTIONS, path=tmp_path)
        if not as_category:
            options = replace(options, categories={}, bounds={"a": (0.0, 9.0), "b": (0.0, 9.0)})
        seen.append(encoded(tmp_path, options))
    assert seen[0][1:] == seen[1][1:]
