"""Records of the user's own: arrays, tables, torch data sets, images, and what is proposed for a folder."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

import fed_dp
from fed_dp.data import read_folder
from fed_dp.data.describe import describe
from fed_dp.data.folder import FolderOptions
from fed_dp.errors import ConfigError, DataCorrupt, DataMissing, FedDpError
from fed_dp.experiment import build
from fed_dp.experiment.federation import load, make_federation

X = np.random.default_rng(0).normal(size=(30, 4))
Y = np.arange(30) % 3
TABLE = pd.DataFrame(
    {
        "age": [20.0, 40.0, 60.0, 80.0] * 3,
        "sex": ["f", "m", "m", "f"] * 3,
        "hospital": ["a", "b", "c", "a"] * 3,
        "admitted": pd.to_datetime(["2024-01-02"] * 12),
        "ill": ["no", "yes"] * 6,
        "stay": np.linspace(0, 11, 12),
    }
)
STATED: dict[str, Any] = {"bounds": {"age": (0.0, 100.0)}, "categories": {"sex": ("f", "m")}}


def test_arrays_are_taken_as_they_are_and_every_fifth_record_is_held_out() -> None:
    data = load(fed_dp.Data.from_arrays(X, Y))
    assert (len(data.train), len(data.test), data.classes) == (24, 6, 3)
    assert np.array_equal(data.inputs(data.test), X[4::5].astype(np.float32))
    assert any("held out" in note for note in data.notes)


def test_owners_become_clients(tmp_path: Path) -> None:
    section = fed_dp.Data.from_arrays(X, Y, client=[f"hospital {k % 5}" for k in range(30)], test=(X, Y))
    assert section.clients == 5
    run = fed_dp.simulate(data=section, model="linear", rounds=1, engine="in-process", runs=tmp_path)
    assert run.experiment.clients.count == 5
    assert {len(part) for part in make_federation(run.experiment).parts} == {6}


@pytest.mark.parametrize(
    ("y", "targets", "classes"),
    [
        (Y, "class", 3),
        (Y.astype(str), "class", 3),
        (Y > 1, "class", 2),
        (np.eye(3, dtype=int)[Y], "labels", 3),
        (X[:, :2], "numbers", 2),
        (X[:, 0], "numbers", 1),
    ],
)
def test_what_targets_are_follows_from_their_kind(y: Any, targets: str, classes: int) -> None:
    data = load(fed_dp.Data.from_arrays(X, y))
    assert (data.targets, data.classes) == (targets, classes)


def test_bytes_are_scaled() -> None:
    images = (np.arange(30 * 4) % 256).astype(np.uint8).reshape(30, 1, 2, 2)
    data = load(fed_dp.Data.from_arrays(images, Y))
    assert data.inputs(data.test).max() <= 1
    assert data.train.x.dtype == np.uint8


class Uneven(Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, place: int) -> Any:
        return torch.zeros(2 + (place == 2)), place


class Raising(Uneven):
    def __getitem__(self, place: int) -> Any:
        raise OSError("disk gone")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fed_dp.Data.from_arrays(X[:, 0], Y), r"x has shape \(30,\): expected a row for each record"),
        (lambda: fed_dp.Data.from_arrays([[1], [1, 2]], [0, 1]), "x: expected numbers, .*of the same shape"),
        (lambda: fed_dp.Data.from_arrays(X.astype(str), Y), "x holds .*: expected numbers"),
        (lambda: fed_dp.Data.from_arrays(X, Y[:-1]), "differ in length"),
        (lambda: fed_dp.Data.from_arrays(X, Y, client=["a"]), "owners differ in length"),
        (lambda: fed_dp.Data.from_arrays(X, Y, classes=2), r"labels lie in 0..2, expected 0..1"),
        (
            lambda: fed_dp.Data.from_arrays(X, Y.astype(str), classes=["0", "1"]),
            "label '2' is not one of 0, 1",
        ),
        (lambda: fed_dp.Data.from_arrays(X, Y, test=1.5), "test = 1.5 of 30 records"),
        (lambda: fed_dp.Data.from_arrays(X, Y, test=(X,)), r"test: expected \(x, y\) or a share"),
        (lambda: fed_dp.Data.from_arrays(X, Y, test=(X[:, :2], Y)), r"test inputs \(2,\)"),
        (lambda: fed_dp.Data.from_arrays(np.full((30, 2), np.nan), Y), "NaN or infinity"),
        (lambda: fed_dp.Data.from_arrays(X, np.full(30, np.nan)), "targets hold NaN"),
        (
            lambda: fed_dp.Data.from_dataset(Uneven()),
            r"item 2 has inputs of shape \(3,\), item 0 of shape \(2,\)",
        ),
        (
            lambda: fed_dp.Data.from_dataset(TensorDataset(torch.zeros(3, 2))),
            r"item 0 .*expected \(inputs, target\)",
        ),
        (lambda: fed_dp.Data.from_dataset(Raising()), "item 0 cannot be read: OSError: disk gone"),
        (lambda: fed_dp.Data.from_dataset([]), "has no items"),
        (lambda: fed_dp.Data.from_arrays(X, Y, partitoin="iid"), "partitoin"),
    ],
)
def test_wrong_arrays_are_refused_in_one_line(make: Any, says: str) -> None:
    with pytest.raises(FedDpError, match=says) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_a_table_is_read_by_what_is_stated() -> None:
    ill = fed_dp.Data.from_frame(TABLE, label="ill", client="hospital", ignore=("admitted", "stay"), **STATED)
    data = load(ill)
    assert data.shape == (3,)  # age, and two sexes
    assert ill.clients == 3
    stay = fed_dp.Data.from_frame(TABLE, label="stay", ignore=("admitted", "ill", "hospital"), **STATED)
    assert load(stay).targets == "numbers"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"label": "dead"}, "the table has no column 'dead'; found: age, sex"),
        ({"label": "ill"}, "column 'hospital': expected in bounds .* or categories"),
        (
            {"label": "ill", "client": "hospital", "ignore": ("stay",)},
            "column 'admitted': dates are no inputs",
        ),
        (
            {"label": "ill", "client": "hospital", "ignore": ("stay", "admitted"), "bounds": {"age": (9, 1)}},
            "low < high",
        ),
    ],
)
def test_a_table_that_is_not_stated_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(FedDpError, match=says):
        fed_dp.Data.from_frame(TABLE, **{**STATED, **options})


def test_records_in_memory_are_not_there_in_another_program() -> None:
    table = build({"data": {"name": "arrays", "sha256": "0" * 64}}).data
    with pytest.raises(DataMissing, match="were in the memory of the program that began the run"):
        load(table)


def loaded(rows: int = 30) -> fed_dp.Data:
    return fed_dp.Data.from_arrays(X[:rows], Y[:rows])


def broken() -> int:
    return 3


def test_a_loader_is_named_in_toml(tmp_path: Path) -> None:
    given = build({"data": {"loader": "tests.data.test_own_data:loaded", "options": {"rows": 20}}})
    assert len(load(given.data).train) == 16
    for loader, options, says in (
        ("broken", {}, "returned int: expected fed_dp.Data.from_arrays"),
        ("loaded", {"columns": 3}, "failed: TypeError"),
        ("X", {}, "expected a function"),
        ("nothing", {}, "has no 'nothing'"),
    ):
        section = build({"data": {"loader": f"tests.data.test_own_data:{loader}", "options": options}}).data
        with pytest.raises(FedDpError, match=says):
            section.read()


# ------------------------------------------------------------------------------------- folders


def test_a_folder_may_hold_labels_or_numbers(tmp_path: Path) -> None:
    TABLE.drop(columns=["admitted"]).assign(tired=[0, 1] * 6).to_csv(tmp_path / "train.csv", index=False)
    common: dict[str, Any] = {"bounds": {"age": (0.0, 100.0)}, "categories": {"sex": ("f", "m")}}
    numbers = FolderOptions(
        tmp_path, outputs=("stay",), targets="numbers", ignore=("hospital", "ill", "tired"), **common
    )
    assert read_folder(numbers).targets == "numbers"
    labels = FolderOptions(
        tmp_path, outputs=("ill",), targets="labels", ignore=("hospital", "stay", "tired"), **common
    )
    with pytest.raises(DataCorrupt, match=r"target 'ill' of record 0 is 'no', expected 0 or 1"):
        read_folder(labels)
    data: dict[str, Any] = {"name": "folder", "path": str(tmp_path)}
    data |= {"targets": "numbers", "outputs": ["stay"]}
    data |= {"ignore": ["hospital", "ill", "tired"], "bounds": {"age": [0.0, 100.0]}}
    data |= {"categories": {"sex": ["f", "m"]}}
    task = {"name": "regression", "bounds": [0.0, 12.0]}
    experiment = build({"data": data, "task": task, "model": {"name": "linear"}, "clients": {"count": 2}})
    run = fed_dp.simulate(experiment, rounds=1, engine="in-process", runs=tmp_path / "runs")
    assert "rmse" in run.scores


def test_a_column_of_dates_is_refused_with_advice(tmp_path: Path) -> None:
    table = TABLE.drop(columns=["hospital", "stay", "sex"]).assign(admitted="2024-01-02")
    table.to_csv(tmp_path / "train.csv", index=False)
    bounds = {"age": (0.0, 100.0), "admitted": (0.0, 1.0)}
    with pytest.raises(
        DataCorrupt, match="record 0: '2024-01-02' is not a finite number; dates are no inputs"
    ):
        read_folder(FolderOptions(tmp_path, bounds, ("no", "yes"), "ill"))
    found = read_folder(
        FolderOptions(tmp_path, {"age": (0.0, 100.0)}, ("no", "yes"), "ill", ignore=("admitted",))
    )
    assert found.shape == (1,)


def test_an_npz_file_may_say_whose_each_record_is(tmp_path: Path) -> None:
    owner = np.array(["a", "b"] * 15)
    np.savez(tmp_path / "train.npz", X=X, y=Y, owner=owner)
    found = read_folder(FolderOptions(tmp_path, (-5.0, 5.0), 3))
    assert found.train.owner is not None
    assert set(found.train.owner) == {"a", "b"}
    np.savez(tmp_path / "train.npz", X=X, y=Y, owner=owner[:3])
    with pytest.raises(DataCorrupt, match=r"owner has shape \(3,\), expected \(30,\)"):
        read_folder(FolderOptions(tmp_path, (-5.0, 5.0), 3))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"targets": "numbers"}, "data.outputs is missing"),
        ({"targets": "numbers", "outputs": ["a"], "classes": 2}, "data.classes: .* has outputs in its place"),
        ({"outputs": ["a"], "classes": 2}, "data.outputs: .* has classes in its place"),
        ({"targets": "labels", "outputs": ["a", "a"]}, "expected words that differ"),
        ({"targets": "ranks", "outputs": ["a"]}, "data.targets = 'ranks'"),
    ],
)
def test_a_folder_that_says_two_things_of_its_targets_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build({"data": {"name": "folder", "path": "/x", "bounds": [0.0, 1.0], **change}})


# -------------------------------------------------------------------------------------- images


def pictures(home: Path, *, clients: tuple[str, ...] = ("",), ending: str = "png", count: int = 5) -> Path:
    for client in clients:
        for code, name in enumerate(("cat", "dog")):
            folder = home / client / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.full((6 + number, 5, 3), 40 + 150 * code, np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.{ending}")
    return home


IMAGES: dict[str, Any] = {"name": "images", "classes": ["cat", "dog"], "size": [8, 8]}


@pytest.mark.parametrize("ending", ["png", "jpeg"])
def test_images_of_a_folder_for_each_class_are_brought_to_one_size(tmp_path: Path, ending: str) -> None:
    data = load(build({"data": {**IMAGES, "path": str(pictures(tmp_path, ending=ending))}}).data)
    assert data.shape == (3, 8, 8)
    assert (len(data.train), len(data.test)) == (8, 2)
    assert 0 <= data.inputs(data.train).min() < data.inputs(data.train).max() <= 1
    grey = load(build({"data": {**IMAGES, "path": str(tmp_path), "colour": False}}).data)
    assert grey.shape == (1, 8, 8)


def test_images_of_a_folder_for_each_client_are_its_own(tmp_path: Path) -> None:
    pictures(tmp_path, clients=("rome", "oslo"))
    data = {**IMAGES, "path": str(tmp_path), "by_client": True, "partition": "natural"}
    run = fed_dp.simulate(
        build({"data": data, "clients": {"count": 2}, "rounds": 2, "model": {"name": "linear"}}),
        engine="in-process", runs=tmp_path / "runs",
    )  # fmt: skip
    assert [len(part) for part in make_federation(run.experiment).parts] == [8, 8]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"classes": ["cow"]}, "no images .* in folders named cow"),
        ({"path": "/nowhere"}, "no such folder"),
        ({"size": None}, "data.size is missing"),
        ({"size": [0, 8]}, "data.size"),
    ],
)
def test_a_folder_without_such_images_is_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    table = {**IMAGES, "path": str(pictures(tmp_path)), **change}
    with pytest.raises(FedDpError, match=says):
        load(build({"data": {key: value for key, value in table.items() if value is not None}}).data)


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    pictures(tmp_path)
    (tmp_path / "cat" / "0.png").write_bytes(b"no picture")
    with pytest.raises(DataCorrupt, match=r"cat/0.png cannot be read as an image"):
        load(build({"data": {**IMAGES, "path": str(tmp_path)}}).data)


# ------------------------------------------------------------------------------------ describe


def test_a_section_is_proposed_for_a_table_and_bounds_are_left_to_be_stated(tmp_path: Path) -> None:
    TABLE.assign(name=[f"n{k}" for k in range(12)]).to_csv(tmp_path / "train.csv", index=False)
    text = describe(tmp_path)
    assert "has looked at the records" in text
    assert "= [LOW, HIGH]" in text
    with pytest.raises(tomllib.TOMLDecodeError):
        tomllib.loads(text)  # it must be completed
    completed = tomllib.loads(
        text.replace("[LOW, HIGH]", "[0.0, 100.0]").replace('label = "name"', 'label = "ill"')
    )
    assert set(completed["data"]["ignore"]) >= {"admitted"}
    assert completed["data"]["categories"]["sex"] == ["f", "m"]


def test_a_completed_section_is_an_experiment(tmp_path: Path) -> None:
    TABLE[["age", "sex", "ill"]].rename(columns={"ill": "label"}).to_csv(tmp_path / "train.csv", index=False)
    completed = tomllib.loads(describe(tmp_path).replace("[LOW, HIGH]", "[0.0, 120.0]"))
    assert load(build(completed).data).classes == 2


def test_persons_and_their_time_are_seen_where_no_column_is_called_a_label(tmp_path: Path) -> None:
    days = [f"2024-01-{day:02d}" for day in range(1, 7)]
    table = pd.DataFrame({"user_id": ["a"] * 6 + ["b"] * 6, "date": days * 2, "steps": [*range(12)]})
    table.to_csv(tmp_path / "train.csv", index=False)
    text = describe(tmp_path).replace("[LOW, HIGH]", "[0.0, 20.0]")
    completed = tomllib.loads(text)
    stated = {key: completed["data"][key] for key in ("person", "time", "rises", "window")}
    assert stated == {"person": "user_id", "time": "date", "rises": "steps", "window": 4}
    assert load(build(completed).data).shape == (1, 5, 1)
    for other in (table.assign(label=0), table.assign(date=days[0]), table.drop_duplicates("user_id")):
        other.to_csv(tmp_path / "train.csv", index=False)
        assert "person =" not in describe(tmp_path)


@pytest.mark.parametrize("kind", ["arrays", "images", "clients", "numbers"])
def test_a_section_is_proposed_for_arrays_and_images(kind: str, tmp_path: Path) -> None:
    if kind == "arrays":
        np.savez(tmp_path / "train.npz", X=X, y=Y)
    elif kind == "numbers":
        np.savez(tmp_path / "train.npz", X=X, y=X[:, :2])
    else:
        pictures(tmp_path, clients=("rome", "oslo") if kind == "clients" else ("",))
    completed = tomllib.loads(describe(tmp_path).replace("[LOW, HIGH]", "[-9.0, 9.0]"))
    data = load(build(completed).data)
    assert data.classes == (3 if kind == "arrays" else 2)
    assert (data.train.owner is not None) == (kind == "clients")


def test_a_folder_with_nothing_to_read_says_what_is_expected(tmp_path: Path) -> None:
    for folder, says in ((tmp_path, "expected train.csv"), (tmp_path / "absent", "no such folder")):
        with pytest.raises(DataMissing, match=says):
            describe(folder)
