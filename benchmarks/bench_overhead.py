"""overhead/averaging: a client-round of `fed-dp simulate` against a bare torch loop.

Both do the same local training on the same cores; start-up and the first round are left out of
both, the server's work is in ours. Three pairs, alternating; the ratio is the median pair's.
memory/1000-clients: what a simulation of 1000 clients holds at its largest.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

import entries
import workload

from fed_dp.experiment import build
from fed_dp.simulations.runner import session, simulate
from fed_dp.strategies.rounds import Silent
from fed_dp.strategies.run_folder import RunFolder

LIMIT = 1.35
PAIRS = 3


def seconds_per_client_round(data: Path, runs: Path) -> float:
    path, _ = simulate(build(workload.tables(data)), observer=Silent(), root=runs)
    later = RunFolder(path).lines()[1:]
    return sum(line["seconds"] for line in later) / sum(line["clients"]["uploaded"] for line in later)


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    with workload.generated_data() as data, tempfile.TemporaryDirectory() as runs:
        pairs = []
        for _ in range(PAIRS):
            baseline = workload.bare_loop(cores)
            with session("ray", build(workload.tables(data))):
                pairs.append((seconds_per_client_round(data, Path(runs)), baseline))
    value, baseline = sorted(pairs, key=lambda pair: pair[0] / pair[1])[PAIRS // 2]
    print(
        "pairs:",
        ", ".join(f"{v / b:.3f}" for v, b in pairs),
        "median",
        statistics.median(v / b for v, b in pairs),
    )
    entries.add(
        "overhead/averaging",
        value=1e3 * value,
        unit="ms per client-round",
        baseline=1e3 * baseline,
        ratio=value / baseline,
        limit=LIMIT,
    )


if __name__ == "__main__":
    main()
