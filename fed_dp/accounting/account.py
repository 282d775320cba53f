"""An account: what a site may spend and has spent, as a chain of entries, each sealing the one before.

Pure: no file, no clock. `ledger` makes it durable; simulations keep it with the virtual client.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from fed_dp.accounting.composition import MIN_DELTA, total
from fed_dp.accounting.events import Charge, Event, Unprotected, event_of, plain, release_of
from fed_dp.errors import BudgetExceeded, LedgerFault, PrivacyError

Planned = tuple[tuple[Charge, int], ...]  # charges, and how often
_ROUNDING = 1 + 1e-9  # n equal parts of a budget may add up to a bit more than it


@dataclass(frozen=True, slots=True)
class Budget:
    """The most a site ever spends: (ε, δ), over all runs that use its account. δ = 0: pure ε only."""

    epsilon: float
    delta: float = 0.0

    def __post_init__(self) -> None:
        if not (isinstance(self.epsilon, float | int) and 0 < self.epsilon <= 1e9):
            raise PrivacyError(f"budget epsilon = {self.epsilon!r}: expected above 0, at most 1e9")
        if not (isinstance(self.delta, float | int) and (self.delta == 0 or MIN_DELTA <= self.delta < 1)):
            raise PrivacyError(f"budget delta = {self.delta!r}: expected 0, or from {MIN_DELTA:g} to 1")
        for key in ("epsilon", "delta"):  # 4 and 4.0 are one budget, and sealed alike
            object.__setattr__(self, key, float(getattr(self, key)))

    def pays(self, charges: dict[Charge, int]) -> bool:
        """Return whether all these charges together stay within it."""
        return total(charges, delta=self.delta) <= self.epsilon * _ROUNDING


@dataclass(frozen=True, slots=True)
class Entry:
    """One charge. `seal` is the hash of everything in it and, through `previous`, of all before it."""

    number: int
    previous: str
    event: Event
    when: str
    seal: str

    @classmethod
    def make(cls, number: int, previous: str, event: Event, when: str) -> Entry:
        """Seal a new entry."""
        content = {"number": number, "previous": previous, "event": event.tables(), "when": when}
        return cls(number, previous, event, when, _hash(content))

    def to_json(self) -> str:
        """Write the entry."""
        return json.dumps({**plain(self), "event": self.event.tables()})

    @classmethod
    def from_json(cls, text: str) -> Entry:
        """Read an entry; its seal is checked where the chain is."""
        item: dict[str, Any] = json.loads(text)
        return cls(**{**item, "event": event_of(item["event"])})


@dataclass(frozen=True, slots=True)
class Account:
    """Where a chain of entries stands: their number, the last seal, and what they add up to."""

    site: str
    identity: str
    budget: Budget
    number: int
    head: str
    charges: tuple[tuple[Charge, int], ...] = ()  # what was charged with noise, and how often
    unprotected: int = 0  # how often records' uploads left without noise, as the site allowed
    scores: int = 0  # how often scores on its test records did

    @classmethod
    def open(cls, site: str, identity: str, budget: Budget) -> Account:
        """Open an account; site, identity and budget are sealed and never change."""
        content = {"site": site, "identity": identity, "budget": plain(budget)}
        return cls(site, identity, budget, 0, _hash(content))

    @property
    def spent(self) -> float:
        """The ε of everything released about its training records, at the budget's δ: ∞ without noise."""
        return math.inf if self.unprotected else self.metered

    @property
    def metered(self) -> float:
        """The ε of everything charged with noise, at the budget's δ: what the budget is compared with."""
        return total(dict(self.charges), delta=self.budget.delta)

    @property
    def spent_text(self) -> str:
        """What was spent, as it stands in tables."""
        return f"no bound (with noise: {self.metered:.4g})" if self.unprotected else f"{self.metered:.4g}"

    @property
    def ledger_head(self) -> str:
        """The last entry as the server records it: NUMBER:SEAL."""
        return f"{self.number}:{self.head}"

    def charge(self, event: Event, *, when: str = "", planned: Planned = ()) -> tuple[Account, Entry]:
        """Return the account with one more entry, and the entry.

        Raises BudgetExceeded when the budget cannot pay. `planned` says what all is planned to be charged,
        and how often: if the budget pays for all of it, a part need not be added up again. What is
        released without noise is entered, too: no budget bounds it, so it is for the site's file to refuse.
        """
        if not isinstance(event.release, Unprotected):
            self._check(event, planned)
        entry = Entry.make(self.number + 1, self.head, event, when)
        return self._with(entry), entry

    def replay(self, entries: Iterable[Entry]) -> Account:
        """Follow a chain; a LedgerFault names the first entry that does not fit."""
        account = self
        for entry in entries:
            expected = Entry.make(account.number + 1, account.head, entry.event, entry.when)
            if entry != expected:
                raise LedgerFault(f"entry {account.number + 1} of site {self.site!r} does not fit the chain")
            account = account._with(entry)
        return account

    def _check(self, event: Event, planned: Planned) -> None:
        after, whole = self._plus(event), dict(planned)
        foreseen = all(count <= whole.get(charge, 0) for charge, count in after.items())
        if not (foreseen and _pays(self.budget, tuple(planned))) and not self.budget.pays(after):
            raise BudgetExceeded(
                f"client {event.client}, round {event.round}: this round would bring ε to "
                f"{total(after, delta=self.budget.delta):.3f}, over the budget of {self.budget.epsilon:g} "
                f"(δ = {self.budget.delta:g}); nothing was sent"
            )

    def _plus(self, event: Event) -> dict[Charge, int]:
        after = dict(self.charges)
        after[event.charge] = after.get(event.charge, 0) + 1
        return after

    def _with(self, entry: Entry) -> Account:
        after = replace(self, number=entry.number, head=entry.seal)
        if not isinstance(release := entry.event.release, Unprotected):
            return replace(after, charges=tuple(self._plus(entry.event).items()))
        if release.of == "scores":
            return replace(after, scores=self.scores + 1)
        return replace(after, unprotected=self.unprotected + 1)

    def to_json(self) -> str:
        """Write the account for a virtual client's state."""
        charges = [(plain(release), relation, count) for (release, relation), count in self.charges]
        return json.dumps({**plain(self), "budget": plain(self.budget), "charges": charges})

    @classmethod
    def from_json(cls, text: str) -> Account:
        """Read an account."""
        item = json.loads(text)
        charges = tuple(
            ((release_of(release), relation), int(count)) for release, relation, count in item["charges"]
        )
        return cls(**{**item, "budget": Budget(**item["budget"]), "charges": charges})


@lru_cache(maxsize=256)
def _pays(budget: Budget, planned: Planned) -> bool:
    return budget.pays(dict(planned))


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
