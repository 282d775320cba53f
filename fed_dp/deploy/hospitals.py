"""The four hospitals of the UCI heart data as four sites: every one a folder of its own records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from fed_dp.data.dataset import every_nth
from fed_dp.data.files import verified
from fed_dp.data.sets.heart import Heart, hospital_table

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
WORDS = {
    "cp": {1: "typical", 2: "atypical", 3: "other", 4: "none"},
    "restecg": {0: "normal", 1: "wave", 2: "hypertrophy"},
    "slope": {1: "up", 2: "flat", 3: "down"},
    "thal": {3: "normal", 6: "fixed", 7: "reversible"},
}
PUBLIC = 5  # records of each hospital that stand for people who gave theirs to everybody


def write_hospitals(sites: Path, server: Path) -> dict[str, int]:
    """Write train.csv and test.csv for every site, test.csv and public.csv for the server.

    Returns the number of training records of each. The server's test records are those of all hospitals,
    which stand for a public benchmark; its public records are no hospital's any more.
    """
    folder = Heart.folder()
    counts, tests, public = {}, [], []
    for file in Heart.files(folder):
        hospital = file.name.split(".")[1]
        table = _table(verified(folder, file))
        test = every_nth(len(table), 5)
        train = table[~test]
        given = every_nth(len(train), len(train) // PUBLIC)
        own = sites / hospital / "data"
        own.mkdir(exist_ok=True, mode=0o700)
        train[~given].to_csv(own / "train.csv", index=False)
        table[test].to_csv(own / "test.csv", index=False)
        counts[hospital] = int((~given).sum())
        tests.append(table[test])
        public.append(train[given])
    server.mkdir(exist_ok=True, mode=0o700)
    pd.concat(tests).to_csv(server / "test.csv", index=False)
    pd.concat(public).to_csv(server / "public.csv", index=False)
    return counts


def _table(path: Path) -> pd.DataFrame:
    """Read a hospital's file as it would keep it: categories in words, ill or not."""
    table = hospital_table(path)
    for name, words in WORDS.items():
        table[name] = table[name].map(words)
    table["ill"] = np.where(table.pop("num") > 0, "yes", "no")
    return table
