"""scale/…: a model of a round's time, calibrated on two small runs, against larger runs and other workers.

    T(N, W) = a + N · max(w / W, (w + d) / C, d)

W workers on C cores; w is a worker's processor time for a client-round, d the driver's and Ray's for its two
messages and the server's update, a what a round costs however many clients there are. w, d and a come from
runs of 60 and 120 clients with as many workers as cores; predicted are 300, 1,000 and 2,000 clients, and one
worker. An entry's ratio is measured to predicted, or its inverse, whichever is larger; the limit is 1.2.
docs/scale.md extrapolates from the same numbers.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import entries
import workload
from bench_memory import descendants

from fed_dp.experiment import build
from fed_dp.runs.folder import Line, RunFolder
from fed_dp.server.observers import Silent
from fed_dp.simulations.runner import session, simulate

CORES = len(os.sched_getaffinity(0))
TICK = os.sysconf("SC_CLK_TCK")
ROUNDS = 6
CASES: dict[str, dict[str, Any]] = {
    "averaging": {},
    "dssgd": {"strategy": {"name": "dssgd", "exchange": "parallel", "upload_fraction": 0.01}},
}


def processor_seconds() -> dict[str, float]:
    """Return the processor time so far of workers, and of everything else that belongs to this run."""
    spent = {"worker": 0.0, "rest": 0.0}
    for pid in descendants(os.getpid()):
        try:
            name, _, fields = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        ticks = sum(int(field) for field in fields.split()[11:13])
        spent["worker" if name.startswith("ray::Worker") else "rest"] += ticks / TICK
    return spent


class Meter(Silent):
    """Processor time after the first round and after the last."""

    def __init__(self) -> None:
        self.marks: list[dict[str, float]] = []

    def round_done(self, line: Line) -> None:
        """Note it."""
        self.marks.append(processor_seconds())


def measured(data: Path, root: Path, clients: int, case: str, cpus: float = 1.0) -> dict[str, float]:
    """Return a round's seconds and, for a client-round, processor time of a worker and of the rest."""
    rounds = ROUNDS if clients < 1000 else 3
    tables = workload.tables(
        data, **CASES[case], rounds=rounds, evaluate_every=rounds, clients={"count": clients, "cpus": cpus}
    )
    meter = Meter()
    path, summary = simulate(build(tables), observer=meter, root=root, engine="ray")
    first, last = meter.marks[0], meter.marks[-1]
    per = {key: (last[key] - first[key]) / (clients * (rounds - 1)) for key in first}
    seconds = statistics.median(line["seconds"] for line in RunFolder(path).lines()[1:])
    uploaded = summary["bytes"]["uploaded"] / (clients * rounds)
    downloaded = summary["bytes"]["downloaded"] / (clients * rounds)
    return {"round": seconds, **per, "uploaded": uploaded, "downloaded": downloaded}


def main() -> None:
    with workload.generated_data() as data, tempfile.TemporaryDirectory() as name:
        root = Path(name)
        with session("ray", build(workload.tables(data))):
            measured(data, root, 60, "averaging")  # warms up
            for case in CASES:
                small, middle = (measured(data, root, clients, case) for clients in (60, 120))
                worker, rest = middle["worker"], middle["rest"]

                def rate(workers: int, worker: float = worker, rest: float = rest) -> float:
                    return max(worker / workers, (worker + rest) / CORES, rest)

                fixed = max(0.0, small["round"] - 60 * rate(CORES))
                print(
                    f"{case}: worker {1e3 * worker:.2f} ms, rest {1e3 * rest:.2f} ms, "
                    f"fixed {1e3 * fixed:.0f} ms; bytes up {middle['uploaded']:.0f}, "
                    f"down {middle['downloaded']:.0f}",
                    flush=True,
                )
                for clients, workers in ((300, CORES), (1000, CORES), (2000, CORES), (300, 1)):
                    found = measured(data, root, clients, case, CORES / workers)["round"]
                    expected = fixed + clients * rate(workers)
                    entries.add(
                        f"scale/{case}-{clients}-on-{workers}",
                        value=found,
                        unit="s per round",
                        baseline=expected,
                        ratio=max(found / expected, expected / found),
                        limit=1.2,
                    )


if __name__ == "__main__":
    main()
