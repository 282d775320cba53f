"""The ledger: a site's account on disk. It refuses to overspend, and any doubt about it refuses, too.

SQLite with a write-ahead log and full synchronisation: when `charge` returns, the charge is on disk;
only then may noise be drawn. What was sent is kept beside it until the next, so that a retry
sends the same bytes again and costs nothing. An older copy put back in place is found by the ledger head
(number and seal of the last entry) that the server has recorded, and by the one in the site's own witness,
a small file of its own that is written after every charge. Who puts both back together is not found out.

site    name, identity, budget (sealed), number and seal of the last entry
entry   one charge each, chained by seals
outbox  the last upload of each experiment, as it was sent, and the statistic of each of its stages
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from fed_dp.accounting.account import Account, Budget, Entry, Planned
from fed_dp.accounting.events import Event
from fed_dp.errors import BudgetExceeded, LedgerFault, PrivacyError

_SCHEMA = """
CREATE TABLE site (name TEXT PRIMARY KEY, identity TEXT NOT NULL, epsilon REAL NOT NULL,
                   delta REAL NOT NULL, number INTEGER NOT NULL, seal TEXT NOT NULL);
CREATE TABLE entry (site TEXT NOT NULL, number INTEGER NOT NULL, content TEXT NOT NULL,
                    PRIMARY KEY (site, number));
CREATE TABLE outbox (site TEXT NOT NULL, experiment TEXT NOT NULL, slot TEXT NOT NULL,
                     question TEXT NOT NULL, seal TEXT NOT NULL, body BLOB NOT NULL,
                     PRIMARY KEY (site, experiment, slot));
