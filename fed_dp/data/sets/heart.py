"""Heart disease (UCI) of four hospitals."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from fed_dp.data.dataset import DataSet, Records, divided, every_nth
from fed_dp.data.files import File, verified
from fed_dp.data.options import Published
from fed_dp.data.tables import Columns

if TYPE_CHECKING:
    import pandas as pd

_HOME = "https://archive.ics.uci.edu/ml/machine-learning-databases/"
_HOSPITALS = (
    ("cleveland", "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8"),
    ("hungarian", "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796"),
    ("switzerland", "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314"),
    ("va", "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f"),
)
_HEART = tuple(
    File(f"processed.{name}.data", digest, f"{_HOME}heart-disease/processed.{name}.data")
    for name, digest in _HOSPITALS
)
_HEART_NAMES = (
    "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak",
    "slope", "ca", "thal", "num",
)  # fmt: skip
HEART_COLUMNS = Columns(
    bounds={
        "age": (18, 100),
        "sex": (0, 1),
        "trestbps": (60, 220),
        "chol": (80, 620),
        "fbs": (0, 1),
        "thalach": (50, 220),
        "exang": (0, 1),
        "oldpeak": (-3, 7),
        "ca": (0, 3),
    },
    categories={
        "cp": ("1", "2", "3", "4"),
        "restecg": ("0", "1", "2"),
        "slope": ("1", "2", "3"),
        "thal": ("3", "6", "7"),
    },
    gaps=True,
)


class Heart(Published):
    """Heart disease (UCI), four hospitals."""

    name: Literal["heart"] = "heart"
    about = "heart disease (UCI), four hospitals"
    owners = "hospitals"
    directory = "uci_heart"
    layouts = (_HEART,)

    def read_files(self, folder: Path, files: tuple[File, ...]) -> DataSet:
        """Read all hospitals' records; every fifth of each is a test record."""
        import pandas as pd

        tables = []
        for file, (hospital, _) in zip(files, _HOSPITALS, strict=True):
            table = hospital_table(verified(folder, file))
            tables.append(table.assign(hospital=hospital, test=every_nth(len(table), 5)))
        table = pd.concat(tables, ignore_index=True)
        for name in HEART_COLUMNS.categories:
            table[name] = table[name].map(lambda value: f"{value:.0f}", na_action="ignore")
        x = HEART_COLUMNS.encode(table, where=str(folder))
        y = (table["num"] > 0).to_numpy().astype(np.int64)
        owner, test = table["hospital"].to_numpy(np.str_), table["test"].to_numpy(bool)
        return divided("heart", Records(x, y, owner), test, classes=2)


def hospital_table(path: Path) -> pd.DataFrame:
    """Read one hospital's file of the heart data."""
    from fed_dp.data.formats import read_table

    table = read_table(path, header=None, names=list(_HEART_NAMES), na_values="?")
    # A cholesterol or blood pressure of 0 is not a measurement: it stands for "not taken".
    table[["chol", "trestbps"]] = table[["chol", "trestbps"]].replace(0, np.nan)
    return table
