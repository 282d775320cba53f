"""overhead/…: a client-round of `fed-dp simulate` against a bare torch loop of the same training.

    averaging    everything exchanged, all clients at once, on all cores
    dssgd        a tenth uploaded, all clients at once, on all cores
    sequential   a tenth uploaded, round robin: one client after the other, against a loop on one core;
                 on Ray, too, for the record: what a turn costs in another process

Start-up and the first round are left out of both sides, the server's work is in ours. Pairs
alternate; the ratio is the median pair's.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import entries
import workload

from fed_dp.experiment import build
from fed_dp.simulations.runner import Engine, session, simulate
from fed_dp.strategies.rounds import Silent
from fed_dp.strategies.run_folder import RunFolder

PAIRS = 5
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "averaging": ({"name": "averaging"}, 1.35),
    "dssgd": ({"name": "dssgd", "exchange": "parallel"}, 1.35),
    "sequential": ({"name": "dssgd", "exchange": "round_robin"}, 1.35),
    "sequential-ray": ({"name": "dssgd", "exchange": "round_robin"}, 2.0),
}


def seconds_per_client_round(data: Path, runs: Path, strategy: dict[str, Any], engine: Engine) -> float:
    experiment = build(workload.tables(data, strategy=strategy))
    path, _ = simulate(experiment, observer=Silent(), root=runs, engine=engine)
    later = RunFolder(path).lines()[1:]
    return sum(line["seconds"] for line in later) / sum(line["clients"]["uploaded"] for line in later)


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    with workload.generated_data() as data, tempfile.TemporaryDirectory() as runs:
        with session("ray", build(workload.tables(data))):
            for name, (strategy, limit) in CASES.items():
                pairs = []
                for _ in range(PAIRS):
                    baseline = workload.bare_loop(1 if name.startswith("sequential") else cores)
                    engine: Engine = "ray" if name.endswith("ray") else "auto"
                    ours = seconds_per_client_round(data, Path(runs), strategy, engine)
                    pairs.append((ours, baseline))
                pairs.sort(key=lambda pair: pair[0] / pair[1])
                print(f"{name}:", ", ".join(f"{ours / bare:.3f}" for ours, bare in pairs))
                value, baseline = pairs[PAIRS // 2]
                entries.add_times(f"overhead/{name}", value, baseline=baseline, limit=limit)


if __name__ == "__main__":
    main()