"""
KEPT = 100  # experiments whose last answers are in the outbox
PATIENCE = 30.0  # seconds to wait for another process that is charging


class Ledger:
    """One site's account in a file. Nothing is remembered between calls: the file is what counts."""

    def __init__(self, path: Path, site: str | None = None, *, witness: Path | None = None) -> None:
        self.path, self._site, self._witness = path, site, witness

    @classmethod
    def create(cls, path: Path, *, site: str, budget: Budget) -> Ledger:
        """Make a new ledger. Its budget can never be changed; an existing file is never replaced."""
        account = Account.open(site, uuid4().hex, budget)
        _create(path, account)
        ledger = cls(path)
        if ledger.read()[0] != account:
            raise LedgerFault(f"{path} is another ledger: remove what is left of it first")
        return ledger

    # ------------------------------------------------------------------------------- reading

    def sites(self) -> list[str]:
        """Return the names of all sites in the file: one for a real site, many for a simulation."""
        with self._open() as db:
            return [name for (name,) in db.execute("SELECT name FROM site ORDER BY rowid")]

    def read(self, *, known: str | None = None) -> tuple[Account, list[Entry]]:
        """Return the account and all its entries, every seal checked."""
        with self._open() as db, _transaction(db, "DEFERRED"):
            return self._read(db, known)

    # ------------------------------------------------------------------------------ charging

    def charge(self, event: Event, *, known: str | None = None, planned: Planned = ()) -> Account:
        """Charge a release. When this returns, it is on disk and counts, whatever happens next.

        `known` is the ledger head that the server has recorded; a ledger that does not contain it has been
        rolled back. Raises BudgetExceeded or LedgerFault; then nothing may be sent.
        """
        with self._open() as db, _transaction(db):
            account, _ = self._read(db, known)
            after, entry = account.charge(event, when=_now(), planned=planned)
            db.execute("INSERT INTO entry VALUES (?, ?, ?)", (account.site, entry.number, entry.to_json()))
            db.execute(
                "UPDATE site SET number = ?, seal = ? WHERE name = ?", (after.number, after.head, after.site)
            )
        if self._witness is not None:
            _write_witness(self._witness, after)
        return after

    def keep(self, account: Account, *, experiment: str, request: str, body: bytes, slot: str = "") -> None:
        """Keep what is about to be sent, in place of what this experiment had in the slot before."""
        with self._open() as db, _transaction(db):
            db.execute(
                "INSERT OR REPLACE INTO outbox VALUES (?, ?, ?, ?, ?, ?)",
                (account.site, experiment, slot, request, _seal(account, request, body), body),
            )
            db.execute(
                "DELETE FROM outbox WHERE site = ? AND experiment NOT IN (SELECT experiment FROM outbox "
                "WHERE site = ? GROUP BY experiment ORDER BY max(rowid) DESC LIMIT ?)",
                (account.site, account.site, KEPT),
            )

    def kept(self, *, experiment: str, request: str, known: str | None = None) -> bytes | None:
        """Return what was sent in response to this very request, if it was the last of its slot."""
        with self._open() as db, _transaction(db, "DEFERRED"):
            account, _ = self._read(db, known)
            found = db.execute(
                "SELECT body, seal FROM outbox WHERE site = ? AND experiment = ? AND question = ?",
                (account.site, experiment, request),
            ).fetchone()
            if found is None:
                return None
            body = bytes(found[0])
            if found[1] != _seal(account, request, body):
                raise LedgerFault("what was kept in the outbox has been changed")
            return body

    def slots(self, *, experiment: str) -> set[str]:
        """Return the slots in which something is kept that was sent in this experiment."""
        with self._open() as db:
            account, _ = self._read(db, None)
            rows = db.execute(
                "SELECT slot FROM outbox WHERE site = ? AND experiment = ?", (account.site, experiment)
            )
            return {slot for (slot,) in rows}

    # --------------------------------------------------------------------------------- inside

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        if not self.path.is_file():
            raise LedgerFault(
                f"ledger {self.path} is missing: what this site has spent is not known, so nothing is sent; "
                "put it back, or, for a site that never took part, make one with: fed-dp ledger create"
            )
        with _explained(self.path), closing(_connect(self.path)) as db:
            yield db

    def _read(self, db: sqlite3.Connection, known: str | None) -> tuple[Account, list[Entry]]:
        rows = db.execute("SELECT * FROM site").fetchall()
        chosen = [row for row in rows if self._site in (None, row[0])]
        if len(chosen) != 1:
            names = ", ".join(str(row[0]) for row in rows[:5])
            raise LedgerFault(
                f"{self.path} holds {len(rows)} sites ({names}), not the one that was asked for"
            )
        name, identity, budget_epsilon, delta, number, seal = chosen[0]
        texts = db.execute("SELECT content FROM entry WHERE site = ? ORDER BY number", (name,)).fetchall()
        entries = [Entry.from_json(text) for (text,) in texts]
        start = Account.open(name, identity, Budget(budget_epsilon, delta))
        if start.head != (entries[0].previous if entries else seal if number == 0 else start.head):
            raise LedgerFault(
                f"the name, identity or budget of site {name!r} was changed after it was created"
            )
        account = start.replay(entries)
        if (account.number, account.head) != (number, seal):
            raise LedgerFault(
                f"site {name!r} has {account.number} entries where {number} were written: some were removed"
            )
        _contains(start, entries, known, who="the server")
        if self._witness is not None:
            _contains(start, entries, _read_witness(self._witness, account), who="this site's witness")
        return account, entries


def _contains(start: Account, entries: Sequence[Entry], known: str | None, *, who: str) -> None:
    """Refuse a chain in which a ledger head that somebody has recorded does not occur."""
    if not known:
        return
    number, _, seal = known.partition(":")
    seals = [start.head, *(entry.seal for entry in entries)]
    if not number.isdecimal() or int(number) >= len(seals):
        raise LedgerFault(
            f"{who} has seen entry {number[:20]}, this ledger ends at {len(seals) - 1}: it was rolled "
            "back to an older copy; put the newest one back"
        )
    if seals[int(number)] != seal:
        raise LedgerFault(f"entry {number} is not the one that {who} has seen: this is another ledger")


def _read_witness(path: Path, account: Account) -> str | None:
    """Return the last head of this ledger that was written here; None before its first charge."""
    try:
        identity, _, head = path.read_text().strip().partition(" ")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise LedgerFault(f"witness {path} cannot be read ({type(error).__name__})") from None
    if identity != account.identity:
        raise LedgerFault(
            f"witness {path} is of another ledger: what was charged there would be forgotten; put that "
            "ledger back, or, if this site gave it up on purpose, remove the witness"
        )
    return head


