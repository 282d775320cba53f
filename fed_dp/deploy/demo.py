"""The demonstration: four hospitals as four sites on loopback, everything real but the distance.

TLS and authenticated sites, every part a process of its own, each hospital with a folder, a ledger and a file
of its own.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fed_dp.accounting import Account, Budget, Entry, Ledger
from fed_dp.deploy.control import control
from fed_dp.deploy.hospitals import HOSPITALS, write_hospitals
from fed_dp.deploy.provision import Plan, provision
from fed_dp.deploy.server import end, environment
from fed_dp.deploy.server_file import ServerHome
from fed_dp.deploy.submit import ask, deployable, watch
from fed_dp.deploy.supernode import free_ports
from fed_dp.errors import DeployError
from fed_dp.experiment import Experiment
from fed_dp.runs.folder import Line, RunFolder

RUNS = ("dssgd", "psgd", "svm")
BUDGET = Budget(6.0, 1e-4)  # of each hospital, for all three runs together
WAIT = 120.0  # seconds until all must be there
PATIENCE = 600.0  # seconds without a round after which a run is given up


def prepare(folder: Path) -> ServerHome:
    """Provision four sites and give each its hospital's records."""
    port, control_port = free_ports(2)
    provision(folder, Plan(HOSPITALS, BUDGET, "127.0.0.1", port, control_port))
    write_hospitals(folder / "sites", folder / "server" / "data")
    for name in HOSPITALS:
        file = folder / "sites" / name / "site.toml"
        file.write_text(file.read_text().replace("metrics = false", "metrics = true "))  # to be shown here
    return ServerHome(folder / "server")


@contextmanager
def running(folder: Path, home: ServerHome, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the server and all sites running."""
    commands = {"server": ["server", str(home.folder)]}
    commands |= {name: ["site", str(folder / "sites" / name)] for name in HOSPITALS}
    processes = {}
    try:
        for name, command in commands.items():
            with (folder / f"{name}.out").open("ab") as out:
                processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "fed_dp.cli", "deploy", *command],
                    env=environment(),
                    stdout=out,
                    stderr=out,
                    stdin=subprocess.DEVNULL,
                )
        _wait(folder, home, processes, say)
        yield
    finally:
        for process in reversed(processes.values()):
            end(process)


def run(home: ServerHome, variant: str, tell: Callable[[Experiment, Line], None]) -> dict[str, Any]:
    """Run one variant of the shipped experiment across the sites; return its summary."""
    experiment = deployable(home, f"hospitals:{variant}", [])
    request = ask(home, experiment)
    watch(request, patience=PATIENCE, tell=lambda line: tell(experiment, line))
    return RunFolder(request.folder).summary()


def ledgers(folder: Path) -> list[tuple[Account, list[Entry]]]:
    """Return every hospital's account and charges, from its own ledger."""
    return [Ledger(folder / "sites" / name / "ledger.sqlite").read() for name in HOSPITALS]


def _wait(
    folder: Path,
    home: ServerHome,
    processes: dict[str, subprocess.Popen[bytes]],
    say: Callable[[str], None],
) -> None:
    deadline, told = time.monotonic() + WAIT, 0
    while time.monotonic() < deadline:
        for name, process in processes.items():
            if process.poll() is not None:
                last = (folder / f"{name}.out").read_text().strip().splitlines()[-1:]
                raise DeployError(f"{name} ended: {''.join(last)}")
        try:
            with control(home) as api:
                there = [node.name for node in api.nodes() if node.online]
        except DeployError:
            there = []
        if len(there) > told:
            told = len(there)
            say(f"there: {', '.join(there)}")
        if told == len(HOSPITALS):
            return
        time.sleep(0.5)
    raise DeployError(f"only {told} of {len(HOSPITALS)} sites are there after {WAIT:g} s: see {folder}/*.out")
