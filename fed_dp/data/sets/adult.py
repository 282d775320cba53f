"""Census income (UCI Adult): all attributes, or each attribute as one number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from fed_dp.data.dataset import DataSet, Integers, Records, identity
from fed_dp.data.files import File, verified
from fed_dp.data.options import Published
from fed_dp.data.tables import Columns
from fed_dp.errors import DataCorrupt

if TYPE_CHECKING:
    import pandas as pd

_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"
_ADULT = (
    File(
        "adult.data",
        "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
        _UCI + "adult/adult.data",
    ),
    File(
        "adult.test",
        "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
        _UCI + "adult/adult.test",
    ),
)
_ADULT_NAMES = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation",
    "relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week",
    "native-country", "income",
)  # fmt: skip
# Values as the data set's own description lists them; bounds as its columns' definitions allow.
ADULT_COLUMNS = Columns(
    bounds={
        "age": (17, 90),
        "fnlwgt": (0, 1_500_000),
        "education-num": (1, 16),
        "capital-gain": (0, 100_000),
        "capital-loss": (0, 5_000),
        "hours-per-week": (1, 99),
    },
    categories={
        "workclass": (
            "Private", "Self-emp-not-inc", "Self-emp-inc", "Federal-gov", "Local-gov",
            "State-gov", "Without-pay", "Never-worked",
        ),
        "education": (
            "Bachelors", "Some-college", "11th", "HS-grad", "Prof-school", "Assoc-acdm",
            "Assoc-voc", "9th", "7th-8th", "12th", "Masters", "1st-4th", "10th", "Doctorate",
            "5th-6th", "Preschool",
        ),
        "marital-status": (
            "Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed",
            "Married-spouse-absent", "Married-AF-spouse",
        ),
        "occupation": (
            "Tech-support", "Craft-repair", "Other-service", "Sales", "Exec-managerial",
            "Prof-specialty", "Handlers-cleaners", "Machine-op-inspct", "Adm-clerical",
            "Farming-fishing", "Transport-moving", "Priv-house-serv", "Protective-serv",
            "Armed-Forces",
        ),
        "relationship": (
            "Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried",
        ),
        "race": ("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black"),
        "sex": ("Female", "Male"),
        "native-country": (
            "United-States", "Cambodia", "England", "Puerto-Rico", "Canada", "Germany",
            "Outlying-US(Guam-USVI-etc)", "India", "Japan", "Greece", "South", "China", "Cuba",
            "Iran", "Honduras", "Philippines", "Italy", "Poland", "Jamaica", "Vietnam", "Mexico",
            "Portugal", "Ireland", "France", "Dominican-Republic", "Laos", "Ecuador", "Taiwan",
            "Haiti", "Columbia", "Hungary", "Guatemala", "Nicaragua", "Scotland", "Thailand",
            "Yugoslavia", "El-Salvador", "Trinadad&Tobago", "Peru", "Hong", "Holand-Netherlands",
        ),
    },
    gaps=True,
)  # fmt: skip

# One number each, in the order in which the SVM paper's census attributes join: 5, 8, 11, 14 of them.
ADULT_NUMBERS = Columns(
    bounds={
        "age": (17, 90),
        "male": (0, 1),
        "education-num": (1, 16),
        "hours-per-week": (1, 99),
        "born-in-us": (0, 1),
        "gain": (0, math.log1p(100_000)),
        "loss": (0, math.log1p(5_000)),
        "white": (0, 1),
        "single": (0, 1),
        "married": (0, 1),
        "child": (0, 1),
        "self-employed": (0, 1),
        "government": (0, 1),
        "professional": (0, 1),
    },
    categories={},
)


class Adult(Published):
    """All attributes, categories as one input each."""

    name: Literal["adult"] = "adult"
    about = "census income (UCI Adult), 14 attributes"
    directory = "adult"
    layouts = (_ADULT,)

    def read_files(self, folder: Path, files: tuple[File, ...]) -> DataSet:
        """Read training and test records."""
        splits = [
            Records(ADULT_COLUMNS.encode(table, where=str(path)), rich)
            for path, table, rich in _people(folder, files)
        ]
        return DataSet("adult", splits[0], splits[1], 2, *identity())


class AdultNumbers(Published):
    """Each attribute one number, in the order of the SVM paper's census attributes."""

    name: Literal["adult-numbers"] = "adult-numbers"
    about = "the same, each attribute one number"
    directory = "adult"
    layouts = (_ADULT,)
    attributes: Literal[5, 8, 11, 14] | None = None  # the first so many; without it, all

    def read_files(self, folder: Path, files: tuple[File, ...]) -> DataSet:
        """Read training and test records."""
        splits = []
        for path, table, rich in _people(folder, files):
            status, work = table["marital-status"], table["workclass"].fillna("")
            numbers = table[["age", "education-num", "hours-per-week"]].assign(
                **{
                    "male": table["sex"] == "Male",
                    "born-in-us": table["native-country"] == "United-States",
                    "gain": np.log1p(table["capital-gain"]),
                    "loss": np.log1p(table["capital-loss"]),
                    "white": table["race"] == "White",
                    "single": status == "Never-married",
                    "married": status.isin(["Married-civ-spouse", "Married-AF-spouse"]),
                    "child": table["relationship"] == "Own-child",
                    "self-employed": work.str.startswith("Self-emp"),
                    "government": work.str.endswith("-gov"),
                    "professional": table["occupation"].isin(["Exec-managerial", "Prof-specialty"]),
                }
            )
            splits.append(Records(ADULT_NUMBERS.encode(numbers.astype(float), where=str(path)), rich))
        whole = DataSet("adult-numbers", splits[0], splits[1], 2, *identity())
        if (count := self.attributes) is None:
            return whole
        train, test = (
            Records(records.x[:, :count].astype(np.float32), records.y, records.owner)
            for records in (whole.train, whole.test)
        )
        return replace(whole, train=train, test=test)


def _people(folder: Path, files: tuple[File, ...]) -> Iterator[tuple[Path, pd.DataFrame, Integers]]:
    """Yield each file with its table and who earns more than 50,000."""
    from fed_dp.data.formats import read_table

    for file in files:
        path = verified(folder, file)
        table = read_table(
            path,
            header=None,
            names=list(_ADULT_NAMES),
            na_values="?",
            skipinitialspace=True,
            comment="|",
            skip_blank_lines=True,
        )
        income = table["income"].str.rstrip(".")
        if not income.isin(["<=50K", ">50K"]).all():
            raise DataCorrupt(f"{path}: column 'income' holds other values than <=50K and >50K")
        yield path, table, (income == ">50K").to_numpy().astype(np.int64)
