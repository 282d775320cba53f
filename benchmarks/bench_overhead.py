"""overhead/…: a client-round of `fed-dp simulate` against a bare torch loop of the same training.

    mlp/averaging-N     everything exchanged, N clients at once, on all cores; by default, in blocks
    mlp/loop            the same with 300 clients, each trained alone (clients.together = 1)
    mlp/dssgd           a tenth uploaded
    mlp/dssgd-svt       a hundredth uploaded by the sparse vector, against the same without it
    mlp/psgd            against Opacus' usual loop; psgd-loop: one client at a time, through Opacus
    cnn/…               the same for DSSGD's CNN
    sequential          a tenth uploaded, round robin: one client after the other, against a loop on one core;
                        on Ray, too, for the record: what a turn costs in another process
    scaling             two workers' time for a client-round, twice, against one worker's

Start-up and the first round are left out of both sides, the server's work is in ours. Pairs
alternate; the ratio is the median pair's. `python bench_overhead.py mlp/loop` measures that alone.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import entries
import workload

from fed_dp.experiment import build
from fed_dp.runs.folder import RunFolder
from fed_dp.server.observers import Silent
from fed_dp.simulations.runner import Engine, session, simulate

CORES = len(os.sched_getaffinity(0))
PARALLEL = {"name": "dssgd", "exchange": "parallel"}
HUNDREDTH = {**PARALLEL, "bound": 0.01, "upload_fraction": 0.01}
SPARSE_VECTOR = {**HUNDREDTH, "threshold": 0.001, "selection": "sparse_vector"}
PURE, APPROXIMATE = {"budget_epsilon": 1e6}, {"budget_epsilon": 8.0, "delta": 1e-5}
PSGD = {"name": "psgd", "learning_rate": 0.01, "sample_rate": workload.SAMPLE_RATE}
Work = Callable[[], float]


class Runs:
    """Our runs, each a client-round's seconds."""

    def __init__(self, data: Path, root: Path) -> None:
        self._data, self._root = data, root

    def __call__(self, clients: int, *, rounds: int = 4, engine: Engine = "auto", **changes: Any) -> Work:
        """Return the work of one run."""
        together = changes.pop("together", "auto")
        cpus = changes.pop("cpus", 1.0)
        tables = workload.tables(
            self._data,
            **{"rounds": rounds, "evaluate_every": rounds, **changes},
            clients={"count": clients, "together": together, "cpus": cpus},
        )
        experiment = build(tables)

        def work() -> float:
            path, _ = simulate(experiment, observer=Silent(), root=self._root, engine=engine)
            later = RunFolder(path).lines()[1:]
            return sum(line["seconds"] for line in later) / sum(line["clients"]["uploaded"] for line in later)

        return work


def pairs(name: str, ours: Work, baseline: Work, *, limit: float, count: int = 3) -> None:
    """Measure both in turn and add the median pair; only what the command line names, if it names any."""
    if sys.argv[1:] and name not in sys.argv[1:]:
        return
    found = sorted(((ours(), baseline()) for _ in range(count)), key=lambda pair: pair[0] / pair[1])
    print(f"{name}:", ", ".join(f"{a / b:.3f}" for a, b in found), flush=True)
    value, against = found[count // 2]
    entries.add_times(f"overhead/{name}", value, baseline=against, limit=limit)


def main() -> None:
    def mlp() -> float:
        return workload.bare_loop(CORES)

    def alone() -> float:
        return workload.bare_loop(1)

    def cnn() -> float:
        return workload.bare_loop(CORES, "cnn", clients=20, rounds=3)

    def opacus() -> float:
        return workload.bare_loop(CORES, "psgd", clients=20)

    with workload.generated_data() as data, tempfile.TemporaryDirectory() as root:
        runs = Runs(data, Path(root))
        network = {"model": {"name": "dssgd-cnn-mnist"}, "rounds": 3}
        with session("ray", build(workload.tables(data))):
            for clients in (30, 100, 300, 1000):
                pairs(f"mlp/averaging-{clients}", runs(clients), mlp, limit=1.0)
            pairs("mlp/loop", runs(300, together=1), mlp, limit=1.10, count=5)
            pairs("mlp/dssgd", runs(300, strategy=PARALLEL), mlp, limit=1.0)
            plain = runs(300, strategy=HUNDREDTH)
            private = runs(300, strategy=SPARSE_VECTOR, privacy=PURE)
            pairs("mlp/dssgd-svt", private, plain, limit=1.10, count=5)
            pairs("mlp/psgd", runs(100, trainer=PSGD, privacy=APPROXIMATE), opacus, limit=1.0)
            alone_psgd = runs(30, trainer=PSGD, privacy=APPROXIMATE, together=1)
            pairs("mlp/psgd-loop", alone_psgd, opacus, limit=1.10)
            pairs("cnn/averaging", runs(30, **network), cnn, limit=1.10)
            pairs("cnn/dssgd", runs(30, **network, strategy=PARALLEL), cnn, limit=1.10)
            robin = {"name": "dssgd", "exchange": "round_robin"}
            pairs("sequential", runs(100, strategy=robin), alone, limit=1.3)
            pairs("sequential-loop", runs(100, strategy=robin, together=1), alone, limit=1.3)
            pairs("sequential-ray", runs(100, strategy=robin, engine="ray"), alone, limit=2.0)
            two, one = runs(300), runs(300, cpus=float(CORES))
            pairs("scaling", lambda: CORES * two(), one, limit=1.3)


if __name__ == "__main__":
    main()
