"""Kill −9 of sites and of the server at every phase of a round, over real TLS: the run is completed."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from fed_dp.deploy.run_queue import requests
from fed_dp.runs.folder import RunFolder
from tests.clock import HANG, wait_until
from tests.deploy.federation import SITES, Federation, descendants, with_noise

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3600)]

KILLS = int(os.environ.get("FED_DP_KILLS", "34"))
ROUNDS = 12
Seen = Callable[[], object]


def test_kills_at_every_phase(tmp_path: Path) -> None:
    federation = Federation(tmp_path, epsilon=1000.0)
    try:
        federation.start("server", *SITES)
        federation.wait_for_sites()
        done = Killer(federation).go(KILLS)
    finally:
        federation.stop()
    print(json.dumps(done, indent=2))
    assert sum(done.values()) >= KILLS
    assert len(done) == len(SITE_PHASES) + len(SERVER_PHASES)


class Killer:
    """Runs one experiment after the other, and kills in between."""

    def __init__(self, federation: Federation) -> None:
        self.federation, self.rng = federation, random.Random(3)
        self.folder = RunFolder(federation.folder)
        self.runs: list[RunFolder] = []

    def go(self, kills: int) -> Counter[str]:
        done: Counter[str] = Counter()
        phases = [*SITE_PHASES, *SERVER_PHASES]
        self.ask()
        while sum(done.values()) < kills:
            phase = phases[sum(done.values()) % len(phases)]
            name = self.rng.choice(SITES) if phase in SITE_PHASES else "server"
            if not self.one(phase, name):
                self.ask()  # the run ended while we waited for the phase
                continue
            done[phase] += 1
            print(
                f"{sum(done.values())}: {phase} ({name}), after round {len(self.folder.lines())}", flush=True
            )
            self.progress()
        wait_until(lambda: self.folder.finished, self.federation.logs, every=0.5)
        for folder in self.runs:
            self.check(folder)
        return done

    def ask(self) -> None:
        content = with_noise(name="kills", rounds=ROUNDS, clients={"count": 3, "quorum": 3})
        f = self.federation
        done = f.command("run", f.experiment(content), "--server", str(f.server), "--detach")
        assert done.returncode == 0, done.stderr + f.logs()
        self.folder = RunFolder(list(requests(f.server / "runs"))[-1].folder)
        self.runs.append(self.folder)

    def one(self, phase: str, name: str) -> bool:
        """Wait until a phase begins, then kill at once; start again a little later."""
        seen = {**SITE_PHASES, **SERVER_PHASES}[phase](self.federation, self.folder, name)
        before, deadline = seen(), time.monotonic() + HANG
        while seen() == before:
            if self.folder.finished:
                return False
            assert time.monotonic() < deadline, f"{phase} was never seen\n{self.federation.logs()}"
            time.sleep(0.005)
        if "process alone" in phase:
            kill_one(self.federation, name, phase)
        else:
            self.federation.kill(name)
            time.sleep(self.rng.uniform(0, 2))
            self.federation.start(name)
        return True

    def progress(self) -> None:
        """Wait until a round has been finished since the kill."""
        done = len(self.folder.lines())

        def further() -> bool:
            if self.federation.processes["server"].poll() is not None:
                self.federation.start("server")  # what systemd would do
            return len(self.folder.lines()) > done or self.folder.finished

        wait_until(further, self.federation.logs, every=0.2)

    def check(self, folder: RunFolder) -> None:
        lines = folder.lines()
        assert [line["round"] for line in lines] == list(range(1, ROUNDS + 1))
        assert [line["clients"]["uploaded"] for line in lines] == [len(SITES)] * ROUNDS
        latest = folder.latest()
        assert latest is not None
        assert latest[1]["version"] == ROUNDS * len(SITES)  # no upload was counted twice
        noted = list(folder.noted())
        releases = Counter((event.client, event.round, mark) for mark, event in noted)
        assert set(releases.values()) == {1}  # nothing is in the total twice …
        told = {(event.client, event.round) for _, event in noted}
        assert told == {(k, turn) for k in range(len(SITES)) for turn in range(1, ROUNDS + 1)}  # … or missing
        marks = json.loads((self.federation.server / "runs" / "marks.json").read_text())
        for name in SITES:
            ledger = self.federation.ledger(name)
            account, entries = ledger.read(
                known=marks[f"{name}:{ledger.read()[0].identity}"]
            )  # not behind what left
            left = [e for run in self.runs for _, e in run.noted() if SITES[e.client] == name]
            assert len(entries) >= len(left) >= ROUNDS * len(self.runs)
            assert account.spent <= account.budget.epsilon


def kill_one(federation: Federation, name: str, phase: str) -> None:
    """Kill one process of the server's or a site's."""
    words = {
        "the ServerApp's": ("flwr-serverapp",),
        "the SuperLink's": ("fed_dp.deploy.superlink",),
        "a site's": ("multiprocessing.forkserver",),
    }[phase.split(" process")[0]]
    found = [
        pid
        for pid in descendants(federation.processes[name].pid)
        if any(word in command(pid) for word in words)
    ]
    if phase.startswith("a site's"):
        found = found[-1:]  # the newest: it answers a message
    assert found, phase
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def in_log(words: str) -> Callable[[Federation, RunFolder, str], Seen]:
    """A phase that a site's log tells of."""

    def of(federation: Federation, _: RunFolder, name: str) -> Seen:
        site = federation.site("a" if name == "server" else name) / "site.log"
        return lambda: site.read_text(errors="replace").count(words)

    return of


def of_ledger(query: str) -> Callable[[Federation, RunFolder, str], Seen]:
    """A phase that a site's ledger tells of."""

    def of(federation: Federation, _: RunFolder, name: str) -> Seen:
        path = federation.site("a" if name == "server" else name) / "ledger.sqlite"

        def seen() -> object:
            with closing(sqlite3.connect(path)) as db:
                return db.execute(query).fetchall()

        return seen

    return of


def lines_of(_: Federation, folder: RunFolder, __: str) -> Seen:
    return lambda: len(folder.lines())


def checkpoints_of(_: Federation, folder: RunFolder, __: str) -> Seen:
    return lambda: sorted(path.name for path in (folder.path / "checkpoint").iterdir())


CHARGES, KEPT = "SELECT count(*) FROM entry", "SELECT question FROM outbox"
RECEIVED, SENDING, SENT = "Receiving: train", "Sending: train", "Sent successfully"
SITE_PHASES: dict[str, Callable[[Federation, RunFolder, str], Seen]] = {
    "a site, between rounds": lines_of,
    "a site, asked": in_log(RECEIVED),
    "a site, charged": of_ledger(CHARGES),
    "a site, kept": of_ledger(KEPT),
    "a site, sending": in_log(SENDING),
    "a site, sent": in_log(SENT),
    "a site's process alone, charged": of_ledger(CHARGES),
    "a site's process alone, handing over": of_ledger(KEPT),
}
SERVER_PHASES: dict[str, Callable[[Federation, RunFolder, str], Seen]] = {
    "the server, asking": in_log(RECEIVED),
    "the server, while sites are charged": of_ledger(CHARGES),
    "the server, while sites send": in_log(SENDING),
    "the server, a site has sent": in_log(SENT),
    "the server, a round's line written": lines_of,
    "the server, checkpointed": checkpoints_of,
    "the ServerApp's process alone": of_ledger(CHARGES),
    "the SuperLink's process alone": in_log(SENDING),
}
