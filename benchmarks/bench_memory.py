"""memory/1000-clients: the most that a simulation of 1000 clients holds, over all its processes.

Proportional set sizes of this process and its descendants (Ray's included), sampled as it runs;
shared pages count once. It must also be flat: the last round may not need more than the second.
"""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import entries
import workload

from fed_dp.experiment import build
from fed_dp.runs.folder import Line
from fed_dp.server.observers import Silent
from fed_dp.simulations.runner import simulate

CLIENTS, ROUNDS, LIMIT = 1000, 5, 4.0


def descendants(root: int) -> list[int]:
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def gigabytes() -> float:
    total = 0
    for pid in descendants(os.getpid()):
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
        except OSError:
            continue
    return total / 1e6


class Sampler(Silent):
    """The largest size in each round."""

    def __init__(self) -> None:
        self.peaks = [0.0]
        self.over = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while not self.over.wait(0.2):
            self.peaks[-1] = max(self.peaks[-1], gigabytes())

    def round_done(self, line: Line) -> None:
        """Begin a new round."""
        self.peaks.append(0.0)


def main() -> None:
    sampler = Sampler()
    with workload.generated_data() as data, tempfile.TemporaryDirectory() as runs:
        tables = workload.tables(data, rounds=ROUNDS, clients={"count": CLIENTS})
        tables["data"]["partition"] = {"name": "fraction", "fraction": 0.006}
        simulate(build(tables), observer=sampler, root=Path(runs))
    sampler.over.set()
    peaks = sampler.peaks[:ROUNDS]
    print("GB by round:", ", ".join(f"{peak:.2f}" for peak in peaks))
    entries.add("memory/1000-clients", value=max(peaks), unit="GB", baseline=None, ratio=None, limit=LIMIT)
    entries.add(
        "memory/growth",
        value=peaks[-1],
        unit="GB in the last round",
        baseline=peaks[1],
        ratio=peaks[-1] / peaks[1],
        limit=1.1,
    )


if __name__ == "__main__":
    main()
