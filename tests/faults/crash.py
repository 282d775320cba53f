"""A site that is killed at any line between a question and its answer. Run by test_ledger_crash.

`python -m tests.faults.crash FOLDER KILLS` asks one question after the other of a real ClientApp with a
real ledger. Each is answered in a forked process that kills itself (SIGKILL) at a line of the privacy
path, at an instruction of SQLite's, or when it has sent; then it is asked again of one that lives. What
leaves comes through a pipe. It prints what was found, as JSON: of the books as they are, and of each
mutant of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import fed_dp
from fed_dp.accounting import Account, Budget, Event, Ledger
from fed_dp.accounting import ledger as ledger_module
from fed_dp.clients import workplace
from fed_dp.clients.ledger_session import SiteLedgerSession, TrainRequest, TrainResponse
from fed_dp.experiment import Experiment, build, to_run_config
from fed_dp.mechanisms import SecureNoise
from fed_dp.models import use_one_thread
from fed_dp.sharing import message as names
from tests.clients.deployed import Deployed

WATCHED = (
    "accounting/ledger",
    "accounting/account",
    "clients/app",
    "clients/workplace",
    "clients/ledger_session",
    "clients/update_exchange",
)
WATCHED += ("mechanisms/", "sharing/private_selection", "sharing/codec")
EARLY = b"!"
early = [0]  # how often noise was drawn before the charge
FILES = tuple(str(Path(fed_dp.__file__).parent / name) for name in WATCHED)


def experiment() -> Experiment:
    return build(
        {
            "rounds": 10_000,
            "clients": {"count": 30},
            "model": {"name": "linear"},
            "strategy": {
                "name": "dssgd",
                "selection": "sparse_vector",
                "bound": 0.01,
                "upload_fraction": 0.05,
            },
            "privacy": {"budget_epsilon": 1e8, "noise_source": "secure"},
        }
    )


Place = tuple[str, int]  # where to die: how many lines after an event, or at which instruction of SQLite's
EVENTS = {("call", "Ledger.charge"): "charge", ("return", "Ledger.keep"): "kept"}


class Stop:
    """Count lines of the watched files since the last event, and SQLite's instructions; die at a place."""

    def __init__(self, place: Place | None) -> None:
        self.place, self.event = place, "start"
        self.seen: Counter[str] = Counter()

    def __call__(self, frame: FrameType, kind: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(FILES):
            return None
        if kind in ("call", "return"):
            self.event = EVENTS.get((kind, frame.f_code.co_qualname), self.event)
        if kind == "line":
            self.count(self.event)
        return self

    def count(self, what: str) -> None:
        self.seen[what] += 1
        if (what, self.seen[what]) == self.place:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch_sqlite(self) -> None:
        connect = ledger_module._connect

        def watched(*arguments: Any) -> sqlite3.Connection:
            db = connect(*arguments)
            db.set_progress_handler(lambda: self.count("sqlite"), 1)
            return db

        ledger_module._connect = watched


def watch_noise(path: Path, into: int) -> None:
    """Write a mark into the pipe when noise is drawn though nothing was charged since now."""

    def charges() -> int:
        with closing(sqlite3.connect(path)) as db:
            return int(db.execute("SELECT count(*) FROM entry").fetchone()[0])

    before, add = charges(), SecureNoise._add

    def noted(self: SecureNoise, *arguments: Any) -> Any:
        if charges() == before:
            os.write(into, EARLY)
        return add(self, *arguments)

    SecureNoise._add = noted  # type: ignore[method-assign]


def ask(path: Path, turn: int, place: Place | None = None) -> tuple[str, Counter[str]]:
    """Ask in a forked process; return the digest of what left it ("" for nothing) and what was counted.

    It dies at a place, or lives. "sent" is a place, too.
    """
    site = Deployed(experiment(), path)
    out, into = os.pipe()
    if (child := os.fork()) == 0:
        watch_noise(path, into)
        stop = Stop(place)
        if place is not None:
            stop.watch_sqlite()
            sys.settrace(stop)
        reply = site.answer(turn)
        sys.settrace(None)
        data = reply.content.array_records[names.ARRAYS][names.CHANGE].data
        os.write(into, hashlib.sha256(data).hexdigest().encode())
        stop.count("sent")
        os.write(into, b" " + json.dumps(stop.seen).encode())
        os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    early[0] += EARLY in said
    digest, _, counted = said.replace(EARLY, b"").decode().partition(" ")
    return digest, Counter(json.loads(counted or "{}"))


def place_of(kill: int, kills: int, counted: Counter[str]) -> Place:
    """Return where to die: places of every kind, spread over all there are of it."""
    kinds = ("charge", "charge", "sqlite", "start", "kept", "sent")
    kind, step = kinds[kill % len(kinds)], kill // len(kinds)
    if kind == "charge":  # half of the kills: between charge and send
        step = 2 * step + kill % len(kinds)
    steps = max(1, kills * kinds.count(kind) // len(kinds))
    return kind, 1 + step * counted[kind] // steps


def weaken(mutant: str) -> None:
    """Make the books worse: the checks must see it."""
    if mutant in ("late", "never"):  # the charge is written after noise was drawn, or not at all
        pending: list[Event] = []
        keep = SiteLedgerSession.keep

        def later(
            self: SiteLedgerSession, event: Event, question: TrainRequest, *, planned: Any = ()
        ) -> Account:
            pending.append(event)
            account, _ = self.ledger.read()
            return account.charge(event)[0]

        def and_then(
            self: SiteLedgerSession, account: Account, question: TrainRequest, answer: TrainResponse
        ) -> None:
            if mutant == "late":
                self.ledger.charge(pending.pop())
                keep(self, account, question, answer)

        SiteLedgerSession.charge, SiteLedgerSession.keep = later, and_then  # type: ignore[method-assign]
    elif mutant == "forgetful":  # nothing is kept: a retry draws fresh noise
        SiteLedgerSession.kept = lambda *_: None  # type: ignore[assignment, method-assign]


def main(folder: Path, kills: int, mutant: str = "") -> dict[str, Any]:
    weaken(mutant)
    found: Counter[str] = Counter()
    _, counted = ask(begin(folder / f"{mutant}lines.ledger").path, 1, ("", 0))
    for kill in range(kills):
        turn = 1 + kill % 2  # every ledger is asked twice
        if turn == 1:
            ledger, left, charged = begin(folder / f"{mutant}{kill}.ledger"), set[str](), 0
        path = ledger.path
        first, _ = ask(path, turn, place_of(kill, kills, counted))
        between = ledger.read()[0].number  # whole after every kill
        second, _ = ask(path, turn)
        after = ledger.read()[0].number
        left |= {first, second} - {""}
        found["killed before the charge"] += between == charged
        found["killed after the charge, before anything was kept"] += between > charged and after > between
        found["killed when it was kept, before it was sent"] += (
            not first and between > charged and after == between
        )
        found["sent before it was killed"] += bool(first)
        found["a retry sent other bytes"] += bool(first) and first != second
        found["a retry was charged though it had been sent"] += bool(first) and after > between
        found["more left than was charged"] += len(left) > after
        found["no answer"] += not second
        charged = after
    return {**found, **counted, "noise was drawn before the charge": early[0]}


def of_mutant(folder: Path, kills: int, mutant: str) -> dict[str, Any]:
    """Return what is found with weakened books, in a process of its own."""
    out, into = os.pipe()
    if (child := os.fork()) == 0:
        os.close(out)
        os.write(into, json.dumps(main(folder, kills, mutant)).encode())
        os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    found: dict[str, Any] = json.loads(said)
    return found


def begin(path: Path) -> Ledger:
    return Ledger.create(path, site="a", budget=Budget(1e8))


if __name__ == "__main__":
    use_one_thread()
    SecureNoise()  # imported once, before the forks
    workplace.read_workplace(tuple(sorted(to_run_config(experiment()).items())))  # and read once
    where, how_often = Path(sys.argv[1]), int(sys.argv[2])
    results = {"": main(where, how_often)}
    print(json.dumps(results | {m: of_mutant(where, 12, m) for m in ("late", "never", "forgetful")}))