def _write_witness(path: Path, account: Account) -> None:
    """Write the ledger head after a charge. If that fails nothing is sent; the charge counts."""
    try:
        partial = path.with_name(f".{path.name}.part")
        with open(os.open(partial, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as out:
            out.write(f"{account.identity} {account.ledger_head}\n")
            out.flush()
            os.fsync(out.fileno())
        partial.replace(path)
    except OSError as error:
        raise LedgerFault(
            f"witness {path} cannot be written: {error.strerror or error}; nothing was sent"
        ) from None


def write_accounts(path: Path, accounts: Mapping[str, tuple[Account, Sequence[str]]]) -> None:
    """Write virtual clients' accounts and their new entries (as JSON) into one file.

    For simulations: it is as old as the run folder's checkpoint, and not synchronised by itself. Entries
    from where the new ones begin on are replaced: they are of a round that was never checkpointed,
    and is repeated.
    """
    if not path.exists():
        _create(path, *(account for account, _ in accounts.values()))
    with _explained(path), closing(_connect(path)) as db:
        db.execute("PRAGMA synchronous = OFF")
        with _transaction(db):
            known = {name for (name,) in db.execute("SELECT name FROM site")}
            for name, (account, _) in accounts.items():
                if name not in known:
                    _insert_site(db, account)
            db.executemany(
                "DELETE FROM entry WHERE site = ? AND number > ?",
                [(name, account.number - len(texts)) for name, (account, texts) in accounts.items()],
            )
            db.executemany(
                "INSERT INTO entry VALUES (?, ?, ?)",
                [
                    (name, number, text)
                    for name, (account, texts) in accounts.items()
                    for number, text in enumerate(texts, account.number - len(texts) + 1)
                ],
            )
            db.executemany(
                "UPDATE site SET number = ?, seal = ? WHERE name = ?",
                [(account.number, account.head, name) for name, (account, _) in accounts.items()],
            )


def _insert_site(db: sqlite3.Connection, account: Account) -> None:
    budget = account.budget
    db.execute(
        "INSERT INTO site VALUES (?, ?, ?, ?, ?, ?)",
        (
            account.site,
            account.identity,
            float(budget.epsilon),
            float(budget.delta),
            account.number,
            account.head,
        ),
    )


def _seal(account: Account, request: str, body: bytes) -> str:
    """Seal what is kept, to this ledger and this request."""
    return hashlib.sha256(f"{account.identity}:{request}:".encode() + body).hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _connect(path: Path, mode: str = "rw") -> sqlite3.Connection:
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=PATIENCE, isolation_level=None
    )
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    return db


def _create(path: Path, *accounts: Account) -> None:
    """Make the file whole under another name, then link it: it appears with its tables, or not at all."""
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    with _explained(path):
        if Path(f"{path}-wal").exists():
            raise LedgerFault(f"{path}-wal is what is left of another ledger: its charges are not lost yet")
        try:
            os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # its outbox is a secret
            with closing(_connect(partial, "rwc")) as db:
                db.executescript(_SCHEMA)
                for account in accounts:
                    _insert_site(db, account)
            os.link(partial, path)
        except FileExistsError:
            raise LedgerFault(f"{path} exists already: a ledger is never replaced") from None
        finally:
            for name in (partial, Path(f"{partial}-wal"), Path(f"{partial}-shm")):
                name.unlink(missing_ok=True)


@contextmanager
def _transaction(db: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    db.execute(f"BEGIN {kind}")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong with the file into a LedgerFault that says so."""
    try:
        yield
    except BudgetExceeded:
        raise
    except PrivacyError as error:
        if str(path) in str(error):
            raise
        raise LedgerFault(f"ledger {path}: {error}; nothing was sent") from None
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            why = f"another process has held it for {PATIENCE:g} s"
        else:
            why = f"{error} (is it writable, and is the disk full?)"
        raise LedgerFault(f"ledger {path} cannot be used: {why}; nothing was sent") from None
    except OSError as error:
        raise LedgerFault(
            f"ledger {path} cannot be used: {error.strerror or error}; nothing was sent"
        ) from None
    except (sqlite3.Error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LedgerFault(f"ledger {path} is damaged ({error}); nothing was sent") from None
