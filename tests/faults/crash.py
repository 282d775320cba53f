"""A site that is killed at any line between a question and its answer. Run by test_ledger_crash.

`python -m tests.faults.crash FOLDER KILLS [MUTANT]` asks one question after the other of a real
ClientApp with a real ledger. Each is answered in a forked process that kills itself (SIGKILL) at a line
of the privacy path, then asked again of one that lives. What leaves comes through a pipe. It prints
what was found, as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sqlite3
import sys
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import fed_dp
from fed_dp.accounting import Account, Budget, Event, Ledger
from fed_dp.clients import app as client_app
from fed_dp.clients.books import Answer, Question, SiteBooks
from fed_dp.experiment import Experiment, build, to_run_config
from fed_dp.mechanisms import SecureNoise
from fed_dp.models import use_one_thread
from fed_dp.sharing import message as names
from tests.clients.deployed import Deployed

WATCHED = ("accounting/ledger", "accounting/account", "clients/app", "clients/books", "clients/participant")
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


class Stop:
    """Kill this very process at the n-th line of the watched files, from where it begins to charge."""

    def __init__(self, line: int) -> None:
        self.line, self.seen, self.before = line, 0, 0

    def __call__(self, frame: FrameType, kind: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(FILES):
            return None
        if kind == "call" and frame.f_code.co_qualname == "Ledger.charge":
            self.before, self.seen = self.seen, 0
        if kind == "line":
            self.seen += 1
            if self.seen == self.line:
                os.kill(os.getpid(), signal.SIGKILL)
        return self


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


def ask(path: Path, turn: int, *, line: int | None = None, after: float = 0.0) -> tuple[str, list[int]]:
    """Ask in a forked process; return the digest of what left it ("" for nothing) and its lines.

    It is killed at a line (0: never, but lines before and since the charge are counted), or after
    some seconds, or lives.
    """
    site = Deployed(experiment(), path)
    out, into = os.pipe()
    if (child := os.fork()) == 0:
        watch_noise(path, into)
        stop = Stop(line or 0)
        if line is not None:
            sys.settrace(stop)
        reply = site.answer(turn)
        sys.settrace(None)
        data = reply.content.array_records[names.ARRAYS][names.CHANGE].data
        os.write(into, hashlib.sha256(data).hexdigest().encode())
        os.write(into, f" {stop.before} {stop.seen}".encode())
        os._exit(0)
    os.close(into)
    killer = threading.Timer(after, os.kill, (child, signal.SIGKILL)) if after else None
    if killer:
        killer.start()
    with os.fdopen(out, "rb") as pipe:
        said = pipe.read()
    early[0] += EARLY in said
    left = said.replace(EARLY, b"").decode().split()
    if killer:
        killer.cancel()
        killer.join()
    os.waitpid(child, 0)
    return (left[0] if left else ""), [int(count) for count in left[1:]]


def weaken(mutant: str) -> None:
    """Make the books worse: the checks must see it."""
    if mutant in ("late", "never"):  # the charge is written after noise was drawn, or not at all
        pending: list[Event] = []
        keep = SiteBooks.keep

        def later(self: SiteBooks, event: Event, question: Question, *, ahead: int) -> Account:
            pending.append(event)
            account, _ = self.ledger.read()
            return account.charge(event)[0]

        def and_then(self: SiteBooks, account: Account, question: Question, answer: Answer) -> None:
            if mutant == "late":
                self.ledger.charge(pending.pop())
                keep(self, account, question, answer)

        SiteBooks.charge, SiteBooks.keep = later, and_then  # type: ignore[method-assign]
    elif mutant == "forgetful":  # nothing is kept: a retry draws fresh noise
        SiteBooks.kept = lambda *_: None  # type: ignore[assignment, method-assign]


def main(folder: str, kills: int, mutant: str = "") -> dict[str, Any]:
    use_one_thread()
    SecureNoise()  # imported once, before the forks
    weaken(mutant)
    client_app._workplace(tuple(sorted(to_run_config(experiment()).items())))  # and read once
    found: Counter[str] = Counter()
    rng = random.Random(1)
    _, [before, since] = ask(begin(Path(folder) / "lines.ledger").path, 1, line=0)
    for kill in range(kills):
        turn = 1 + kill % 4
        if turn <= 3:  # a new ledger: reading a long one takes more lines
            ledger, left, charged = begin(Path(folder) / f"{kill}.ledger"), set[str](), 0
        path = ledger.path
        if turn == 4:  # by the clock: also inside SQLite
            first, _ = ask(path, turn, after=rng.uniform(0.01, 0.1))
        elif turn == 3:  # in the last lines: kept, and about to be sent
            first, _ = ask(path, turn, line=since - (kill // 4) % 20)
        else:
            first, _ = ask(path, turn, line=1 + (kill * since) // kills)
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
    return {**found, "lines": before + since, "noise was drawn before the charge": early[0]}


def begin(path: Path) -> Ledger:
    return Ledger.create(path, site="a", budget=Budget(1e8))


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])))
