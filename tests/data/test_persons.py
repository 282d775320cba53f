"""A user's own table of persons over time: read as it is stated, and in total, line by line."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fed_dp.data import FolderOptions, folder, persons, read_folder, read_inputs, read_part
from fed_dp.data.behaviour import UNKNOWN
from fed_dp.data.dataset import Records
from fed_dp.data.persons import PersonColumns
from fed_dp.errors import ConfigError, DataCorrupt, DataMissing
from fed_dp.experiment import build
from fed_dp.experiment.federation import at_server, at_site, load
from tests.mechanisms.privacy_loss import mutant

WINDOW = 3
NAMES, DAYS = ("ann", "bob", "cat", "dan"), 8
FRIENDS = [("ann", "bob"), ("bob", "cat"), ("ann", "bob"), ("dan", "far away")]
DATA: dict[str, Any] = {
    "name": "folder",
    "person": "id",
    "time": "date",
    "rises": "steps",
    "window": WINDOW,
    "friends": "friends.csv",
    "bounds": {"steps": [0.0, 1000.0], "calls": [0.0, 5.0]},
}
OPTIONS = FolderOptions(
    Path(),
    {"steps": (0.0, 1000.0), "calls": (0.0, 5.0)},
    2,
    persons=PersonColumns("id", "date", "steps", WINDOW, "friends.csv"),
)
SITE = replace(OPTIONS, lenient=True, every_line=True)
Row = list[Any]


def table() -> list[Row]:
    """Four persons' days, a line for each."""
    rng = np.random.default_rng(1)
    return [
        [name, f"2024-01-{day + 1:02d}", int(rng.integers(1000)), int(rng.integers(6))]
        for name in NAMES
        for day in range(DAYS)
    ]


def write(path: Path, rows: list[Row], friends: list[tuple[Any, Any]] = FRIENDS) -> None:
    for name, header, lines in (
        ("train", ("id", "date", "steps", "calls"), rows),
        ("friends", ("person", "friend"), friends),
    ):
        with (path / f"{name}.csv").open("w", newline="", encoding="utf-8") as handle:
            csv.writer(handle, lineterminator="\n").writerows([header, *lines])


def as_parquet(path: Path) -> None:
    """Write the table with the types that Parquet has."""
    found = pd.read_csv(path / "train.csv", parse_dates=["date"])
    found.to_parquet(path / "train.parquet")
    (path / "train.csv").unlink()


def whole(path: Path, options: FolderOptions = OPTIONS) -> Records:
    return read_part("train", replace(options, path=path))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_record_is_a_person_at_a_time_point_with_the_past_and_friends(tmp_path: Path, suffix: str) -> None:
    rows = table()
    np.random.default_rng(2).shuffle(rows)
    write(tmp_path, rows)
    if suffix == "parquet":
        as_parquet(tmp_path)
    found = whole(tmp_path, replace(OPTIONS, client="id"))
    assert found.x.shape == (len(NAMES) * (DAYS - WINDOW), 1, WINDOW + 1, 2)
    days = {(name, date): (steps, calls) for name, date, steps, calls in rows}
    order = [(name, date) for name, date, *_ in rows if "2024-01-02" < date < "2024-01-08"]
    assert found.owner is not None
    assert found.owner.tolist() == [name for name, _ in order]
    friends = {"ann": ["bob"], "bob": ["ann", "cat"], "cat": ["bob"], "dan": [None]}
    for (name, date), x, y in zip(order, found.x[:, 0], found.y, strict=True):
        day = int(date[-2:])
        dates = [f"2024-01-{d:02d}" for d in range(day - 2, day + 2)]
        past = [[2 * days[name, d][0] / 1000 - 1, 2 * days[name, d][1] / 5 - 1] for d in dates[:3]]
        assert x[:WINDOW] == pytest.approx(np.array(past), abs=1e-6)
        psi = [UNKNOWN if other is None else days[other, date][0] / 1000 for other in friends[name]]
        assert x[WINDOW].tolist() == [pytest.approx(np.mean(psi)), 0]
        assert y == (days[name, dates[3]][0] > days[name, date][0])


