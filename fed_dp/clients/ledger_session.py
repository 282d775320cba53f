"""A site's ledger session: where it charges its releases before noise is drawn, and keeps what it sent.

A deployed site has a ledger on disk, named by its own operator. A virtual client has its account in
its state: there, the same seed gives the same bytes again, so nothing needs to be kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flwr.app import ConfigRecord, Context

from fed_dp.accounting import Account, Budget, Event, Ledger
from fed_dp.accounting.account import Planned
from fed_dp.errors import LedgerFault
from fed_dp.sharing.message import LEDGER

SCORES = "scores"  # the slot of an experiment's one response how well its model does
_SCORES_OF = b"scores of "
_ACCOUNT, _NEW, _LASTING, _BODIES = "account", "new", "lasting", "bodies"  # in a virtual client's state


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """What the server asks: a round, from these weights; `known` is the ledger head that it has seen.

    A `slot` of its own has what later messages may ask again and again: a stage's statistic, under this
    encoder; the scores of a model.
    """

    server_round: int
    data: bytes
    known: str | None
    slot: str = ""

    def about(self, stage: int, frozen: bytes) -> TrainRequest:
        """Return the request for a stage's statistic that this one comes down to."""
        return TrainRequest(stage, b"statistic of " + frozen, self.known, slot=f"stage {stage}")

    def for_scores(self) -> TrainRequest:
        """Return the request for the scores of these weights."""
        return TrainRequest(0, _SCORES_OF + self.data, self.known, slot=SCORES)

    @property
    def scored_weights(self) -> bytes:
        """The weights whose scores are asked for."""
        return self.data.removeprefix(_SCORES_OF)

    @property
    def identity(self) -> str:
        """The same for the same request, sent again."""
        return hashlib.sha256(self.server_round.to_bytes(8, "big") + self.data).hexdigest()


@dataclass(frozen=True, slots=True)
class TrainResponse:
    """What leaves the site."""

    data: bytes
    metrics: dict[str, float]
    metadata: dict[str, Any]

    def pack(self) -> bytes:
        """Write it for the outbox."""
        return json.dumps([self.metrics, self.metadata]).encode() + b"\n" + self.data

    @classmethod
    def unpack(cls, body: bytes) -> TrainResponse:
        """Read it back."""
        head, _, data = body.partition(b"\n")
        metrics, metadata = json.loads(head)
        return cls(data, metrics, metadata)


class LedgerSession(Protocol):
    """Where a site charges, and keeps what it sent."""

    @property
    def head(self) -> str:
        """The number and seal of the account's last entry."""
        ...

    @property
    def account(self) -> Account:
        """The account as it stands."""
        ...

    def slots(self) -> set[str]:
        """Return the slots in which a real site keeps something of this experiment."""
        ...

    def kept(self, request: TrainRequest) -> TrainResponse | None:
        """Return what was sent in response to the same request before; then it costs nothing to repeat."""
        ...

    def charge(self, event: Event, request: TrainRequest, *, planned: Planned = ()) -> Account:
        """Charge a release. Only when this has returned may its noise be drawn."""
        ...

    def keep(self, account: Account, request: TrainRequest, response: TrainResponse) -> None:
        """Keep what is about to be sent."""
        ...


@contextmanager
def exclusive(ledger: Path) -> Iterator[None]:
    """Hold a lock beside a ledger; the system lets go of it when the process dies."""
    if not ledger.is_file():  # whatever is asked of it next says so
        yield
        return
    path = ledger.with_name(ledger.name + ".lock")
    try:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise LedgerFault(f"ledger lock {path} cannot be used: {error.strerror}; nothing was sent") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class SiteLedgerSession:
    """A deployed site's: durable."""

    ledger: Ledger
    experiment: str  # the digest: whose outbox it is

    @property
    def head(self) -> str:
        """The number and seal of the ledger's last entry."""
        return self.ledger.read()[0].ledger_head

    @property
    def account(self) -> Account:
        """Read it from the ledger."""
        return self.ledger.read()[0]

    def slots(self) -> set[str]:
        """Return those of the outbox."""
        return self.ledger.slots(experiment=self.experiment)

    def kept(self, request: TrainRequest) -> TrainResponse | None:
        """Look into the outbox."""
        body = self.ledger.kept(experiment=self.experiment, request=request.identity, known=request.known)
        return None if body is None else TrainResponse.unpack(body)

    def charge(self, event: Event, request: TrainRequest, *, planned: Planned = ()) -> Account:
        """Charge on disk."""
        return self.ledger.charge(event, known=request.known, planned=planned)

    def keep(self, account: Account, request: TrainRequest, response: TrainResponse) -> None:
        """Put it into the outbox."""
        self.ledger.keep(
            account,
            experiment=self.experiment,
            request=request.identity,
            body=response.pack(),
            slot=request.slot,
        )


@dataclass(slots=True)
class VirtualLedgerSession:
    """A virtual client's: an account, the entries that nobody has written down yet, and lasting responses.

    With a `context`, every change is put into the client's state at once.
    """

    account: Account
    new: list[str] = field(default_factory=list)
    lasting: dict[str, bytes] = field(default_factory=dict)
    context: Context | None = None

    @classmethod
    def open(cls, client: int, experiment: str, budget: Budget, context: Context) -> VirtualLedgerSession:
        """Open a virtual client's account."""
        return cls(Account.open(f"client-{client:04d}", experiment, budget), context=context)

    @classmethod
    def of(cls, context: Context) -> VirtualLedgerSession | None:
        """Return a virtual client's session from its state, if it has any."""
        record = context.state.get(LEDGER)
        if not isinstance(record, ConfigRecord):
            return None
        new = [str(entry) for entry in record[_NEW]]  # type: ignore[union-attr]
        identities, bodies = record.get(_LASTING, []), record.get(_BODIES, [])
        lasting = dict(zip(identities, bodies, strict=True))  # type: ignore[arg-type]
        return cls(Account.from_json(str(record[_ACCOUNT])), new, lasting, context)  # type: ignore[arg-type]

    @property
    def head(self) -> str:
        """The number and seal of the account's last entry."""
        return self.account.ledger_head

    def slots(self) -> set[str]:
        """None: a virtual client is asked once."""
        return set()

    def kept(self, request: TrainRequest) -> TrainResponse | None:
        """Return what lasts; of the rest nothing, for the same seed gives the same bytes."""
        account = self.account
        number = (request.known or "").partition(":")[0]
        if number.isdecimal() and int(number) >= account.number and request.known != account.ledger_head:
            raise LedgerFault(
                f"the server has seen entry {number} of the ledger of {account.site}, which ends at "
                f"{account.number}: it was rolled back; nothing was sent"
            )
        body = self.lasting.get(request.identity) if request.slot else None
        return None if body is None else TrainResponse.unpack(body)

    def charge(self, event: Event, request: TrainRequest, *, planned: Planned = ()) -> Account:
        """Charge in memory."""
        self.account, entry = self.account.charge(event, planned=planned)
        self.new.append(entry.to_json())
        self.store()
        return self.account

    def keep(self, account: Account, request: TrainRequest, response: TrainResponse) -> None:
        """Keep what lasts."""
        if request.slot:
            self.lasting[request.identity] = response.pack()
            self.store()

    def store(self) -> None:
        """Put it into the client's state."""
        if self.context is not None:
            self.context.state[LEDGER] = ConfigRecord(
                {
                    _ACCOUNT: self.account.to_json(),
                    _NEW: list(self.new),
                    _LASTING: list(self.lasting),
                    _BODIES: list(self.lasting.values()),
                }
            )
