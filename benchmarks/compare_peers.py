"""A table of peers: a client-round of federated averaging, theirs and ours, as ratios to a bare torch loop.

300 clients × 600 records, DSSGD's MLP (140,106 parameters), batch 32, one local epoch, all cores. Each peer
is installed by pip into an environment of its own under benchmarks/peers/.envs. All take turns; the
ratio is the median turn's. Also writes benchmarks/peers/latest.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import workload
from bench_overhead import Runs
from rich.console import Console
from rich.table import Table

from fed_dp.experiment import build
from fed_dp.simulations.runner import session

HERE = Path(__file__).parent / "peers"
CONSTRAINTS = HERE.parent.parent / "constraints.txt"
CLIENTS, ROUNDS, TURNS = 300, 4, 3
PACKAGES = {"flwr": ("flwr[simulation]==1.41.0", "ray==2.55.1"), "pfl": ("pfl==0.6.0",)}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def environment(name: str) -> Path:
    """Return the folder of a peer's programs; install it the first time."""
    folder = HERE / ".envs" / name
    if not (folder / "installed").is_file():
        print(f"installing {name}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--quiet"]
        subprocess.run([*pip, _our_torch(), *PACKAGES[name]], check=True)
        (folder / "installed").touch()
    return folder / "bin"


def _our_torch() -> str:
    """Return the torch that we are measured with; their other needs are their own."""
    return next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))


def peer(command: list[str]) -> float:
    """Run a peer's script and return what it printed."""
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False, timeout=900
    )
    for line in done.stdout.splitlines():
        if line.startswith('{"seconds"'):
            return float(json.loads(line)["seconds"])
    raise SystemExit(f"error: {' '.join(command)} failed:\n{done.stderr[-2000:]}")


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    with workload.generated_data() as data, tempfile.TemporaryDirectory() as root:
        runs = Runs(data, Path(root))
        arguments = [str(data / "train.npz"), str(CLIENTS), str(ROUNDS)]
        flower, pfl = environment("flwr"), environment("pfl")
        torchrun = [str(pfl / "torchrun"), f"--nproc-per-node={cores}", str(HERE / "pfl_fedavg.py")]
        flower_script = [str(flower / "python"), str(HERE / "flower_fedavg.py")]

        def ours(**changes: object) -> float:
            with session("ray", build(workload.tables(data))):
                return runs(CLIENTS, **changes)()  # type: ignore[arg-type]

        works: dict[str, Callable[[], float]] = {
            "bare torch loop": lambda: workload.bare_loop(cores),
            "fed_dp": ours,
            "fed_dp, one client at a time": lambda: ours(together=1),
            "pfl": lambda: peer(torchrun + arguments),
            "flwr's simulation": lambda: peer(flower_script + arguments),
        }
        found: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(TURNS):
            for name, work in works.items():
                found[name].append(work())
                print(f"{name}: {1e3 * found[name][-1]:.2f} ms", file=sys.stderr, flush=True)
    bare = found["bare torch loop"]
    table = Table("federated averaging", "ms per client-round", "ratio to the bare loop", "turns")
    told = {}
    for name, seconds in found.items():
        ratios = sorted(a / b for a, b in zip(seconds, bare, strict=True))
        told[name] = {"milliseconds": 1e3 * statistics.median(seconds), "ratios": ratios}
        median = f"{statistics.median(ratios):.3f}"
        table.add_row(
            name, f"{1e3 * statistics.median(seconds):.2f}", median, ", ".join(f"{r:.2f}" for r in ratios)
        )
    (HERE / "latest.json").write_text(json.dumps(told, indent=2) + "\n")
    Console().print(table)


if __name__ == "__main__":
    main()
