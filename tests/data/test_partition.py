from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fed_dp import seeds
from fed_dp.data import partition
from fed_dp.errors import PartitionError


def rng(seed: int = 0) -> np.random.Generator:
    return seeds.generator(seed, "test")


def is_a_division(parts: list[np.ndarray], records: int) -> bool:
    return np.array_equal(np.sort(np.concatenate(parts)), np.arange(records))


@given(st.integers(1, 400), st.integers(1, 40), st.integers(0, 5))
def test_iid_gives_every_record_to_one_client_in_equal_shares(records: int, clients: int, seed: int) -> None:
    if records < clients:
        with pytest.raises(PartitionError, match=f"clients.count = {clients}"):
            partition.iid(records, clients=clients, rng=rng(seed))
        return
    parts = partition.iid(records, clients=clients, rng=rng(seed))
    assert is_a_division(parts, records)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(0, 5), st.sampled_from([0.3, 1.0, 10.0]))
@settings(deadline=None)
def test_dirichlet_divides_all_records(seed: int, alpha: float) -> None:
    labels = np.arange(2000) % 10
    parts = partition.dirichlet(labels, clients=8, alpha=alpha, min_records=5, rng=rng(seed))
    assert is_a_division(parts, 2000)
    assert min(map(len, parts)) >= 5


def test_small_alpha_makes_clients_one_sided() -> None:
    labels = np.arange(5000) % 10

    def largest_share(alpha: float) -> float:
        parts = partition.dirichlet(labels, clients=10, alpha=alpha, min_records=1, rng=rng())
        return float(np.mean([np.bincount(labels[p]).max() / len(p) for p in parts]))

    assert largest_share(0.1) > 2 * largest_share(100.0)


def test_an_infeasible_dirichlet_is_an_explained_error() -> None:
    labels = np.arange(60_000) % 10
    with pytest.raises(PartitionError, match=r"alpha = 0\.1 over 500 clients.*raise alpha"):
        partition.dirichlet(labels, clients=500, alpha=0.1, min_records=10, rng=rng())
    with pytest.raises(PartitionError, match="too few"):
        partition.dirichlet(labels[:100], clients=50, alpha=1.0, min_records=10, rng=rng())


def test_fractions_overlap_and_the_overlap_is_counted() -> None:
    parts = partition.fixed_fraction(1000, clients=150, fraction=0.01, rng=rng())
    assert {len(p) for p in parts} == {10}
    assert all(len(np.unique(p)) == 10 for p in parts)
    held = np.bincount(np.concatenate(parts), minlength=1000)
    assert partition.overlap(parts, 1000) == held.max() > 1
    assert partition.overlap(partition.iid(1000, clients=7, rng=rng()), 1000) == 1
    with pytest.raises(PartitionError, match="less than one record"):
        partition.fixed_fraction(10, clients=3, fraction=0.01, rng=rng())


def test_shards_give_few_labels_to_each_client() -> None:
    labels = rng().permutation(np.arange(1000) % 10)
    parts = partition.shards(labels, clients=20, per_client=2, rng=rng())
    assert is_a_division(parts, 1000)
    assert max(len(np.unique(labels[p])) for p in parts) <= 4
    with pytest.raises(PartitionError, match="too few"):
        partition.shards(labels[:10], clients=20, per_client=2, rng=rng())


def test_natural_follows_the_owners() -> None:
    owner = np.array(["b", "a", "b", "c"])
    assert [p.tolist() for p in partition.natural(owner, clients=3)] == [[1], [0, 2], [3]]
    assert len(partition.natural(owner, clients=2)) == 2
    with pytest.raises(PartitionError, match="only 3 owners"):
        partition.natural(owner, clients=4)
    with pytest.raises(PartitionError, match="no natural owner"):
        partition.natural(None, clients=1)


def test_the_same_seed_gives_the_same_division() -> None:
    one, again, other = (partition.iid(100, clients=5, rng=rng(s)) for s in (1, 1, 2))
    assert all(map(np.array_equal, one, again))
    assert not all(map(np.array_equal, one, other))