def test_test_records_are_the_last_of_each_persons_time(tmp_path: Path) -> None:
    write(tmp_path, table())
    options = replace(OPTIONS, path=tmp_path, client="id", test_fraction=0.4)
    found = read_folder(options)
    assert found.train.owner is not None
    assert found.test.owner is not None
    assert np.unique(found.test.owner).tolist() == list(NAMES)
    every = whole(tmp_path)
    for name in NAMES:  # each one's records before those of the test, in the order of time
        own = [found.train.x[found.train.owner == name], found.test.x[found.test.owner == name]]
        assert [len(part) for part in own] == [3, 2]
        start = NAMES.index(name) * 5
        assert np.array_equal(np.concatenate(own), every.x[start : start + 5])
    notes = " ".join(found.notes)
    for words in (
        "the last 40% of everybody's time",
        "not of a person",
        "steps is higher",
        "no ε protects",
    ):
        assert words in notes
    pd.DataFrame(table()[:8], columns=["id", "date", "steps", "calls"]).to_csv(
        tmp_path / "test.csv", index=False
    )
    assert len(read_folder(options).test) == DAYS - WINDOW


def test_another_column_may_say_how_friends_sway_and_missing_cells_say_nothing(tmp_path: Path) -> None:
    rows = table()
    rows[10][3] = None  # bob's calls on the third day
    write(tmp_path, rows)
    stated = PersonColumns("id", "date", "steps", WINDOW, "friends.csv", "calls")
    found = whole(tmp_path, replace(OPTIONS, persons=stated, gaps=True)).x[:5, 0, WINDOW, 0]
    calls = [UNKNOWN, *(row[3] / 5 for row in rows[11:15])]
    assert found == pytest.approx(calls)  # ann's only friend is bob


@pytest.mark.parametrize("stated", [4, ("ann", "bob", "cat", "dan")])
def test_persons_are_numbered_from_their_own_cell(tmp_path: Path, stated: Any) -> None:
    rows = table()
    if stated == 4:
        rows = [[NAMES.index(row[0]), *row[1:]] for row in rows]
    write(tmp_path, rows, [])
    numbered = replace(OPTIONS.persons, persons=stated)  # type: ignore[type-var]
    found = whole(tmp_path, replace(OPTIONS, persons=numbered))
    assert found.x[:, 0, WINDOW, 1].tolist() == np.repeat([1, 2, 3, 4], 5).tolist()
    rows[3][0] = "eve" if stated != 4 else 4
    write(tmp_path, rows, [])
    with pytest.raises(
        DataCorrupt, match=r"column 'id', record 3: .* is not (one of|a whole number from 0, below) data"
    ):
        whole(tmp_path, replace(OPTIONS, persons=numbered))
    lenient = whole(tmp_path, replace(SITE, persons=numbered))
    assert lenient.x[4, 0, WINDOW, 1] == 1


def test_to_predict_takes_no_next_time_point(tmp_path: Path) -> None:
    write(tmp_path, table())
    found = read_inputs(OPTIONS, tmp_path / "train.csv")
    assert found.shape == (len(NAMES) * DAYS, 1, WINDOW + 1, 2)
    assert found.any(axis=(1, 2, 3)).reshape(len(NAMES), DAYS).tolist() == [[False] * 2 + [True] * 6] * len(
        NAMES
    )


# ------------------------------------------------------------------------------------------ mistakes


def broken(place: int, column: int, cell: Any) -> Callable[[list[Row]], list[Row]]:
    def change(rows: list[Row]) -> list[Row]:
        rows[place][column] = cell
        return rows

    return change


