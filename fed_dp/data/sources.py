"""The known data sets: their files, their public constants, and how each is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from fed_dp.data import health
from fed_dp.data.dataset import DataSet, Floats, Integers, Records, divided, identity, standardised
from fed_dp.data.files import File, verified
from fed_dp.data.formats import (
    read_bytes,
    read_cifar,
    read_idx,
    read_mat,
    read_npz,
    read_table,
    read_tar,
)
from fed_dp.data.tables import Columns, every_nth
from fed_dp.errors import DataCorrupt

# Published means and standard deviations of the training images, on the scale 0..1.
MNIST_28 = standardised((0.1307,), (0.3081,))
MNIST_32 = standardised((0.1001,), (0.2752,))  # the same images in a frame of 32 × 32
SVHN = standardised((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))
CIFAR = standardised((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


@dataclass(frozen=True, slots=True)
class Source:
    """A data set that can be read: its folder under the data home, its files, its reader.

    `layouts` are alternative sets of files, the whole data set first; `fetch` gets the first.
    """

    folder: str
    layouts: tuple[tuple[File, ...], ...]
    read: Callable[[Path, tuple[File, ...]], DataSet]
    about: str
    owners: str | None = None  # what a natural client is

    def files(self, folder: Path) -> tuple[File, ...]:
        """Return the first layout that is there; where none is, the first, to be complained about."""
        there = (files for files in self.layouts if all((folder / f.name).is_file() for f in files))
        return next(there, self.layouts[0])


def _digits(_: Path, __: tuple[File, ...]) -> DataSet:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = (bunch.images.astype(np.float32) / 8 - 1)[:, None]  # pixels are 0..16
    labels = bunch.target.astype(np.int64)
    test = every_nth(len(labels), 5)
    return divided("digits", Records(images, labels), test, classes=10)


# ------------------------------------------------------------------------------------- MNIST

_MNIST_HOME = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_WRITERS_HOME = "https://raw.githubusercontent.com/facebookresearch/qmnist/master/"
_MNIST = tuple(
    File(name, digest, _MNIST_HOME + name)
    for name, digest in (
        (
            "train-images-idx3-ubyte.gz",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        (
            "train-labels-idx1-ubyte.gz",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        (
            "t10k-images-idx3-ubyte.gz",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        (
            "t10k-labels-idx1-ubyte.gz",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    )
)
_WRITERS = tuple(
    File(f"../mnist_writers/{name}", digest, _WRITERS_HOME + name)
    for name, digest in (
        (
            "qmnist-train-labels-idx2-int.gz",
            "2c05dc77f6b916b38e455e97ab129a42a444f3dbef09b278a366f82904e0dd9f",
        ),
        (
            "qmnist-test-labels-idx2-int.gz",
            "9fbcbe594c3766fdf4f0b15c5165dc0d1e57ac604e01422608bb72c906030d06",
        ),
    )
)


def _mnist_records(folder: Path, images: File, labels: File) -> Records:
    x, y = read_idx(verified(folder, images)), read_idx(verified(folder, labels))
    return Records(x[:, None].astype(np.uint8), y.astype(np.int64))


def _mnist(folder: Path, files: tuple[File, ...]) -> DataSet:
    train, test = _mnist_records(folder, *files[:2]), _mnist_records(folder, *files[2:4])
    return DataSet("mnist", train, test, 10, *MNIST_28)


def _mnist_32(folder: Path, files: tuple[File, ...]) -> DataSet:
    small = _mnist(folder, files)
    frame = ((0, 0), (0, 0), (2, 2), (2, 2))
    train, test = (Records(np.pad(r.x, frame).astype(np.uint8), r.y) for r in (small.train, small.test))
    return DataSet("mnist-32", train, test, 10, *MNIST_32)


def _mnist_writers(folder: Path, files: tuple[File, ...]) -> DataSet:
    plain = _mnist(folder, files)
    with_owners = []
    for records, file in zip((plain.train, plain.test), files[4:], strict=True):
        rows = read_idx(verified(folder, file))[: len(records)]
        if not np.array_equal(rows[:, 0], records.y):
            raise DataCorrupt(f"{folder / file.name}: its classes are not those of the MNIST labels")
        with_owners.append(Records(records.x, records.y, np.char.mod("%04d", rows[:, 2])))
    return DataSet("mnist-writers", with_owners[0], with_owners[1], 10, *MNIST_28)


# -------------------------------------------------------------------------------- SVHN, CIFAR

_SVHN_HOME = "http://ufldl.stanford.edu/housenumbers/"
_SVHN = tuple(
    File(name, digest, _SVHN_HOME + name)
    for name, digest in (
        ("train_32x32.mat", "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"),
        ("test_32x32.mat", "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"),
    )
)
_SVHN_SUBSET = (
    File("svhn_train_10000.npz", "d11dbaac27d1043b72434d2ec051c71f9b3e9bc7052caa83766d0beee2a9f9fc"),
    File("svhn_test_2000.npz", "14d89d517c949696654d7f84403c60bc874d6cea7b53695269ac560d5b445f79"),
)
_CIFAR = (
    File(
        "cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    ),
)
_CIFAR_SUBSET = (
    File("data_batch_1.bin.xz", "d5de7683d3f827a5b44cc75966e019999d0781c69e5bfecaa9de8f927fc9b821"),
    File("test_batch.bin.xz", "6f98fa4aa6bc45118bc106e07a8e07eb403609364ddaca1ee739d9127c68b291"),
)


def _svhn(folder: Path, files: tuple[File, ...]) -> DataSet:
    splits = [read_svhn(verified(folder, file)) for file in files]
    notes: tuple[str, ...] = ()
    if files == _SVHN_SUBSET:
        notes = ("a subset: 10,000 of 73,257 training and 2,000 of 26,032 test digits",)
    return DataSet("svhn", splits[0], splits[1], 10, *SVHN, notes=notes)


def read_svhn(path: Path) -> Records:
    """Read digits as `X` and `y` from npz (N,32,32,3), or from mat (32,32,3,N) where 0 is written 10."""
    if path.suffix == ".mat":
        x, y = read_mat(path, ("X", "y"))
        return Records(np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y.ravel().astype(np.int64) % 10)
    x, y = read_npz(path, ("X", "y"))
    return Records(np.ascontiguousarray(x.transpose(0, 3, 1, 2)), y.astype(np.int64))


def _cifar10(folder: Path, files: tuple[File, ...]) -> DataSet:
    paths = [verified(folder, file) for file in files]
    if files == _CIFAR_SUBSET:
        train, test = (read_cifar(read_bytes(path), where=str(path)) for path in paths)
        notes: tuple[str, ...] = ("a subset: 10,000 of 50,000 training images",)
    else:
        names = [f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)]
        *batches, last = read_tar(paths[0], (*names, "cifar-10-batches-bin/test_batch.bin"))
        train = read_cifar(b"".join(batches), where=str(paths[0]))
        test = read_cifar(last, where=str(paths[0]))
        notes = ()
    return DataSet("cifar10", Records(*train), Records(*test), 10, *CIFAR, notes=notes)


# ------------------------------------------------------------------------------------- tables

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


def _adult(folder: Path, files: tuple[File, ...]) -> DataSet:
    splits = [
        Records(ADULT_COLUMNS.encode(table, where=str(path)), rich)
        for path, table, rich in _people(folder, files)
    ]
    return DataSet("adult", splits[0], splits[1], 2, *identity())


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


def _adult_numbers(folder: Path, files: tuple[File, ...]) -> DataSet:
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
    return DataSet("adult-numbers", splits[0], splits[1], 2, *identity())


def _people(folder: Path, files: tuple[File, ...]) -> Iterator[tuple[Path, pd.DataFrame, Integers]]:
    """Yield each file with its table and who earns more than 50,000."""
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


_HOSPITALS = (
    ("cleveland", "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8"),
    ("hungarian", "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796"),
    ("switzerland", "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314"),
    ("va", "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f"),
)
_HEART = tuple(
    File(f"processed.{name}.data", digest, f"{_UCI}heart-disease/processed.{name}.data")
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


def hospital_table(path: Path) -> pd.DataFrame:
    """Read one hospital's file of the heart data."""
    table = read_table(path, header=None, names=list(_HEART_NAMES), na_values="?")
    # A cholesterol or blood pressure of 0 is not a measurement: it stands for "not taken".
    table[["chol", "trestbps"]] = table[["chol", "trestbps"]].replace(0, np.nan)
    return table


