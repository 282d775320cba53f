"""A real federation on loopback for tests: provisioned, over TLS, every part a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fed_dp.accounting import Budget, Ledger
from fed_dp.deploy.provision import Plan, provision
from fed_dp.deploy.supernode import free_ports
from fed_dp.experiment import Experiment, build
from tests.clock import HANG, wait_until
from tests.conftest import in_process

SITES = ("a", "b", "c")
COLUMNS = [f"x{i}" for i in range(6)]
RECORDS = 60  # of each site
HEARTBEAT = 10.0


def records(site: int, count: int) -> pd.DataFrame:
    """Three overlapping classes, drawn anew for every site."""
    rng = np.random.default_rng([5, site, count])
    y = rng.integers(0, 3, count)
    x = np.eye(3, len(COLUMNS))[y] + 0.5 * rng.normal(size=(count, len(COLUMNS)))
    return pd.DataFrame(x.clip(-3, 3), columns=COLUMNS).assign(label=y, site=SITES[site])


def tables(path: str = "/at-each-site", **changes: Any) -> dict[str, Any]:
    """DSSGD of plain SGD in turn, without noise; the same for a simulation on pooled records."""
    return {
        "name": "three",
        "seed": 7,
        "rounds": 3,
        "round_timeout": HANG,
        "clients": {"count": len(SITES)},
        "data": {
            "name": "folder",
            "path": path,
            "label": "label",
            "client": "site",
            "classes": 3,
            "bounds": [-3.0, 3.0],
            "partition": "natural",
        },
        "model": {"name": "linear"},
        "trainer": {"name": "sgd", "learning_rate": 0.3, "batch_size": 16},
        "strategy": {"name": "dssgd", "exchange": "round_robin", "upload_fraction": 0.3},
        **changes,
    }


def with_noise(**changes: Any) -> dict[str, Any]:
    """The same with Gaussian noise on random coordinates, from the operating system's entropy."""
    strategy = {"name": "dssgd", "exchange": "parallel", "selection": "random_mask", "clip": 0.1}
    privacy = {"budget_epsilon": 3.0, "delta": 1e-5, "noise_source": "secure"}
    return tables(**{"strategy": strategy, "privacy": privacy, **changes})


