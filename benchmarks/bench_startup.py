"""startup/…: from nothing to the end of a run's first round, against Ray's own start.

Each in a process of its own: a run of four clients on Ray; the baseline starts Ray and as many actors, which
import torch, Opacus and Flower, and answer once. What is above it is the project's own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

import entries

RUN = """
from pathlib import Path
from fed_dp.experiment import build
from fed_dp.simulations.runner import simulate
from fed_dp.server.observers import Silent
experiment = build({"rounds": 1, "clients": {"count": 4}})
simulate(experiment, observer=Silent(), engine="ray", root=Path(__import__("sys").argv[1]))
"""
BARE = """
import ray, torch, opacus, flwr
ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
class Actor:
    def __init__(self):
        import torch, opacus, flwr
    def answer(self):
        return 1
actors = [ray.remote(Actor).options(num_cpus=1).remote() for _ in range(int(ray.cluster_resources()["CPU"]))]
ray.get([actor.answer.remote() for actor in actors])
ray.shutdown()
"""
REPEATS, LIMIT = 4, 1.6


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        baseline, value = entries.medians(
            lambda: subprocess.run([sys.executable, "-c", BARE], check=True, capture_output=True),
            lambda: subprocess.run([sys.executable, "-c", RUN, root], check=True, capture_output=True),
            repeats=REPEATS,
            dropped=1,
        )
    entries.add("startup/ray", value=value, unit="s", baseline=baseline, ratio=value / baseline, limit=LIMIT)


if __name__ == "__main__":
    main()