@pytest.mark.parametrize(
    ("change", "friends", "says"),
    [
        (broken(5, 0, None), FRIENDS, "column 'id', record 5: the person is missing"),
        (
            broken(6, 1, "soon"),
            FRIENDS,
            "column 'date', record 6: 'soon' is no time; expected a number, or a date",
        ),
        (broken(6, 1, None), FRIENDS, "record 6: None is no time"),
        (broken(6, 1, "2024-01-01"), FRIENDS, "record 6: its person has a record at '2024-01-01' already"),
        (broken(6, 2, "many"), FRIENDS, "column 'steps', record 6: 'many' is not a finite number"),
        (lambda rows: rows[::DAYS], FRIENDS, "nobody has 4 records with 'steps', as data.window = 3 needs"),
        (list, [("ann", "ann")], "record 0: 'ann' and 'ann', expected two different persons"),
        (list, [("ann", "bob"), ("ann", None)], "record 1: 'ann' and None"),
    ],
)
def test_what_is_wrong_in_a_table_is_named_where_it_is_checked(
    change: Callable[[list[Row]], list[Row]], friends: list[tuple[Any, Any]], says: str, tmp_path: Path
) -> None:
    rows = change(table())
    write(tmp_path, rows, friends)
    with pytest.raises(DataCorrupt, match=says):
        read_folder(replace(OPTIONS, path=tmp_path))
    with pytest.raises(DataCorrupt, match=says):
        at_site(build({"data": {**DATA, "path": "/at-site"}}), path=tmp_path, client=0, strict=True)
    assert len(whole(tmp_path, SITE)) == len(rows)  # and a deployed site answers


def test_what_is_wrong_in_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match=r"expected train\.csv or train\.parquet, found nothing"):
        read_folder(replace(OPTIONS, path=tmp_path))
    write(tmp_path, table())
    for key in ("person", "time", "rises", "influence"):
        stated = replace(OPTIONS.persons, **{key: "absent"})  # type: ignore[type-var]
        with pytest.raises(ConfigError, match=rf"data\.{key} = 'absent': train\.csv has no such column"):
            read_folder(replace(OPTIONS, path=tmp_path, persons=stated))
    (tmp_path / "friends.csv").write_text("a,b,c\n1,2,3\n")
    with pytest.raises(DataCorrupt, match="expected two columns, a person and a friend; found: a, b, c"):
        read_folder(replace(OPTIONS, path=tmp_path))
    (tmp_path / "friends.csv").unlink()
    with pytest.raises(DataMissing, match=r"data\.friends = 'friends\.csv': no such file"):
        read_folder(replace(OPTIONS, path=tmp_path))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"time": None}, "data.time is missing: a table of persons over time needs"),
        ({"person": None}, "data.person is missing"),
        ({"rises": None}, "data.rises is missing"),
        ({"label": "steps"}, "data.label is set: with data.person, the label is"),
        ({"classes": 2}, "data.classes is set"),
        ({"targets": "numbers"}, "data.targets is set"),
        ({"friends": None, "influence": "calls"}, "data.influence = 'calls': without data.friends"),
        ({"friends": "../friends.csv"}, "friends"),
        ({"friends": "friends.txt"}, "friends"),
        ({"window": 1}, "window"),
        ({"rises": "date"}, "expected three columns"),
        ({"rises": "mood"}, "data.rises = 'mood': expected a column of numbers, with data.bounds"),
        ({"influence": "mood"}, "data.influence = 'mood': expected a column of numbers"),
        ({"persons": ["a", "a"]}, "data.persons = .*: expected words that differ"),
    ],
)
def test_statements_that_make_no_sense_are_refused(changes: dict[str, Any], says: str) -> None:
    stated = {key: value for key, value in {**DATA, "path": "/x", **changes}.items() if value is not None}
    with pytest.raises(ConfigError, match=says):
        build({"data": stated})