def _heart(folder: Path, files: tuple[File, ...]) -> DataSet:
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


_LIFESNAPS = (
    File(
        "daily_fitbit_sema_df_unprocessed.csv",
        "679a29a08598ad37ae5970f9a9d108802bed9cb6cac1a13747aa8e821da160ad",
    ),
)
LIFESNAPS_COLUMNS = Columns(
    bounds={
        "steps": (0, 30_000),
        "steps_before": (0, 30_000),
        "distance": (0, 25_000),
        "calories": (0, 6_000),
        "lightly_active_minutes": (0, 600),
        "moderately_active_minutes": (0, 200),
        "very_active_minutes": (0, 300),
        "sedentary_minutes": (0, 1_440),
        "resting_hr": (40, 100),
        "minutesAsleep": (0, 900),
        "stress_score": (0, 100),
    },
    categories={"gender": ("MALE", "FEMALE"), "weekday": tuple("0123456")},
    gaps=True,
)


def _days_with_steps(folder: Path, files: tuple[File, ...]) -> tuple[pd.DataFrame, Floats]:
    """Return the person-days that have steps, by person and date, and their inputs."""
    path = verified(folder, files[0])
    table = read_table(path, low_memory=False)
    table["date"] = pd.to_datetime(table["date"])
    table = table[table["steps"].notna()].sort_values(["id", "date"], ignore_index=True)
    table["steps_before"] = table.groupby("id")["steps"].shift(1)
    table["weekday"] = table["date"].dt.day_of_week.astype(str)
    return table, LIFESNAPS_COLUMNS.encode(table, where=str(path))


