"""A site's books: where it charges its releases before noise is drawn, and keeps what it sent.

A deployed site has a ledger on disk, named by its own operator. A virtual client has its account in
its state: there, the same seed gives the same bytes again, so nothing needs to be kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from fed_dp.accounting import Account, Budget, Event, Ledger
from fed_dp.errors import LedgerFault


class Books(Protocol):
    """Where a site charges, and keeps what it sent."""

    def kept(self, question: str, known: str | None) -> bytes | None:
        """Return what was sent in answer to the same question before; then it costs nothing to repeat."""
        ...

    def charge(self, event: Event, *, known: str | None, ahead: int) -> Account:
        """Charge a release. Only when this has returned may its noise be drawn."""
        ...

    def keep(self, account: Account, question: str, body: bytes) -> None:
        """Keep what is about to be sent."""
        ...


@dataclass(frozen=True, slots=True)
class SiteBooks:
    """A deployed site's: durable."""

    ledger: Ledger
    experiment: str  # the digest: whose outbox it is

    def kept(self, question: str, known: str | None) -> bytes | None:
        """Look into the outbox."""
        return self.ledger.kept(experiment=self.experiment, question=question, known=known)

    def charge(self, event: Event, *, known: str | None, ahead: int) -> Account:
        """Charge on disk."""
        return self.ledger.charge(event, known=known, ahead=ahead)

    def keep(self, account: Account, question: str, body: bytes) -> None:
        """Put it into the outbox."""
        self.ledger.keep(account, experiment=self.experiment, question=question, body=body)


@dataclass(slots=True)
class VirtualBooks:
    """A virtual client's: an account, and the entries that nobody has written down yet."""

    account: Account
    new: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, client: int, experiment: str, budget: Budget) -> VirtualBooks:
        """Open a virtual client's account."""
        return cls(Account.open(f"client-{client:04d}", experiment, budget))

    def kept(self, question: str, known: str | None) -> bytes | None:
        """Return nothing: the same seed gives the same bytes."""
        account = self.account
        number = (known or "").partition(":")[0]
        if number.isdecimal() and int(number) >= account.number and known != account.mark:
            raise LedgerFault(
                f"the server has seen entry {number} of the ledger of {account.site}, which ends at "
                f"{account.number}: it was rolled back; nothing was sent"
            )
        return None

    def charge(self, event: Event, *, known: str | None, ahead: int) -> Account:
        """Charge in memory."""
        self.account, entry = self.account.charge(event, ahead=ahead)
        self.new.append(entry.to_json())
        return self.account

    def keep(self, account: Account, question: str, body: bytes) -> None:
        """Keep nothing."""