def test_a_model_of_behaviour_says_what_a_folder_lacks() -> None:
    data = {"name": "folder", "path": "/x", "label": "y", "classes": 2, "bounds": [0.0, 1.0]}
    with pytest.raises(ConfigError, match=r"data\.person, data\.time and data\.rises are missing"):
        build(
            {
                "data": data,
                "model": {"name": "behaviour-linear"},
                "trainer": {"name": "dpa", "perturb": False},
            }
        )


# -------------------------------------------------------------------------------- at a deployed site


def test_a_deployed_site_reads_the_same_folder(tmp_path: Path) -> None:
    rows = table()
    write(tmp_path, rows)
    experiment = build({"data": {**DATA, "path": str(tmp_path)}, "clients": {"count": 2}})
    here = at_site(experiment, path=tmp_path, client=1)
    x, y = here.client(1)
    assert len(x) == len(rows)  # a line is a record, whatever it holds
    there = x.any(axis=(1, 2, 3))
    simulated = load(experiment.data)
    late = whole(tmp_path)
    assert np.array_equal(x[there], late.x)
    assert np.array_equal(y[there], late.y)
    assert set(map(bytes, x[there])) >= set(map(bytes, simulated.train.x))
    assert (
        y[~there].tolist() == (np.flatnonzero(~there) % 2).tolist()
    )  # of neither class more than of the other
    (tmp_path / "test.csv").write_bytes((tmp_path / "train.csv").read_bytes())
    assert len(at_site(experiment, path=tmp_path, client=1).dataset.test) == len(NAMES) * (DAYS - WINDOW)
    notes = at_server(experiment, path=tmp_path).notes
    assert any("ε is of a record, not of a person" in note for note in notes)


CELLS = st.one_of(
    st.none(),
    st.sampled_from([*NAMES, "far away", "nobody"]),
    st.sampled_from(
        ["2024-01-03", "2024-01-03T12:00", "9999-12-31T23:59-12:00", "soon", "nan", "inf", "1e400"]
    ),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=5).filter(lambda text: not set("\r\n") & set(text)),
)
NEIGHBOURS = (
    2 * (WINDOW + 1) + 2 * 2
)  # records that one line can change: where it was and is; two friends each


def changed(path: Path, row: Row, place: int) -> int:
    """Return how many of a site's records are others when one line is."""
    if not (path / "before").is_dir():  # the same in all examples
        (path / "before").mkdir()
        write(path / "before", table())
    before = whole(path / "before", SITE)
    write(path, [*table()[:place], row, *table()[place + 1 :]])
    after = whole(path, SITE)
    assert len(after) == len(before) == len(table())
    return int(((before.x != after.x).any(axis=(1, 2, 3)) | (before.y != after.y)).sum())


