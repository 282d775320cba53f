from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fed_dp.data import FolderOptions, read_folder
from fed_dp.errors import ConfigError, DataCorrupt, DataMissing
from tests.data.test_formats import idx

TABLE = pd.DataFrame(
    {
        "age": [20.0, 40.0, 130.0, 60.0],
        "sex": ["f", "m", "m", "f"],
        "site": ["berlin", "aarhus", "aarhus", "berlin"],
        "ill": ["no", "yes", "yes", "no"],
    }
)
OPTIONS: dict[str, Any] = {
    "bounds": {"age": (0.0, 100.0)},
    "categories": {"sex": ("f", "m")},
    "outputs": ("no", "yes"),
    "label": "ill",
    "client": "site",
}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_is_scaled_by_stated_bounds_only(tmp_path: Path, suffix: str) -> None:
    for split in ("train", "test"):
        path = tmp_path / f"{split}.{suffix}"
        TABLE.to_csv(path, index=False) if suffix == "csv" else TABLE.to_parquet(path)
    found = read_folder(FolderOptions(tmp_path, **OPTIONS))
    assert found.train.x.tolist() == [
        [pytest.approx(-0.6), 1, 0],
        [pytest.approx(-0.2), 0, 1],
        [1, 0, 1],  # 130 is beyond the stated bound and is clipped to it
        [pytest.approx(0.2), 1, 0],
    ]
    assert found.train.y.tolist() == [0, 1, 1, 0]
    assert found.train.owner is not None
    assert found.train.owner.tolist() == ["berlin", "aarhus", "aarhus", "berlin"]


def test_arrays_come_from_npz_or_idx(tmp_path: Path) -> None:
    x, y = np.arange(40, dtype=np.uint8).reshape(10, 2, 2), np.arange(10, dtype=np.uint8) % 3
    npz, plain = tmp_path / "npz", tmp_path / "idx"
    npz.mkdir()
    plain.mkdir()
    np.savez(npz / "train.npz", X=x, y=y)
    (plain / "train-images-idx3-ubyte").write_bytes(idx(x))
    (plain / "train-labels-idx1-ubyte").write_bytes(idx(y))
    one, other = (read_folder(FolderOptions(p, (0, 255), 3, test_fraction=0.3)) for p in (npz, plain))
    assert one.shape == (1, 2, 2)
    assert (len(one.train), len(one.test)) == (7, 3)
    assert "held out" in one.notes[0]
    assert np.array_equal(one.train.x, other.train.x)
    together = np.sort(np.concatenate([one.train.x[:, 0, 0, 0], one.test.x[:, 0, 0, 0]]))
    assert np.allclose(together, 2 * x[:, 0, 0] / 255 - 1)


def test_a_category_may_be_called_na_and_labels_may_be_a_column_vector(tmp_path: Path) -> None:
    TABLE.assign(sex=["NA", "m", "m", "NA"]).to_csv(tmp_path / "train.csv", index=False)
    found = read_folder(FolderOptions(tmp_path, **{**OPTIONS, "categories": {"sex": ("NA", "m")}}))
    assert len(found.train) + len(found.test) == 4
    (tmp_path / "train.csv").unlink()
    np.savez(tmp_path / "train.npz", X=np.zeros((4, 2)), y=np.array([[0], [1], [1], [0]]))
    assert read_folder(FolderOptions(tmp_path, (0, 1), 2)).train.y.ndim == 1


def changed(**columns: Any) -> pd.DataFrame:
    return TABLE.assign(**columns)


@pytest.mark.parametrize(
    ("table", "options", "error", "says"),
    [
        (TABLE, {"label": None}, ConfigError, "data.label is missing"),
        (TABLE, {"label": "sick"}, ConfigError, "data.label = 'sick'.*no such column"),
        (TABLE, {"client": "ward"}, ConfigError, "data.client = 'ward'"),
        (TABLE, {"bounds": {}}, ConfigError, "no entry for column 'age'"),
        (TABLE, {"bounds": {"age": (5.0, 5.0)}}, DataCorrupt, "low < high"),
        (
            TABLE,
            {"categories": {"sex": ("f", "m"), "ill": ("no", "yes")}},
            ConfigError,
            "'ill', which is not",
        ),
        (TABLE, {"bounds": {"age": (0.0, 1.0), "sex": (0.0, 1.0)}}, ConfigError, "'sex' stands in"),
        (TABLE[["site", "ill"]], {"bounds": {}, "categories": {}}, ConfigError, "nothing to learn from"),
        (changed(site=["a", None, "b", "b"]), {}, DataCorrupt, "record 1: the client is missing"),
        (TABLE, {"bounds": {"age": (0.0, 1.0), "x": (0.0, 1.0)}}, DataCorrupt, "no column 'x'"),
        (TABLE, {"outputs": ("no", "maybe")}, DataCorrupt, "label of record 1 is 'yes'"),
        (TABLE, {"outputs": 2}, DataCorrupt, "label of record 0 is 'no'"),
        (TABLE, {"categories": {"sex": ("f",)}}, DataCorrupt, "record 1: 'm' is not one of f"),
        (changed(age=[1, np.nan, 2, 3]), {}, DataCorrupt, "column 'age', record 1"),
        (changed(age=["1", "x", "2", "3"]), {}, DataCorrupt, "column 'age', record 1"),
        (changed(age=[1, np.inf, 2, 3]), {}, DataCorrupt, "column 'age', record 1"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(
    tmp_path: Path, table: pd.DataFrame, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    table.to_csv(tmp_path / "train.csv", index=False)
    with pytest.raises(error, match=says):
        read_folder(FolderOptions(tmp_path, **{**OPTIONS, **options}))


def test_what_is_wrong_in_arrays_or_folders_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match="no such folder"):
        read_folder(FolderOptions(tmp_path / "absent", (0, 1), 2))
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataMissing, match=r"expected train\.npz.*found notes\.txt"):
        read_folder(FolderOptions(tmp_path, (0, 1), 2))
    cases = [
        (np.array([[0.0], [np.nan]]), [0, 1], (0, 1), DataCorrupt, "finite"),
        (np.array([["a"], ["b"]]), [0, 1], (0, 1), DataCorrupt, "finite numbers|NaN"),
        (np.zeros((3, 1)), [0, 1], (0, 1), DataCorrupt, "3 inputs but 2 labels"),
        (np.zeros(2), [0, 1], (0, 1), DataCorrupt, "expected X of shape"),
        (np.array(1.0), [0, 1], (0, 1), DataCorrupt, "expected X of shape"),
        (np.zeros((2, 1)), [[0, 1], [1, 0]], (0, 1), DataCorrupt, "expected X of shape"),
        (np.zeros((2, 1)), [0, 2], (0, 1), DataCorrupt, r"label of record 1 is .*0\.\.1"),
        (np.zeros((2, 1)), [0, 1], (1, 0), ConfigError, "low < high"),
        (np.zeros((2, 1)), [0, 1], {"a": (0, 1)}, ConfigError, "one pair"),
    ]
    for x, y, bounds, error, says in cases:
        np.savez(tmp_path / "train.npz", X=x, y=np.array(y))
        with pytest.raises(error, match=says):
            read_folder(FolderOptions(tmp_path, bounds, 2))  # type: ignore[arg-type]
