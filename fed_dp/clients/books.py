"""A site's books: where it charges its releases before noise is drawn, and keeps what it sent.

A deployed site has a ledger on disk, named by its own operator. A virtual client has its account in
its state: there, the same seed gives the same bytes again, so nothing needs to be kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from fed_dp.accounting import Account, Budget, Event, Ledger
from fed_dp.errors import LedgerFault

SCORES = "scores"  # the slot of an experiment's one answer how well its model does


@dataclass(frozen=True, slots=True)
class Question:
    """What the server asks: a turn, from these weights; `known` is the site's mark that it has seen.

    A `slot` of its own has what later messages may ask again and again: a stage's statistic, under this
    encoder; the scores of a model.
    """

    turn: int
    data: bytes
    known: str | None
    slot: str = ""

    def about(self, stage: int, frozen: bytes) -> Question:
        """Return the question about a stage that this one comes down to."""
        return Question(stage, b"statistic of " + frozen, self.known, slot=f"stage {stage}")

    def scores(self) -> Question:
        """Return the question how well these weights do."""
        return Question(0, b"scores of " + self.data, self.known, slot=SCORES)

    @property
    def identity(self) -> str:
        """The same for the same question, asked again."""
        return hashlib.sha256(self.turn.to_bytes(8, "big") + self.data).hexdigest()


@dataclass(frozen=True, slots=True)
class Answer:
    """What leaves the site."""

    data: bytes
    metrics: dict[str, float]
    told: dict[str, Any]

    def pack(self) -> bytes:
        """Write it for the outbox."""
        return json.dumps([self.metrics, self.told]).encode() + b"\n" + self.data

    @classmethod
    def unpack(cls, body: bytes) -> Answer:
        """Read it back."""
        head, _, data = body.partition(b"\n")
        metrics, told = json.loads(head)
        return cls(data, metrics, told)


class Books(Protocol):
    """Where a site charges, and keeps what it sent."""

    @property
    def mark(self) -> str:
        """Where the account stands."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Answer one question at a time: two copies of one must not both be charged."""
        ...

    def kept(self, question: Question) -> Answer | None:
        """Return what was sent in answer to the same question before; then it costs nothing to repeat."""
        ...

    def charge(self, event: Event, question: Question, *, ahead: int) -> Account:
        """Charge a release. Only when this has returned may its noise be drawn."""
        ...

    def keep(self, account: Account, question: Question, answer: Answer) -> None:
        """Keep what is about to be sent."""
        ...


@dataclass(frozen=True, slots=True)
class SiteBooks:
    """A deployed site's: durable."""

    ledger: Ledger
    experiment: str  # the digest: whose outbox it is

    @property
    def mark(self) -> str:
        """Where the ledger stands."""
        return self.ledger.read()[0].mark

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold a lock beside the ledger; the system lets go of it when the process dies."""
        path = self.ledger.path.with_name(self.ledger.path.name + ".lock")
        if not self.ledger.path.is_file():  # whatever is asked of it next says so
            yield
            return
        try:
            handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise LedgerFault(
                f"ledger lock {path} cannot be used: {error.strerror}; nothing was sent"
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def kept(self, question: Question) -> Answer | None:
        """Look into the outbox."""
        body = self.ledger.kept(experiment=self.experiment, question=question.identity, known=question.known)
        return None if body is None else Answer.unpack(body)

    def charge(self, event: Event, question: Question, *, ahead: int) -> Account:
        """Charge on disk."""
        return self.ledger.charge(event, known=question.known, ahead=ahead)

    def keep(self, account: Account, question: Question, answer: Answer) -> None:
        """Put it into the outbox."""
        self.ledger.keep(
            account,
            experiment=self.experiment,
            question=question.identity,
            body=answer.pack(),
            slot=question.slot,
        )


@dataclass(slots=True)
class VirtualBooks:
    """A virtual client's: an account, the entries that nobody has written down yet, and lasting answers."""

    account: Account
    new: list[str] = field(default_factory=list)
    lasting: dict[str, bytes] = field(default_factory=dict)

    @property
    def mark(self) -> str:
        """Where the account stands."""
        return self.account.mark

    @classmethod
    def open(cls, client: int, experiment: str, budget: Budget) -> VirtualBooks:
        """Open a virtual client's account."""
        return cls(Account.open(f"client-{client:04d}", experiment, budget))

    def alone(self) -> AbstractContextManager[None]:
        """Wait for nobody: a virtual client answers in one place."""
        return nullcontext()

    def kept(self, question: Question) -> Answer | None:
        """Return what lasts; of the rest nothing, for the same seed gives the same bytes."""
        account = self.account
        number = (question.known or "").partition(":")[0]
        if number.isdecimal() and int(number) >= account.number and question.known != account.mark:
            raise LedgerFault(
                f"the server has seen entry {number} of the ledger of {account.site}, which ends at "
                f"{account.number}: it was rolled back; nothing was sent"
            )
        body = self.lasting.get(question.identity) if question.slot else None
        return None if body is None else Answer.unpack(body)

    def charge(self, event: Event, question: Question, *, ahead: int) -> Account:
        """Charge in memory."""
        self.account, entry = self.account.charge(event, ahead=ahead)
        self.new.append(entry.to_json())
        return self.account

    def keep(self, account: Account, question: Question, answer: Answer) -> None:
        """Keep what lasts."""
        if question.slot:
            self.lasting[question.identity] = answer.pack()