@given(row=st.lists(CELLS, min_size=4, max_size=4), place=st.integers(0, len(NAMES) * DAYS - 1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_line_holds_a_site_has_as_many_records_and_few_of_them_change(
    row: Row, place: int, tmp_path: Path
) -> None:
    assert changed(tmp_path, row, place) <= NEIGHBOURS


@pytest.mark.parametrize(
    "line", [b'"', b",,,,,,,,", b"", b"\xff\xfe", b"ann", b"," * 9_000, b"\x00,\x00,1,1"]
)
@pytest.mark.parametrize("place", [1, 9, 32])
def test_and_whatever_bytes(line: bytes, place: int, tmp_path: Path) -> None:
    write(tmp_path, table())
    before = whole(tmp_path, SITE)
    lines = (tmp_path / "train.csv").read_bytes().split(b"\n")
    lines[place] = line
    (tmp_path / "train.csv").write_bytes(b"\n".join(lines))
    after = whole(tmp_path, SITE)
    assert len(after) == len(before)
    assert int((before.x != after.x).any(axis=(1, 2, 3)).sum()) <= NEIGHBOURS


@given(
    rows=st.lists(st.lists(CELLS, min_size=4, max_size=4), min_size=1, max_size=12),
    window=st.integers(2, 100),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_table_is_read_and_has_a_record_for_each_line(
    rows: list[Row], window: int, tmp_path: Path
) -> None:
    """Also as test records, and where not one of them is whole."""
    write(tmp_path, rows, [(row[0], row[1]) for row in rows])
    content = {**DATA, "path": "/at-site", "window": window, "persons": 3}
    model, trainer = {"name": "dpah", "users": 3}, {"name": "dpa", "perturb": False}
    experiment = build({"data": content, "model": model, "trainer": trainer})
    (tmp_path / "test.csv").write_bytes((tmp_path / "train.csv").read_bytes())
    found = at_site(experiment, path=tmp_path, client=0)
    assert len(found.dataset.train) == len(rows)
    assert len(found.dataset.test) > 0


@pytest.mark.parametrize("column", ["id", "date", "steps"])
def test_and_whatever_a_parquet_cell_holds(column: str, tmp_path: Path) -> None:
    """Text that is not UTF-8, and a date beyond Python's, as they are stored."""
    rows = table()
    write(tmp_path, rows)
    ends = np.cumsum([0, *(len(str(row[0])) for row in rows)]).astype(np.int32)
    text = bytearray("".join(row[0] for row in rows).encode())
    days = np.array([int(row[1][-2:]) for row in rows], np.int32)
    steps = [Decimal(row[2]) for row in rows]
    seen = []
    for odd in (False, True):
        if odd and column == "id":
            text[:3] = b"\xff\xfe\xff"
        elif odd:
            days[0], steps[0] = (2**31 - 1, steps[0]) if column == "date" else (days[0], Decimal("9e37"))
        names = pa.Array.from_buffers(
            pa.utf8(), len(rows), [None, pa.py_buffer(ends), pa.py_buffer(bytes(text))]
        )
        columns = {
            "id": names,
            "date": pa.array(days).view(pa.date32()),
            "steps": pa.array(steps, pa.decimal128(38, 0)),
            "calls": [row[3] for row in rows],
        }
        (tmp_path / "train.csv").unlink(missing_ok=True)
        pq.write_table(pa.table(columns), tmp_path / "train.parquet")
        seen.append(whole(tmp_path, SITE).x)
    differ = (seen[0] != seen[1]).any(axis=(1, 2, 3))
    assert 0 < differ.sum() <= NEIGHBOURS


def test_the_server_learns_no_count_from_the_columns_that_it_names(tmp_path: Path) -> None:
    """As persons, it may name any column: how many windows there are tells how its values are spread."""
    write(tmp_path, table())

    def counts(options: FolderOptions) -> set[int]:
        options = replace(options, ignore=("id", "calls"), bounds={"steps": (0.0, 1000.0)})
        stated = [PersonColumns(column, "date", "steps", 5) for column in ("id", "calls")]
        return {len(whole(tmp_path, replace(options, persons=each))) for each in stated}

    assert counts(SITE) == {len(table())}
    assert len(counts(replace(SITE, every_line=False))) == 2  # a weaker reading is caught


def test_a_friend_counts_whether_or_not_there_are_lines_of_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one line would decide by how many all of their friends' records are divided."""
    rows = table()
    alone = [*rows[:-DAYS], ["dan", *rows[-1][1:]]]  # one line of dan's, who is ann's friend

    def moved() -> int:
        found = []
        for name in ("dan", "eve"):
            write(tmp_path, [*alone[:-1], [name, *alone[-1][1:]]], [("ann", "bob"), ("ann", "dan")])
            found.append(whole(tmp_path, SITE).x)
        return int((found[0] != found[1]).any(axis=(1, 2, 3)).sum())

    assert moved() <= 1
    weak = mutant(
        persons,
        (
            "        pair = [everybody.setdefault(name, len(everybody)) for name in (one, other)]\n",
            "        if one not in known or other not in known:\n            continue\n"
            "        pair = [everybody.setdefault(name, len(everybody)) for name in (one, other)]\n",
        ),
    )
    monkeypatch.setattr(folder, "lines", weak.lines)
    assert moved() > 1
