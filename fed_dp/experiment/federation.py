"""The federation of an experiment: its data set, and which records each client holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fed_dp import data, seeds
from fed_dp.data import partition
from fed_dp.data.dataset import DataSet, Floats, Integers
from fed_dp.errors import RunError
from fed_dp.experiment.schema import Data, Dirichlet, Experiment, FixedFraction, Natural, Shards

_LOADED: dict[str, DataSet] = {}  # one process reads a data set once


@dataclass(frozen=True, slots=True)
class Federation:
    """The records of every client, and how many clients hold the most widely held record."""

    dataset: DataSet
    parts: tuple[Integers, ...]
    sites_per_record: int
    notes: tuple[str, ...] = ()

    def rows(self, index: int) -> Integers:
        """Return which training records one client holds."""
        if not 0 <= index < len(self.parts):
            raise RunError(f"partition-id = {index}: the experiment has clients 0..{len(self.parts) - 1}")
        return self.parts[index]

    def client(self, index: int) -> tuple[Floats, Integers]:
        """Return the inputs and labels that one client holds."""
        rows, records = self.rows(index), self.dataset.train
        return self.dataset.inputs(records, rows), records.y[rows]


def federation(experiment: Experiment) -> Federation:
    """Read the data set and divide its training records as the experiment says."""
    dataset = load(experiment.data)
    parts = _divide(experiment, dataset)
    widest = partition.overlap(parts, len(dataset.train))
    if experiment.strategy.name == "centralised":
        parts, widest = [np.unique(np.concatenate(parts))], 1
    return Federation(dataset, tuple(parts), widest, (*dataset.notes, *_left_out(experiment, dataset)))


def _left_out(experiment: Experiment, dataset: DataSet) -> list[str]:
    owner, clients = dataset.train.owner, experiment.clients.count
    if not isinstance(experiment.data.partition, Natural) or owner is None:
        return []
    there = len(np.unique(owner))
    return [f"{clients} of {there} natural clients take part"] if clients < there else []


def load(section: Data) -> DataSet:
    """Read a data set, once per process."""
    key = _key(section)
    if key not in _LOADED:
        _LOADED.clear()  # at most one in memory
        _LOADED[key] = _read(section)
    return _LOADED[key]


def adopt(section: Data, dataset: DataSet) -> None:
    """Use a data set that another process has read (Ray shares its arrays without a copy)."""
    _LOADED.clear()
    _LOADED[_key(section)] = dataset


def _key(section: Data) -> str:
    return section.model_dump_json(exclude={"partition"})


def _read(section: Data) -> DataSet:
    path = None if section.path is None else Path(section.path)
    if section.name != "folder":
        found = data.read(section.name, path)
        return found if section.influence else data.without_influence(found)
    assert path is not None  # these three by schema
    assert section.bounds is not None
    assert section.classes is not None
    return data.read_folder(
        data.FolderOptions(
            path,
            section.bounds,
            section.classes,
            section.label,
            section.client,
            section.categories,
            section.test_fraction,
        )
    )


def _divide(experiment: Experiment, dataset: DataSet) -> list[Integers]:
    how, clients, train = experiment.data.partition, experiment.clients.count, dataset.train
    rng = seeds.generator(experiment.seed, "partition")
    match how:
        case FixedFraction():
            return partition.fixed_fraction(len(train), clients=clients, fraction=how.fraction, rng=rng)
        case Dirichlet():
            return partition.dirichlet(
                train.y, clients=clients, alpha=how.alpha, min_records=how.min_records, rng=rng
            )
        case Shards():
            return partition.shards(train.y, clients=clients, per_client=how.per_client, rng=rng)
        case Natural():
            return partition.natural(train.owner, clients=clients)
        case _:
            return partition.iid(len(train), clients=clients, rng=rng)
