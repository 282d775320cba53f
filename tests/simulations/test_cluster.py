"""Runs on a Ray cluster of two machines (both are here), and what happens when one of them is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from fed_dp.data.dataset import DataSet, Records, identity
from fed_dp.data.sets.digits import Digits
from fed_dp.errors import ResourceError, RunError
from fed_dp.experiment import to_run_config
from fed_dp.runs.folder import Line
from fed_dp.simulations.ray_grid import Pool, RayGrid, ray_session
from tests.clock import HANG
from tests.conftest import small
from tests.simulations.test_private import ledger_heads
from tests.simulations.test_ray import WithPools, on_ray, pool, questions
from tests.simulations.test_simulate import run, weights

pytestmark = pytest.mark.ray
QUIET: dict[str, Any] = {"include_dashboard": False}
# A machine that is gone refuses to be asked: five times in a row, and Ray counts it as lost.
SOON = {"health_check_period_ms": 500, "health_check_failure_threshold": 5}


class TwoMachines:
    """A head of one worker without a GPU, and a second machine of three, with two GPUs."""

    def __init__(self) -> None:
        head = {"num_cpus": 1, **QUIET, "_system_config": SOON}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.second: Any = None

    def complete(self) -> None:
        if self.second is None:
            self.second = self.cluster.add_node(num_cpus=3, num_gpus=2)
            self.cluster.wait_for_nodes(timeout=HANG)

    def lose(self) -> None:
        self.cluster.remove_node(self.second, allow_graceful=False)
        self.second = None

    @property
    def address(self) -> str:
        return str(self.cluster.address)


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoMachines]:
    found = TwoMachines()
    yield found
    found.cluster.shutdown()


@pytest.fixture
def machines(cluster: TwoMachines) -> Iterator[TwoMachines]:
    cluster.complete()
    yield cluster
    ray.shutdown()


class Watch(WithPools):
    """Note on which machines actors are after the first round."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self.machines: Counter[str] = Counter()

    def round_done(self, line: Line) -> None:
        if line["round"] == 1:
            where = [
                actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
                for actor in self.pools[0].actors
            ]
            self.machines.update(ray.get(where))


class LoseOne(Watch):
    """Lose the second machine when the first answer of the second round has come."""

    def __init__(self, patch: pytest.MonkeyPatch, machines: TwoMachines) -> None:
        super().__init__(patch)
        self.lost = False
        keep = RayGrid._keep

        def then(grid: RayGrid, *arguments: Any) -> None:
            keep(grid, *arguments)
            if self.machines and not self.lost:
                self.lost = True
                machines.lose()

        patch.setattr(RayGrid, "_keep", then)


@pytest.mark.exhaustive  # the same without a loss
def test_a_cluster_by_its_address_gives_the_same_result(
    machines: TwoMachines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = small("psgd", clients={"count": 9})
    there = small("psgd", clients={"count": 9}, ray={"address": machines.address})
    here, expected = run(plain, tmp_path / "here")
    watch = Watch(monkeypatch)
    path, summary = on_ray(there, tmp_path / "there", watch)
    assert sorted(watch.machines.values()) == [1, 3]
    assert weights(path) == weights(here)
    assert ledger_heads(path) == ledger_heads(here)
    assert summary["privacy"] == expected["privacy"]
    assert summary["digest"] == expected["digest"]


def test_a_machine_that_is_lost_in_a_round_costs_no_reply_and_nothing_twice(
    machines: TwoMachines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape: dict[str, Any] = {"rounds": 3, "clients": {"count": 24, "together": 1}}
    here, expected = run(small("psgd", **shape), tmp_path / "here")
    watch = LoseOne(monkeypatch, machines)
    path, summary = on_ray(
        small("psgd", **shape, ray={"address": machines.address}), tmp_path / "there", watch
    )
    assert watch.lost
    assert sorted(watch.machines.values()) == [1, 3]  # before it was lost
    assert watch.pools[0].most == 4
    assert summary["digest"] == expected["digest"]
    assert summary["failures"] == 0
    assert weights(path) == weights(here)
    assert ledger_heads(path) == ledger_heads(here)
    assert summary["privacy"] == expected["privacy"]


def test_shares_of_a_gpu_are_never_given_out_twice(
    machines: TwoMachines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = {"count": 9, "cpus": 0.1, "gpus": 0.5}
    ids: list[str] = []

    class Ask(Watch):
        def round_done(self, line: Line) -> None:
            super().round_done(line)
            if line["round"] == 1:
                gpus = [a.__ray_call__.remote(lambda _: ray.get_gpu_ids()) for a in self.pools[0].actors]
                ids.extend(str(each) for found in ray.get(gpus) for each in found)

    watch = Ask(monkeypatch)
    _, summary = on_ray(small(clients=clients, ray={"address": machines.address}), tmp_path, watch)
    assert summary["failures"] == 0  # nine clients took turns on four shares
    assert len(watch.machines) == 1  # all where the GPUs are
    assert sorted(Counter(ids).values()) == [2, 2]


def test_records_that_do_not_fit_into_the_object_store_are_told() -> None:
    x = np.zeros((100_000, 1000), np.uint8)
    part = Records(x, np.zeros(len(x), np.int64))
    large = DataSet("large", part, part.part(np.arange(10)), 2, *identity())
    with ray_session(None, object_store_gb=0.08):
        with pytest.raises(
            ResourceError, match=r"takes 0.101 GB, .*object store has 0.08 GB.*object_store_gb"
        ):
            Pool(clients=1, cpus=1.0, gpus=0.0, section=Digits(), dataset=large)


def test_a_machine_that_runs_low_on_memory_is_told() -> None:
    any_use_is_too_much = {"memory_usage_threshold": 0.0, "memory_monitor_refresh_ms": 100}
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _system_config=any_use_is_too_much,
    )
    experiment = small(clients={"count": 2})
    workers = pool(experiment)
    grid = RayGrid(2, dict(to_run_config(experiment)), workers)
    with pytest.raises(RunError, match=r"die as they start: its machine ran low on memory; fewer workers"):
        list(grid.send_and_receive(questions(2), timeout=HANG))
    ray.shutdown()