def _lifesnaps_windows(folder: Path, files: tuple[File, ...]) -> DataSet:
    """Read each person's days with steps in windows of four, as records of behaviour, without friends."""
    table, x = _days_with_steps(folder, files)
    rows, labels, owners, late = [], [], [], []
    for person, days in table.groupby("id"):
        if len(days) < health.WINDOW + 1:
            continue
        steps = days["steps"].to_numpy(np.float64)[None]
        inputs = x[days.index.to_numpy()].astype(np.float64)[None]
        width = np.tile([-1.0, 1.0], (inputs.shape[2], 1))
        [(own, rises, now)] = health.windows(inputs, np.zeros_like(steps), steps, width)
        rows.append(own)
        labels.append(rises)
        owners.append(np.full(len(now), str(person)))
        late.append(now >= 0.8 * len(days))
    records, y, owner = np.concatenate(rows), np.concatenate(labels), np.concatenate(owners)
    test = np.concatenate(late)
    return divided(
        "lifesnaps-windows",
        Records(records, y, owner),
        test,
        classes=2,
        notes=(
            "label: the next recorded day has more steps than this one",
            f"people with fewer than {health.WINDOW + 1} days of steps are left out",
            "it has no friends: their influence is 0 throughout",
            health.NOTES[0],
        ),
    )


def _lifesnaps(folder: Path, files: tuple[File, ...]) -> DataSet:
    """Read person-days with steps. Label: the person's next day with steps has more of them.

    The last fifth of each person's days is the test set, so no one is tested on their past.
    """
    table, x = _days_with_steps(folder, files)
    people = table.groupby("id")
    following = people["steps"].shift(-1)
    table["rises"] = following > table["steps"]
    table["position"] = people.cumcount() / people["id"].transform("size")
    there = following.notna().to_numpy()
    table, x = table[there], x[there]
    y, owner = table["rises"].to_numpy(np.int64), table["id"].to_numpy(np.str_)
    test = table["position"].to_numpy() >= 0.8
    return divided(
        "lifesnaps",
        Records(x, y, owner),
        test,
        classes=2,
        notes=(
            "label: the next recorded day has more steps than this one",
            "people with a single day of steps have no next day and are left out",
        ),
    )


SOURCES: dict[str, Source] = {
    "digits": Source("", ((),), _digits, "8×8 digits, embedded in scikit-learn"),
    "mnist": Source("mnist", (_MNIST,), _mnist, "MNIST, 28×28"),
    "mnist-32": Source("mnist", (_MNIST,), _mnist_32, "MNIST in a 32×32 frame (DSSGD's paper)"),
    "mnist-writers": Source(
        "mnist",
        ((*_MNIST, *_WRITERS),),
        _mnist_writers,
        "MNIST, 28×28, with each digit's writer",
        "writers",
    ),
    "svhn": Source("svhn", (_SVHN, _SVHN_SUBSET), _svhn, "street view house numbers, 32×32×3"),
    "cifar10": Source("cifar10", (_CIFAR, _CIFAR_SUBSET), _cifar10, "CIFAR-10, 32×32×3"),
    "adult": Source("adult", (_ADULT,), _adult, "census income (UCI Adult), 14 attributes"),
    "adult-numbers": Source("adult", (_ADULT,), _adult_numbers, "the same, each attribute one number"),
    "heart": Source("uci_heart", (_HEART,), _heart, "heart disease (UCI), four hospitals", "hospitals"),
    "lifesnaps": Source("lifesnaps", (_LIFESNAPS,), _lifesnaps, "daily activity of 71 people", "people"),
    "lifesnaps-windows": Source(
        "lifesnaps", (_LIFESNAPS,), _lifesnaps_windows, "the same in windows of four days", "people"
    ),
    "health-daily": Source(
        "",
        ((),),
        lambda *_: health.health_network(weekly=False),
        "health social network of 254 people, 300 days, generated",
        "people",
    ),
    "health-weekly": Source(
        "",
        ((),),
        lambda *_: health.health_network(weekly=True),
        "the same by 48 weeks, generated",
        "people",
    ),
}