class Federation:
    """The folders, and the processes that were started from them."""

    def __init__(self, folder: Path, *, epsilon: float = 100.0, without_noise: bool = True) -> None:
        self.folder, self.server = folder, folder / "server"
        port, control = free_ports(2)
        self.plan = Plan(SITES, Budget(epsilon, 1e-5), "127.0.0.1", port, control)
        provision(folder, self.plan)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._joined: dict[str, int] = {}  # how often a site had joined before it was started
        for k, name in enumerate(SITES):
            data = self.site(name) / "data"
            data.mkdir()
            records(k, RECORDS).to_csv(data / "train.csv", index=False)
            records(k, 20).to_csv(data / "test.csv", index=False)
            if without_noise:
                self.edit(name, "without_noise = false", "without_noise = true")
        test = pd.concat([records(k, 20) for k in range(len(SITES))])
        test.to_csv(self.server / "data" / "test.csv", index=False)
        self.pooled = folder / "pooled"
        self.pooled.mkdir()
        pd.concat([records(k, RECORDS) for k in range(len(SITES))]).to_csv(
            self.pooled / "train.csv", index=False
        )
        test.to_csv(self.pooled / "test.csv", index=False)

    # ---------------------------------------------------------------------------- files

    def site(self, name: str) -> Path:
        return self.folder / "sites" / name

    def edit(self, name: str, old: str, new: str) -> None:
        """Change a site's own file, or the server's."""
        path = self.server / "server.toml" if name == "server" else self.site(name) / "site.toml"
        text = path.read_text()
        assert old in text, text
        path.write_text(text.replace(old, new))

    def ledger(self, name: str) -> Ledger:
        return Ledger(self.site(name) / "ledger.sqlite")

    def rebudget(self, name: str, epsilon: float) -> None:
        """Give a site that has spent nothing another budget."""
        assert self.ledger(name).read()[0].number == 0
        path = self.site(name) / "ledger.sqlite"
        path.unlink()
        Ledger.create(path, site=name, budget=Budget(epsilon, 1e-5))
        path.chmod(0o600)
        self.edit(name, f"epsilon = {self.plan.budget.epsilon!r}", f"epsilon = {epsilon!r}")

    def experiment(self, content: dict[str, Any]) -> str:
        """Write an experiment's file."""
        import tomli_w

        path = self.folder / f"{content['name']}.toml"
        path.write_text(tomli_w.dumps(content))
        return str(path)

    # ------------------------------------------------------------------------ processes

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return in_process(self.folder, "deploy", *arguments)

    def run(self, content: dict[str, Any], *more: str) -> dict[str, Any]:
        """Run an experiment to its end; return its summary."""
        done = self.command("run", self.experiment(content), "--server", str(self.server), "--json", *more)
        assert done.returncode == 0, done.stderr + self.logs()
        summary: dict[str, Any] = json.loads(done.stdout)
        return summary

    def start(self, *names: str, program: str = "fed_dp.cli") -> None:
        """Start the server or sites, each in a process group of its own."""
        for name in names:
            kind, folder = ("server", self.server) if name == "server" else ("site", self.site(name))
            self._joined |= {} if name == "server" else {name: self._joins(name)}
            arguments = ["deploy", kind, str(folder)] if program == "fed_dp.cli" else [str(folder)]
            with (self.folder / f"{name}.out").open("ab") as out:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-m", program, *arguments],
                    stdout=out,
                    stderr=out,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )

    def kill(self, *names: str) -> None:
        """Kill −9 every process of these, at once."""
        for name in names:
            process = self.processes.pop(name)
            for pid in descendants(process.pid):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            process.wait(HANG)

    def stop(self) -> list[int]:
        """Ask everything to end and wait for it; return the processes that are left."""
        family = [pid for process in self.processes.values() for pid in descendants(process.pid)]
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            process.wait(HANG)
        self.processes.clear()
        deadline = time.monotonic() + HANG
        while (left := [pid for pid in family if runs(pid)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def said(self, name: str) -> str:
        path = self.folder / f"{name}.out"
        return path.read_text() if path.is_file() else ""

    def logs(self) -> str:
        found = [self.folder / "server.out", self.server / "superlink.log"]
        found += [
            path for name in SITES for path in (self.folder / f"{name}.out", self.site(name) / "site.log")
        ]
        return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in found if path.is_file())

    def wait_for_sites(self, count: int = len(SITES)) -> None:
        """Wait until all that were started have joined. A killed one counts as online for a while."""
        wait_until(lambda: all(self._joins(name) > n for name, n in self._joined.items()), self.logs)
        wait_until(lambda: self._online() >= count, self.logs)

    def _joins(self, name: str) -> int:
        ended = [each for each, process in self.processes.items() if process.poll() is not None]
        assert not ended, f"ended by themselves: {', '.join(ended)}\n{self.logs()}"
        log = self.site(name) / "site.log"
        return log.read_text(errors="replace").count("SuperNode ID:") if log.is_file() else 0

    def _online(self) -> int:
        done = self.command("status", str(self.server), "--json")
        return sum(site["online"] is True for site in json.loads(done.stdout)["sites"])


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended; one that nobody has asked for its end is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """A process and all that descend from it, the oldest first; Flower puts some into other sessions."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        parents.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += sorted(parents.get(each, []))
    return found


def experiment(content: dict[str, Any]) -> Experiment:
    return build(content)


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line a mistake gets."""
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr + done.stdout
    lines = re.findall(r"^error: (.*)$", done.stderr, re.MULTILINE)
    assert len(lines) == 1, done.stderr
    return str(lines[0])
