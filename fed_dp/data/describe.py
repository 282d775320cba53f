"""A proposal of a `[data]` section for a folder, to be completed with what is publicly known.

It looks at the records, so that it is for somebody who may see them. It never proposes bounds: they must
not be taken from the data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fed_dp.data.formats import read_csv, read_npz, read_table
from fed_dp.data.sets.images import ENDINGS
from fed_dp.data.tables import is_date, numbers
from fed_dp.errors import DataMissing

if TYPE_CHECKING:
    import pandas as pd

LABELS = ("label", "target", "class", "outcome", "diagnosis", "y")  # likely names of the label's column
CLIENTS = ("client", "site", "hospital", "center", "centre", "owner")
PERSONS = ("person", "user", "participant", "subject", "patient", "id")
TIMES = ("time", "date", "day", "week", "month", "timestamp")
MAX_CATEGORIES = 30  # words that are taken for categories
MAX_CLASSES = 20  # different whole numbers that are taken for classes
HEAD = """\
# fed-dp has looked at the records in {folder}: comments tell what is in them, and should stay with those who
# may see them. Bounds and categories must be public knowledge, and not what these records happen to hold:
# replace every LOW and HIGH, and complete every list, with what is known without them.
"""


def describe(folder: Path) -> str:
    """Return a `[data]` section, as TOML to be completed, for a folder of records.

    Parameters
    ----------
    folder
        It holds train.csv, train.parquet or train.npz (or one file of such a kind), or folders of images.

    Raises
    ------
    DataMissing
        When there is nothing that can be read.
    """
    if not folder.is_dir():
        raise DataMissing(f"{folder}: no such folder")
    for suffix in (".csv", ".parquet", ".npz"):
        files = sorted(folder.glob(f"*{suffix}"))
        path = next((each for each in files if each.stem == "train"), files[0] if files else None)
        if path is not None:
            if suffix == ".npz":
                return _arrays(folder, path)
            return _table(folder, path, read_csv(path) if suffix == ".csv" else read_table(path))
    if (found := _images(folder)) is not None:
        return found
    raise DataMissing(
        f"{folder}: expected train.csv, train.parquet, train.npz, or folders of images ({', '.join(ENDINGS)})"
    )


def _section(folder: Path, lines: list[str]) -> str:
    return HEAD.format(folder=folder) + "\n".join(["[data]", *lines]) + "\n"


def _table(folder: Path, path: Path, table: pd.DataFrame) -> str:
    columns = [str(name) for name in table.columns]
    named = next((name for name in columns if name.lower() in LABELS), None)
    over_time = _persons(table) if named is None else ()
    label = None if over_time else named or columns[-1]
    client = next((name for name in columns if name.lower() in CLIENTS and name != label), None)
    bounds: list[str] = []
    categories: list[str] = []
    ignored: list[str] = []
    gaps = False
    for name in columns:
        if name in (label, client, *over_time):
            continue
        column = table[name]
        kind, about = _kind(column)
        gaps |= bool(column.isna().any())
        key = f"data.{kind}.{json.dumps(name)}"
        if kind == "bounds":
            bounds.append(f"{json.dumps(name)} = [LOW, HIGH]  # {about}")
        elif kind == "categories":
            words = sorted({str(value) for value in column.dropna()})
            categories.append(f"{json.dumps(name)} = {json.dumps(words, ensure_ascii=False)}  # {about}")
        else:
            ignored.append(name)
            bounds.append(f"# {key}: {about}")
    lines = [
        'name = "folder"',
        f"path = {json.dumps(str(folder))}",
        *(_over_time(over_time, bounds) if label is None else _targets(table[label], label)),
        *([f"client = {json.dumps(client)}  # whose each record is"] if client else []),
        *(["gaps = true  # some values are missing"] if gaps else []),
        *([f"ignore = {json.dumps(ignored, ensure_ascii=False)}"] if ignored else []),
        *(["", "[data.bounds]", *bounds] if bounds else []),
        *(["", "[data.categories]", *categories] if categories else []),
    ]
    return _section(folder, lines) + f"# {path.name}: {len(table)} records\n"


def _persons(table: pd.DataFrame) -> tuple[str, ...]:
    """Return the columns that say whose each line is, and when, in a table of persons over time."""
    names = [str(name) for name in table.columns]
    person, time = (
        next((name for name in names if name.lower().removesuffix("_id") in likely), None)
        for likely in (PERSONS, TIMES)
    )
    if person is None or time is None or table.duplicated([person, time]).any():
        return ()
    return (person, time) if table.duplicated(person).any() else ()


def _over_time(columns: tuple[str, ...], bounds: list[str]) -> list[str]:
    """Return the keys of a table of persons over time."""
    person, time = map(json.dumps, columns)
    numbers = (line.partition(" = ")[0] for line in bounds if not line.startswith("#"))
    return [
        f"person = {person}  # whose each line is",
        f"time = {time}  # when it was",
        f"rises = {next(numbers, 'COLUMN')}  # a guess: the label says whether it is higher next time",
        "window = 4  # time points in a record: three past, and now",
        '# friends = "friends.csv"  # of two columns, if there is such a file beside it',
    ]


def _kind(column: pd.Series[Any]) -> tuple[str, str]:
    """Return how a column can be an input: bounds, categories or not at all; and what is in it."""
    missing = f", {int(column.isna().sum())} missing" if column.isna().any() else ""
    there = column.dropna()
    values = numbers(there)
    if len(values) and (values == values).all():
        return "bounds", f"numbers, seen: {values.min():g} to {values.max():g}{missing}"
    if len(there) and all(is_date(value) for value in there[:50]):
        return "ignore", f"dates{missing}: make numbers of them, as days since a public date, or ignore them"
    words = there.astype(str).nunique()
    if words <= MAX_CATEGORIES and words < len(there):
        return "categories", f"{words} words seen{missing}"
    return "ignore", f"{words} different words{missing}: text or identifiers"


def _targets(column: pd.Series[Any], label: str) -> list[str]:
    """Return the keys of the label: classes, or numbers."""
    values = numbers(column.dropna())
    named = [f"label = {json.dumps(label)}  # a guess"]
    if not len(values) or not (values == values).all():
        words = sorted({str(value) for value in column.dropna()})
        return [*named, f"classes = {json.dumps(words, ensure_ascii=False)}  # words seen"]
    if (values == values.round()).all() and values.min() >= 0 and values.max() < MAX_CLASSES:
        return [*named, f"classes = {int(values.max()) + 1}  # seen: whole numbers to {int(values.max())}"]
    return [
        'targets = "numbers"  # with task = { name = "regression", bounds = [LOW, HIGH] }',
        f"outputs = [{json.dumps(label)}]  # a guess; seen: {values.min():g} to {values.max():g}",
    ]


def _arrays(folder: Path, path: Path) -> str:
    x, y = read_npz(path, ("X", "y"))
    lines = ['name = "folder"', f"path = {json.dumps(str(folder))}"]
    seen = "" if x.dtype.kind not in "biuf" or not x.size else f", seen: {x.min():g} to {x.max():g}"
    lines.append(f"bounds = [LOW, HIGH]  # of every input; X is {x.dtype} of shape {x.shape}{seen}")
    if y.ndim == 2 and y.shape[1] > 1:
        kind = "labels" if set(y.ravel().tolist()) <= {0, 1} else "numbers"
        lines += [f'targets = "{kind}"', f"outputs = {y.shape[1]}"]
    elif y.dtype.kind in "iub":
        lines.append(
            f"classes = {int(y.max(initial=0)) + 1}  # seen: whole numbers to {int(y.max(initial=0))}"
        )
    elif y.dtype.kind == "U":
        lines.append(f"classes = {json.dumps(sorted(set(y.ravel().tolist())), ensure_ascii=False)}")
    else:
        lines += [
            'targets = "numbers"  # with task = { name = "regression", bounds = [LOW, HIGH] }',
            "outputs = 1",
        ]
    return _section(folder, lines) + f"# {path.name}: {len(x)} records\n"


def _images(folder: Path) -> str | None:
    """Return the section of a folder of images; None where it holds none."""
    from PIL import Image

    home = folder / "train" if (folder / "train").is_dir() else folder
    files = [path for path in home.rglob("*") if path.suffix.lower() in ENDINGS]
    depths = {len(path.relative_to(home).parts) for path in files}
    if not depths or not depths <= {2, 3} or len(depths) > 1:
        return None
    by_client = depths == {3}
    classes = sorted({path.parent.name for path in files})
    with Image.open(files[0]) as image:
        (width, height), mode = image.size, image.mode
    lines = [
        'name = "images"',
        f"path = {json.dumps(str(folder))}",
        f"classes = {json.dumps(classes, ensure_ascii=False)}  # folders seen",
        f"size = [{height}, {width}]  # height, width: of the first image; all are brought to it",
        f"colour = {str(mode not in ('1', 'L', 'I', 'I;16')).lower()}",
    ]
    if by_client:
        lines += ["by_client = true", 'partition = "natural"']
    return _section(folder, lines) + f"# {len(files)} images\n"
