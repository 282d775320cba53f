"""The ledger on disk: what it refuses, what it survives, and that every doubt refuses."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
import shutil
import signal
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fed_dp.accounting import (
    Account,
    Budget,
    Entry,
    Event,
    Gaussian,
    Laplace,
    Ledger,
    SampledGaussian,
    Unprotected,
    epsilon,
)
from fed_dp.accounting.composition import total
from fed_dp.accounting.ledger import write_accounts
from fed_dp.errors import BudgetExceeded, LedgerFault, PrivacyError

HALF = Event(Laplace(0.5), "sparse_vector", 1, 0, "secure")


def event(turn: int, cost: float = 0.5) -> Event:
    return Event(Laplace(cost), "sparse_vector", turn, 0, "secure")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "site.ledger", site="ward 7", budget=Budget(2.0, 1e-6))


def test_charges_are_there_for_whoever_opens_the_file_next(ledger: Ledger) -> None:
    accounts = [ledger.charge(event(turn)) for turn in (1, 2, 3)]
    account, entries = Ledger(ledger.path).read()
    assert account == accounts[-1]
    assert account.spent == pytest.approx(1.5, rel=1e-4)
    assert [entry.event for entry in entries] == [event(turn) for turn in (1, 2, 3)]
    assert entries[0].when[:2] == "20"
    assert account.ledger_head.startswith("3:")
    assert ledger.sites() == ["ward 7"]


def test_over_budget_is_refused_and_not_written(ledger: Ledger) -> None:
    for turn in range(1, 5):
        ledger.charge(event(turn))
    before = ledger.read()
    with pytest.raises(BudgetExceeded, match=r"bring ε to 2.500, over the budget of 2 .*nothing was sent"):
        ledger.charge(event(5))
    with pytest.raises(BudgetExceeded):
        ledger.charge(event(5, 1e-3))
    assert ledger.read() == before


def test_a_budget_without_delta_pays_for_pure_releases_alone(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "pure.ledger", site="a", budget=Budget(100.0))
    ledger.charge(event(1))
    with pytest.raises(BudgetExceeded, match="bring ε to inf"):
        ledger.charge(Event(SampledGaussian(5.0, 0.1, 1), "psgd", 2, 0, "simulation"))


def test_the_budget_composes_all_that_was_ever_charged(tmp_path: Path) -> None:
    budget = Budget(2.0, 1e-5)
    ledger = Ledger.create(tmp_path / "mixed.ledger", site="a", budget=budget)
    releases = [Laplace(0.3), SampledGaussian(2.0, 0.1, 20), Laplace(0.3), SampledGaussian(2.0, 0.1, 20)]
    for turn, release in enumerate(releases, 1):
        ledger.charge(Event(release, "psgd", turn, 0, "simulation"))
    account, _ = ledger.read()
    assert account.spent == epsilon(releases, delta=1e-5) < 2.0
    charge_until_refused = (
        ledger.charge(Event(releases[1], "psgd", turn, 0, "simulation")) for turn in range(50)
    )
    with pytest.raises(BudgetExceeded):
        list(charge_until_refused)


# --------------------------------------------------------------------------------- damage


def flip(path: Path, text: bytes) -> None:
    content = path.read_bytes()
    assert text in content
    path.write_bytes(content.replace(text, bytes([text[0] ^ 1]) + text[1:]))


def sql(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as db:
        assert db.execute(statement).rowcount != 0


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a byte of an entry": (lambda p: flip(p, b'"epsilon": 0.5'), "damaged|does not fit"),
    "an ε made smaller": (
        lambda p: sql(p, "UPDATE entry SET content = replace(content, '0.5', '0.1') WHERE number = 2"),
        "entry 2 of site 'ward 7' does not fit the chain",
    ),
    "an entry in the middle removed": (
        lambda p: sql(p, "DELETE FROM entry WHERE number = 2"),
        "entry 2 of site 'ward 7' does not fit",
    ),
    "the last entry removed": (
        lambda p: sql(p, "DELETE FROM entry WHERE number = 3"),
        "has 2 entries where 3 were written: some were removed",
    ),
    "all entries removed": (lambda p: sql(p, "DELETE FROM entry"), "has 0 entries where 3 were written"),
    "the budget raised": (
        lambda p: sql(p, "UPDATE site SET epsilon = 9000"),
        "the name, identity or budget of site 'ward 7' was changed",
    ),
    "an entry that is no entry": (
        lambda p: sql(p, "UPDATE entry SET content = '{' WHERE number = 1"),
        "is damaged",
    ),
    "an impossible release": (
        lambda p: sql(p, "UPDATE entry SET content = replace(content, '0.5', '-0.5') WHERE number = 1"),
        "epsilon = -0.5",
    ),
    "a table dropped": (lambda p: sql(p, "DROP TABLE entry"), "no such table"),
    "truncated": (lambda p: os.truncate(p, p.stat().st_size // 2), "damaged|cannot be used"),
    "truncated to its first page": (lambda p: os.truncate(p, 4096), "damaged|cannot be used|no such table"),
    "empty": (lambda p: os.truncate(p, 0), "no such table|damaged"),
    "text": (lambda p: p.write_text("hello\n" * 1000), "not a database"),
    "missing": (lambda p: p.unlink(), "is missing: what this site has spent is not known"),
    "a folder": (lambda p: (p.unlink(), p.mkdir()), "is missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_whatever_was_done_to_the_file_it_refuses_and_says_why(ledger: Ledger, name: str) -> None:
    for turn in (1, 2, 3):
        ledger.charge(event(turn))
    spoil, says = DAMAGE[name]
    spoil(ledger.path)
    for use in (
        lambda: ledger.charge(event(4, 0.01)),
        ledger.read,
        lambda: ledger.kept(experiment="e", request="q"),
    ):
        with pytest.raises(LedgerFault, match=says) as caught:
            use()
        assert str(ledger.path) in str(caught.value)
    assert not ledger.path.is_file() or name != "missing"  # nothing was made anew


def test_the_budget_of_an_unused_ledger_cannot_be_changed_either(ledger: Ledger) -> None:
    sql(ledger.path, "UPDATE site SET epsilon = 9000")
    with pytest.raises(LedgerFault, match="identity or budget of site 'ward 7' was changed"):
        ledger.charge(HALF)


def test_a_ledger_is_never_replaced(ledger: Ledger) -> None:
    ledger.charge(HALF)
    with pytest.raises(LedgerFault, match="exists already"):
        Ledger.create(ledger.path, site="ward 7", budget=Budget(2.0))
    assert ledger.read()[0].number == 1
    assert [path.name for path in ledger.path.parent.iterdir()] == [
        ledger.path.name
    ]  # and nothing is left over


def test_what_is_left_of_a_ledger_is_not_built_upon(tmp_path: Path) -> None:
    (tmp_path / "x-wal").write_bytes(b"charges")
    with pytest.raises(LedgerFault, match="x-wal is what is left of another ledger"):
        Ledger.create(tmp_path / "x", site="a", budget=Budget(2.0))


def test_a_charge_between_two_reads_does_not_look_like_damage(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Entry.from_json
    ledger.charge(event(1))

    def meanwhile(text: str) -> Entry:
        monkeypatch.setattr(Entry, "from_json", original)
        Ledger(ledger.path).charge(event(2))
        return original(text)

    monkeypatch.setattr(Entry, "from_json", meanwhile)
    assert ledger.read()[0].number == 1
    assert ledger.read()[0].number == 2


@pytest.mark.parametrize("budget", [(0.0, 0.0), (-1.0, 0.0), (float("nan"), 0.0), (1.0, 1.0), (1.0, -1e-9)])
def test_an_impossible_budget_is_refused(budget: tuple[float, float], tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match="budget"):
        Ledger.create(tmp_path / "x", site="a", budget=Budget(*budget))
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------- rolled back


def test_an_older_copy_is_found_by_what_the_server_has_seen(ledger: Ledger, tmp_path: Path) -> None:
    ledger.charge(event(1))
    shutil.copy(ledger.path, tmp_path / "older")
    seen = ledger.charge(event(2)).ledger_head
    shutil.copy(tmp_path / "older", ledger.path)
    ledger.read()  # by itself it looks whole
    for use in (
        lambda: ledger.charge(event(2), known=seen),
        lambda: ledger.read(known=seen),
        lambda: ledger.kept(experiment="e", request="q", known=seen),
    ):
        with pytest.raises(LedgerFault, match="has seen entry 2, this ledger ends at 1: it was rolled back"):
            use()
    ledger.charge(event(2, 0.25))  # grown again, differently
    with pytest.raises(LedgerFault, match="entry 2 is not the one that the server has seen"):
        ledger.charge(event(3), known=seen)


def test_what_the_server_saw_earlier_is_still_in_the_chain(ledger: Ledger) -> None:
    first = ledger.charge(event(1)).ledger_head
    ledger.charge(event(2))
    assert ledger.charge(event(3), known=first).number == 3
    for nonsense in ("x", "99999999999999999999:a", "-1:b", ":"):
        with pytest.raises(LedgerFault):
            ledger.charge(event(4), known=nonsense)


# ------------------------------------------------------------------------------------ outbox


def test_an_outbox_that_was_changed_is_not_sent(ledger: Ledger) -> None:
    ledger.keep(ledger.charge(event(1)), experiment="one", request="a", body=b"noised")
    sql(ledger.path, "UPDATE outbox SET body = CAST('raw' AS BLOB)")
    with pytest.raises(LedgerFault, match="what was kept in the outbox has been changed"):
        ledger.kept(experiment="one", request="a")


def test_the_outbox_holds_the_last_answer_of_each_experiment(ledger: Ledger) -> None:
    account = ledger.charge(event(1))
    ledger.keep(account, experiment="one", request="a", body=b"\x00noised")
    ledger.keep(account, experiment="two", request="a", body=b"other")
    assert ledger.kept(experiment="one", request="a") == b"\x00noised"
    assert ledger.kept(experiment="one", request="b") is None
    ledger.keep(ledger.charge(event(2)), experiment="one", request="b", body=b"next")
    assert ledger.kept(experiment="one", request="a") is None
    assert ledger.kept(experiment="one", request="b") == b"next"
    assert ledger.kept(experiment="two", request="a") == b"other"


# ------------------------------------------------------------------ the operating system's faults


def charge_often(path: Path, times: int, results: multiprocessing.Queue[int]) -> None:
    paid = 0
    for turn in range(times):
        try:
            Ledger(path).charge(event(turn, 0.05))
            paid += 1
        except BudgetExceeded:
            pass
    results.put(paid)


def test_processes_that_charge_at_once_never_overspend_together(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "busy.ledger", site="a", budget=Budget(2.0))
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[int] = context.Queue()
    workers = [context.Process(target=charge_often, args=(ledger.path, 20, results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    paid = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(10)
    assert sum(paid) == 40  # of 60 tries: what the budget pays for
    assert ledger.read()[0].number == 40


def test_a_ledger_that_another_process_holds_is_waited_for_and_then_refused(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fed_dp.accounting.ledger.PATIENCE", 0.2)
    holder = sqlite3.connect(ledger.path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerFault, match="another process has held it"):
        ledger.charge(HALF)
    holder.execute("ROLLBACK")
    holder.close()
    assert ledger.charge(HALF).number == 1


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder that other users may enter, which pytest's own are not."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def in_child(work: Callable[[], object], *, before: Callable[[], object]) -> str:
    """Run in a forked process; return the LedgerFault it met, or what else happened."""
    out, into = os.pipe()
    if (child := os.fork()) == 0:
        try:
            before()
            work()
            os.write(into, b"it worked")
        except LedgerFault as error:
            os.write(into, str(error).encode())
        except BaseException as error:
            os.write(into, repr(error).encode())
        os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def test_a_ledger_that_cannot_be_written_refuses(outside: Path) -> None:
    ledger = Ledger.create(outside / "site.ledger", site="a", budget=Budget(9.0))
    ledger.charge(HALF)
    ledger.path.chmod(0o444)
    outside.chmod(0o555)
    nobody = (lambda: os.setuid(65534)) if os.getuid() == 0 else (lambda: None)
    said = in_child(lambda: ledger.charge(HALF), before=nobody)
    outside.chmod(0o755)
    assert "cannot be used" in said
    assert "nothing was sent" in said
    assert ledger.read()[0].number == 1


def test_a_full_disk_refuses_and_keeps_what_was_charged(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "site.ledger", site="a", budget=Budget(1e6))
    ledger.charge(HALF)
    size = ledger.path.stat().st_size

    def no_more_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    def charge() -> None:
        for turn in range(200):
            ledger.charge(event(turn))

    said = in_child(charge, before=no_more_room)
    assert "cannot be used" in said
    assert "disk full" in said
    account, entries = ledger.read()  # whole, and good to go on with
    assert account.number == len(entries) >= 1
    assert ledger.charge(HALF).number == account.number + 1


# ------------------------------------------------------------------------------- simulations


def test_virtual_clients_share_a_file_and_repeating_a_round_writes_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "ledgers.sqlite"
    start = Account.open("client-0", "digest", Budget(5.0))
    first, one = start.charge(event(1))
    write_accounts(path, {"client-0": (first, [one.to_json()])})
    second, two = first.charge(event(2))
    for _ in range(2):  # the crash came after the ledger and before the checkpoint
        write_accounts(path, {"client-0": (second, [two.to_json()])})
    assert Ledger(path, "client-0").read() == (second, [one, two])
    other, changed = first.charge(event(2, 0.25))  # the round was repeated, and went otherwise
    write_accounts(path, {"client-0": (other, [changed.to_json()])})
    assert Ledger(path, "client-0").read() == (other, [one, changed])
    write_accounts(path, {"client-0": (first, [])})  # … or failed before it was charged
    assert Ledger(path, "client-0").read() == (first, [one])
    with pytest.raises(LedgerFault, match="not the one that was asked for"):
        Ledger(path, "client-9").read()


def test_an_account_survives_json_and_a_plan_saves_the_sum() -> None:
    account = Account.open("a", "b", Budget(1.0, 1e-5))
    for turn in range(1, 4):
        account, entry = account.charge(event(turn, 0.3), planned=((event(1, 0.3).charge, 3),))
        assert Account.from_json(account.to_json()) == account
        assert entry.from_json(entry.to_json()) == entry
    with pytest.raises(BudgetExceeded):
        account.charge(event(4, 0.3), planned=((event(1, 0.3).charge, 4),))  # a plan over the budget
    with pytest.raises(BudgetExceeded):
        account.charge(event(4, 0.3), planned=((event(1, 0.3).charge, 3),))  # more than was planned


def test_a_plan_of_several_kinds_is_paid_for_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    first, later = (
        Event(Gaussian(20.0), "psgd", 1, 0, "simulation"),
        Event(SampledGaussian(2.0, 0.1, 5), "psgd", 2, 0, "simulation"),
    )
    planned = ((first.charge, 1), (later.charge, 4))
    cost = total(dict(planned), delta=1e-5)
    account = Account.open("a", "b", Budget(cost, 1e-5))
    added_up: list[int] = []
    monkeypatch.setattr(
        "fed_dp.accounting.account.total",
        lambda charges, *, delta: added_up.append(sum(charges.values())) or total(charges, delta=delta),
    )
    for event in (first, *[later] * 4):
        account, _ = account.charge(event, planned=planned)
    assert added_up == [5]  # the plan itself, once
    with pytest.raises(BudgetExceeded):
        account.charge(later, planned=planned)
    short = Account.open("a", "c", Budget(cost * 0.99, 1e-5))
    for event in (first, *[later] * 3):
        short, _ = short.charge(
            event, planned=planned
        )  # what the plan as a whole exceeds is added up each time
    with pytest.raises(BudgetExceeded):
        short.charge(later, planned=planned)


@pytest.mark.parametrize("field", ["number", "previous", "when", "seal"])
def test_every_field_of_an_entry_is_sealed(field: str) -> None:
    start = Account.open("a", "b", Budget(5.0))
    _, entry = start.charge(HALF)
    altered = json.loads(entry.to_json())
    altered[field] = 2 if field == "number" else "x"
    with pytest.raises(LedgerFault, match="entry 1 of site 'a' does not fit"):
        start.replay([type(entry).from_json(json.dumps(altered))])


# ----------------------------------------------------------------- the site's own second record


@pytest.fixture
def witnessed(tmp_path: Path) -> Ledger:
    Ledger.create(tmp_path / "site.ledger", site="ward 7", budget=Budget(9.0, 1e-6))
    (tmp_path / "keys").mkdir()
    return Ledger(tmp_path / "site.ledger", witness=tmp_path / "keys" / "ledger.last")


def test_an_older_copy_is_found_without_the_server(witnessed: Ledger, tmp_path: Path) -> None:
    witnessed.charge(event(1))
    older = tmp_path / "older"
    shutil.copy(witnessed.path, older)
    witnessed.charge(event(2))
    assert witnessed.read()[0].number == 2
    for name in (f"{witnessed.path}-wal", f"{witnessed.path}-shm"):
        Path(name).unlink(missing_ok=True)
    shutil.copy(older, witnessed.path)
    for attempt in (witnessed.read, lambda: witnessed.charge(event(3))):
        with pytest.raises(LedgerFault, match=r"this site's witness has seen entry 2.*rolled back"):
            attempt()
    assert Ledger(witnessed.path).read()[0].number == 1  # which the file alone cannot tell


def test_a_new_ledger_in_its_place_is_found(witnessed: Ledger) -> None:
    witnessed.charge(event(1))
    witnessed.path.unlink()
    Ledger.create(witnessed.path, site="ward 7", budget=Budget(9.0, 1e-6))
    with pytest.raises(LedgerFault, match=r"witness .* is of another ledger"):
        witnessed.read()


def test_a_charge_counts_whose_witness_cannot_be_written_and_nothing_is_sent(
    witnessed: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LedgerFault, match=r"cannot be written: No space left.*nothing was sent"):
        witnessed.charge(event(1))
    monkeypatch.undo()
    assert witnessed.read()[0].number == 1  # a witness that is behind is no fault
    witnessed.charge(event(2))
    assert witnessed.read()[0].number == 2


# ------------------------------------------------------------------------ what had no noise


def test_a_release_without_noise_is_entered_and_leaves_no_bound(ledger: Ledger) -> None:
    ledger.charge(event(1))
    bare = Event(Unprotected("upload"), "none", 2, 0, "none")
    ledger.charge(bare)
    account, entries = ledger.read()
    assert entries[-1].event == bare
    assert account.spent == math.inf
    assert account.spent_text == "no bound (with noise: 0.5)"
    assert ledger.charge(event(3)).metered == pytest.approx(1.0, rel=1e-4)  # noise is metered as before
    for turn in (4, 5):
        ledger.charge(event(turn))
    with pytest.raises(BudgetExceeded):
        ledger.charge(event(6))
    assert Account.from_json(account.to_json()) == account


def test_a_new_ledger_is_for_its_owner_alone(tmp_path: Path) -> None:
    """Its outbox may hold the noise of what was sent."""
    before = os.umask(0o022)
    try:
        path = Ledger.create(tmp_path / "own.ledger", site="a", budget=Budget(1.0)).path
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


def test_scores_are_entered_and_are_not_about_training_records(ledger: Ledger) -> None:
    account = ledger.charge(Event(Unprotected("scores"), "none", 2, 0, "none"))
    assert (account.scores, account.spent) == (1, 0.0)


def test_both_kinds_of_neighbours_in_one_ledger_are_metered_for_the_stronger(tmp_path: Path) -> None:
    """Two charges of ε = 1: one for a record that is zeroed out costs 2 for one that is replaced."""
    ledger = Ledger.create(tmp_path / "mixed.ledger", site="a", budget=Budget(2.9))
    ledger.charge(Event(Laplace(1.0), "statistics", 1, 0, "secure"))
    assert ledger.read()[0].spent == 1.0
    with pytest.raises(BudgetExceeded, match=r"bring ε to 3\.000"):
        ledger.charge(Event(Laplace(1.0), "svm", 2, 0, "secure"))


def test_what_is_kept_of_an_experiment_is_known_by_its_slots(ledger: Ledger) -> None:
    account = ledger.charge(event(1))
    assert ledger.slots(experiment="one") == set()
    ledger.keep(account, experiment="one", request="q", body=b"b", slot="stage 1")
    ledger.keep(account, experiment="one", request="r", body=b"b")
    assert ledger.slots(experiment="one") == {"", "stage 1"}
    assert ledger.slots(experiment="two") == set()


def test_only_the_last_answers_of_some_experiments_are_kept(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fed_dp.accounting.ledger.KEPT", 3)
    account = ledger.charge(event(1))
    for name in ("a", "b", "c", "a", "d"):
        for slot in ("", "stage 1"):
            ledger.keep(account, experiment=name, request="q", body=b"b", slot=slot)
    assert [name for name in "abcd" if ledger.slots(experiment=name)] == ["a", "c", "d"]


@pytest.mark.parametrize("wrong", [True, 1.0, -1, 2**63])
def test_nothing_is_written_that_could_not_be_read_again(wrong: Any) -> None:
    with pytest.raises(PrivacyError, match="round = "):
        Event(Laplace(0.5), "sparse_vector", wrong, 0, "secure")
