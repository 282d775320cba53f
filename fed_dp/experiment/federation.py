"""The federation of an experiment: its data set, and which records each client holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fed_dp import data, seeds
from fed_dp.data import partition
from fed_dp.data.dataset import DataSet, Floats, Integers
from fed_dp.data.options import Data
from fed_dp.data.sets.own_folder import OwnFolder
from fed_dp.errors import ConfigError, DataCorrupt, PartitionError, RunError
from fed_dp.experiment.schema import Experiment
from fed_dp.kept import Kept
from fed_dp.tasks import TARGET_WORDS

MAX_HELD = 700_000_000  # bytes of clients' inputs that a process keeps
_LOADED: dict[str, DataSet] = {}  # one process reads a data set once …
_DIVIDED: dict[str, Federation] = {}  # … and divides it once for each experiment
_LEFT_OUT: dict[str, Integers] = {}  # records that no client has, though they were dealt out


@dataclass(frozen=True, slots=True)
class Federation:
    """The records of every client, and how many clients hold the most widely held record."""

    dataset: DataSet
    parts: tuple[Integers, ...]
    sites_per_record: int
    notes: tuple[str, ...] = ()
    set_aside: Integers | None = None  # training records that are public, and nobody's
    has_digits: bool = False  # scikit-learn's digits are public beside them
    tested: bool = True  # whether there are test records: at a real site, only those it put aside itself
    _held: Kept[tuple[Floats, Integers]] = field(default_factory=lambda: Kept(MAX_HELD), repr=False)

    @property
    def public(self) -> tuple[Floats, Integers] | None:
        """Inputs and labels that everybody may look at: records set aside, or those of another data set."""
        if self.set_aside is not None:
            train = self.dataset.train
            return self.dataset.inputs(train, self.set_aside), train.y[self.set_aside]
        return data.public_digits(self.dataset) if self.has_digits else None

    def rows(self, index: int) -> Integers:
        """Return which training records one client holds."""
        if not 0 <= index < len(self.parts):
            raise RunError(f"partition-id = {index}: the experiment has clients 0..{len(self.parts) - 1}")
        return self.parts[index]

    def client(self, index: int) -> tuple[Floats, Integers]:
        """Return the inputs and labels that one client holds; the same arrays again while there is room."""
        if (held := self._held.get(index)) is None:
            rows, records = self.rows(index), self.dataset.train
            held = self.dataset.inputs(records, rows), records.y[rows]
            self._held.put(index, held, held[0].nbytes)
        return held


def make_federation(experiment: Experiment) -> Federation:
    """Read the data set and divide its training records as the experiment says; once for each experiment."""
    key = f"{experiment.data.key} {experiment.digest}"
    if key not in _DIVIDED:
        _DIVIDED.clear()  # at most one in memory
        _DIVIDED[key] = _divided(experiment)
    return _DIVIDED[key]


def _divided(experiment: Experiment) -> Federation:
    whole, section, strategy = load(experiment.data), experiment.data, experiment.strategy
    rest, aside = np.arange(len(whole.train)), None
    if section.public_records:
        aside = _public_rows(section.public_records, experiment.seed, len(rest))
        rest = np.setdiff1d(rest, aside)
    dataset, rest = _folded(experiment, whole, rest)
    parts = [rest[part] for part in _divide(experiment, dataset, rest)]
    if (out := _LEFT_OUT.get(section.key)) is not None:
        parts = [np.setdiff1d(part, out) for part in parts]
    widest = partition.overlap(parts, len(dataset.train))
    if strategy.pooled:
        parts, widest = [strategy.pooled_records(parts, aside)], 1
    notes = (*dataset.notes, *_told(section), *_left_out(experiment, dataset))
    return Federation(dataset, tuple(parts), widest, notes, aside, section.public_data == "digits")


def at_site(experiment: Experiment, *, path: Path, client: int, strict: bool = False) -> Federation:
    """Read a real site's own folder; the experiment says what its columns mean. Others are unknown.

    All records of train.* are trained on. Which are for tests is the site's own choice: a server that could
    choose would be told scores of whatever it likes. Nothing that stands in a record is an error, unless
    `strict`: the server says what the columns mean, and would learn from an error which values occur.
    """
    options = replace(_own_folder(experiment, path), lenient=not strict, every_line=True)
    train = data.read_part("train", options)
    if strict and (lines := len(data.read_part("train", replace(options, lenient=True)))) != len(train):
        raise DataCorrupt(
            f"{path}: {len(train)} training records on {lines} lines; a deployed site takes each line for "
            "one record: expected no blank lines, and no line breaks within quotes"
        )
    tested = data.has_part("test", options)
    test = data.read_part("test", options) if tested else train  # which are never scored
    dataset = options.dataset(train, test)
    nobody = np.arange(0)
    rows = [nobody] * experiment.clients.count
    if not 0 <= client < len(rows):
        raise RunError(f"client = {client}: the experiment has clients 0..{len(rows) - 1}")
    rows[client] = np.arange(len(dataset.train))
    return Federation(dataset, tuple(rows), 1, tested=tested)


def at_server(experiment: Experiment, *, path: Path) -> Federation:
    """Read a real server's own folder: test records and, where the experiment wants any, public ones.

    It holds no record of a site, so there are no parts.
    """
    options = _own_folder(experiment, path)
    test, wanted = data.read_part("test", options), experiment.data.public_records
    known, aside = test, None
    if wanted:
        known, aside = data.read_part("public", options), np.arange(wanted)
        if len(known) < wanted:
            raise PartitionError(f"data.public_records = {wanted}: {path} holds {len(known)} public records")
    dataset = options.dataset(known, test)
    notes = ["every site reads its own records; the server has test records alone", *dataset.notes]
    notes += [f"{wanted} public records are the server's"] if wanted else []
    return Federation(dataset, (), 1, tuple(notes), aside, experiment.data.public_data == "digits")


def _own_folder(experiment: Experiment, path: Path) -> data.FolderOptions:
    section = experiment.data
    if not isinstance(section, OwnFolder):
        raise ConfigError(
            f"data.name = {section.name!r}: real sites have folders of their own; expected 'folder', "
            "with what its columns mean"
        )
    return section.folder_options(path)


def _told(section: Data) -> Iterator[str]:
    """Yield what must be known about public records and folds."""
    if section.public_data == "digits":
        yield "public records: scikit-learn's digits, enlarged"
    if section.public_records:
        yield (
            f"{section.public_records} training records are set aside and taken to be public: no ε protects "
            "them"
        )
    if section.folds is not None:
        yield (
            f"fold {section.fold} of {section.folds} stands for the test records: over all folds every "
            "record is tested on, without noise, and no ε covers several runs together"
        )


def _public_rows(count: int, seed: int, records: int) -> Integers:
    if count >= records:
        raise PartitionError(f"data.public_records = {count}: there are only {records} training records")
    return np.sort(seeds.generator(seed, "public records").choice(records, count, replace=False))


def _folded(experiment: Experiment, dataset: DataSet, rest: Integers) -> tuple[DataSet, Integers]:
    """Put one fold of the training records in the place of the test records, for cross-validation."""
    folds = experiment.data.folds
    if folds is None:
        return dataset, rest
    if folds > len(rest):
        raise PartitionError(f"data.folds = {folds}: there are only {len(rest)} training records")
    shuffled = seeds.generator(experiment.seed, "folds").permutation(rest)
    out = np.sort(np.array_split(shuffled, folds)[experiment.data.fold])
    return replace(dataset, test=dataset.train.part(out)), np.setdiff1d(rest, out)


def _left_out(experiment: Experiment, dataset: DataSet) -> list[str]:
    owner, clients = dataset.train.owner, experiment.clients.count
    if not experiment.data.partition.natural or owner is None:
        return []
    there = len(np.unique(owner))
    return [f"{clients} of {there} natural clients take part"] if clients < there else []


def load(section: Data) -> DataSet:
    """Read a data set, once per process."""
    if section.key not in _LOADED:
        _LOADED.clear()  # at most one in memory
        _DIVIDED.clear()
        _LOADED[section.key] = section.read()
    return _LOADED[section.key]


def adopt(section: Data, dataset: DataSet, *, without: Integers | None = None) -> None:
    """Use a data set that another process has read (Ray shares its arrays without a copy).

    Records `without` are left out after all are dealt out, so that everybody else's stay where they are.
    """
    forget()
    _LOADED[section.key] = dataset
    if without is not None:
        _LEFT_OUT[section.key] = without


def forget() -> None:
    """Forget what was read and divided."""
    for kept in (_LOADED, _LEFT_OUT, _DIVIDED):
        kept.clear()


def _divide(experiment: Experiment, dataset: DataSet, rest: Integers) -> list[Integers]:
    """Divide the records `rest`; the parts are places in it."""
    train, partition = dataset.train, experiment.data.partition
    if partition.by_class and dataset.targets != "class":
        raise PartitionError(
            f"data.partition = {partition.name!r} deals out classes; {dataset.name} has "
            f"{TARGET_WORDS[dataset.targets]}; allowed: iid, fraction, natural"
        )
    labels, owner = train.y[rest], None if train.owner is None else train.owner[rest]
    rng = seeds.generator(experiment.seed, "partition")
    return partition.divide(labels, owner, clients=experiment.clients.count, rng=rng)
