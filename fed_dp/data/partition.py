"""Dividing records among clients. Every partitioner is a pure function of its arguments.

Each returns one sorted index array per client. A request that cannot be met is a PartitionError
that says why; none loops until it happens to succeed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fed_dp.data.dataset import Integers
from fed_dp.errors import PartitionError
from fed_dp.seeds import Generator

Parts = list[Integers]


def iid(records: int, *, clients: int, rng: Generator) -> Parts:
    """Give every record to exactly one client, at random, in equal shares."""
    _enough(records, clients, 1)
    return [np.sort(part) for part in np.array_split(rng.permutation(records), clients)]


def fixed_fraction(records: int, *, clients: int, fraction: float, rng: Generator) -> Parts:
    """Let each client draw its own `fraction` of all records, without replacement.

    Clients are drawn independently, so they overlap (DSSGD, §6.4): a record that several clients
    hold pays the privacy cost of each. `overlap` tells how often.
    """
    size = round(records * fraction)
    if size < 1:
        raise PartitionError(
            f"data.partition.fraction = {fraction:g} of {records} records is less than one record per client"
        )
    return [np.sort(rng.choice(records, size, replace=False)) for _ in range(clients)]


def dirichlet(
    labels: Integers,
    *,
    clients: int,
    alpha: float,
    min_records: int,
    rng: Generator,
    tries: int = 20,
) -> Parts:
    """Divide each class by shares from a symmetric Dirichlet(alpha); small alpha: one-sided clients."""
    _enough(len(labels), clients, min_records)
    smallest = 0
    for _ in range(tries):
        owner = np.empty(len(labels), np.int64)
        for label in np.unique(labels):
            rows = rng.permutation(np.flatnonzero(labels == label))
            shares = np.cumsum(rng.dirichlet(np.full(clients, alpha)))
            owner[rows] = np.searchsorted(shares[:-1], (np.arange(len(rows)) + 0.5) / len(rows))
        counts = np.bincount(owner, minlength=clients)
        if counts.min() >= min_records:
            order = np.argsort(owner, kind="stable")
            return [np.sort(p) for p in np.split(order, np.cumsum(counts)[:-1])]
        smallest = max(smallest, int(counts.min()))
    raise PartitionError(
        f"data.partition.alpha = {alpha:g} over {clients} clients: in {tries} draws some client always had "
        f"fewer than min_records = {min_records} of {len(labels)} records (best: {smallest}); "
        "raise alpha, or lower clients.count or min_records"
    )


def shards(labels: Integers, *, clients: int, per_client: int, rng: Generator) -> Parts:
    """Sort by label, cut into clients · per_client shards, give each client `per_client` of them."""
    _enough(len(labels), clients, per_client)
    pieces = np.array_split(np.argsort(labels, kind="stable"), clients * per_client)
    order = rng.permutation(len(pieces))
    return [
        np.sort(np.concatenate([pieces[p] for p in order[i * per_client : (i + 1) * per_client]]))
        for i in range(clients)
    ]


def natural(owner: NDArray[Any] | None, *, clients: int) -> Parts:
    """Give each natural owner (writer, hospital, person) its records; owners in sorted order."""
    if owner is None:
        raise PartitionError("data.partition = 'natural': these records have no natural owner")
    keys, codes = np.unique(owner, return_inverse=True)
    if clients > len(keys):
        raise PartitionError(
            f"clients.count = {clients}: data.partition = 'natural' has only {len(keys)} owners"
        )
    order = np.argsort(codes, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(codes))[:-1])
    return [np.asarray(part, np.int64) for part in parts[:clients]]


def overlap(parts: Parts, records: int) -> int:
    """Return how many clients hold the record that most of them hold."""
    return int(np.bincount(np.concatenate(parts), minlength=records).max())


def _enough(records: int, clients: int, each: int) -> None:
    if records < clients * each:
        raise PartitionError(
            f"clients.count = {clients}: {records} records are too few for {each} or more each"
        )
