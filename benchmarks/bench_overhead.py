"""overhead/averaging: a client-round of `fed-dp simulate` against a bare torch loop.

Both do the same local training on the same cores; start-up and the first round are left out of
both, the server's work is in ours. Five pairs, alternating; the ratio is the median pair's.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import entries
import workload

from fed_dp.experiment import build
from fed_dp.simulations.runner import session, simulate
from fed_dp.strategies.rounds import Silent
from fed_dp.strategies.run_folder import RunFolder

LIMIT = 1.35
PAIRS = 5


def seconds_per_client_round(data: Path, runs: Path) -> float:
    path, _ = simulate(build(workload.tables(data)), observer=Silent(), root=runs)
    later = RunFolder(path).lines()[1:]
    return sum(line["seconds"] for line in later) / sum(line["clients"]["uploaded"] for line in later)


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    with workload.generated_data() as data, tempfile.TemporaryDirectory() as runs:
        pairs = []
        with session("ray", build(workload.tables(data))):
            for _ in range(PAIRS):
                baseline = workload.bare_loop(cores)
                pairs.append((seconds_per_client_round(data, Path(runs)), baseline))
    pairs.sort(key=lambda pair: pair[0] / pair[1])
    print("ratios:", ", ".join(f"{ours / bare:.3f}" for ours, bare in pairs))
    value, baseline = pairs[PAIRS // 2]
    entries.add_times("overhead/averaging", value, baseline=baseline, limit=LIMIT)


if __name__ == "__main__":
    main()
