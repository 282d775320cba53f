"""Guarantees: what holds of a release, for whom, and whether it is proved.

proved    there is a proof, and the code is held to its conditions
claimed   a paper says so; its proof does not cover what is done, or nobody has checked it
refuted   a counterexample is known: the stated ε does not hold
none      released without noise: no ε bounds it

Neighbours are two data sets of one site that differ in one record (or, where the unit is a participant, in
all of them):

add/remove one   one of them has a record more. The number of records n is protected, too: nothing that is
                 released is divided by n or tells it
zero-out one     in one of them a null record stands in a record's place, one that contributes nothing. Both
                 have the same n, which is public: sums are divided by it
replace one      one record differs. Both have the same n, which is public. The strongest of the three for
                 what it protects of a record: at twice the sensitivity, the others imply it

Events name their guarantee. Its words stand with the trainer or the strategy that makes the releases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from fed_dp import plugins
from fed_dp.errors import ConfigError, PrivacyError

Status = Literal["proved", "claimed", "refuted", "none"]
Unit = Literal["record", "participant"]
Neighbours = Literal["add/remove one", "zero-out one", "replace one"]

_KINDS: tuple[plugins.Kind, ...] = ("trainer", "strategy")

PUBLIC_COUNT = "the number of records of each site is public"
DECLARED_COUNT = "data.expected_records is public, and was not chosen by looking at the records"
ASSUMPTIONS = (
    "bounds, categories and standardisation constants are public",
    "test records are the server's and are not protected: every score is computed on them as they are",
    "choosing hyper-parameters is not counted",
)


@dataclass(frozen=True, slots=True)
class Guarantee:
    """What holds of a release. `unit` is what may change between neighbours: a record, or all of a site's."""

    name: str
    status: Status
    unit: Unit
    neighbours: Neighbours
    reason: str

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What it rests on beside its proof."""
        if self.unit == "participant":
            return (
                "a site that tells how many records it has (share.records) takes that to be public",
                *ASSUMPTIONS,
            )
        return (DECLARED_COUNT if self.neighbours == "add/remove one" else PUBLIC_COUNT, *ASSUMPTIONS)

    @property
    def relation(self) -> Neighbours | None:
        """Which neighbours a record's total is composed for; None: it holds for any change of records."""
        return None if self.unit == "participant" else self.neighbours


def common(relations: Iterable[Neighbours | None]) -> Neighbours | None:
    """Return for which neighbours a total of such guarantees can be stated: the strongest among them."""
    found = {relation for relation in relations if relation is not None}
    return max(found, key=get_args(Neighbours).index, default=None)


NONE = Guarantee(
    "none",
    "none",
    "record",
    "add/remove one",
    "released without noise, as the site's own file allows: no ε bounds what it tells",
)
BY_AUTHOR = Guarantee(
    "by_author",
    "claimed",
    "record",
    "add/remove one",
    "the app adds its own noise, and its author says how much: nothing here checks that",
)
WORST: tuple[Status, ...] = ("none", "refuted", "claimed", "proved")


def guarantees() -> Mapping[str, Guarantee]:
    """Return all guarantees by name: what installed trainers and strategies declare, and the two above.

    Those of components that were found by import path count in this process alone.

    Raises
    ------
    PrivacyError
        When two that differ have one name.
    """
    return _declared(plugins.found_by_path(), everybodys=True)


def declared(name: str) -> Guarantee | None:
    """Return a guarantee by its name, or None. Other packages are imported only if fed_dp has none."""
    by_path = plugins.found_by_path()
    found = _declared(by_path, everybodys=False).get(name)
    return found or _declared(by_path, everybodys=True).get(name)


@lru_cache(maxsize=8)
def _declared(
    by_path: tuple[tuple[plugins.Kind, type[Any]], ...], *, everybodys: bool
) -> Mapping[str, Guarantee]:
    found = {NONE.name: NONE, BY_AUTHOR.name: BY_AUTHOR}
    for kind in _KINDS:
        for name in plugins.names(kind) if everybodys else plugins.built_in(kind):
            try:
                given: tuple[Guarantee, ...] = plugins.find(kind, name).guarantees
            except ConfigError:  # one broken plug-in makes no ledger unreadable that does not name it
                continue
            for guarantee in given:
                if found.setdefault(guarantee.name, guarantee) != guarantee:
                    raise PrivacyError(
                        f"guarantee {guarantee.name!r} is declared twice, {kind}.name = {name!r}"
                    )
    for kind, component in by_path:
        for guarantee in getattr(component, "guarantees", ()):
            if found.setdefault(guarantee.name, guarantee) != guarantee:
                raise PrivacyError(
                    f"guarantee {guarantee.name!r} is declared twice, also by {kind} {component.__qualname__}"
                )
    return found


def guarantee(name: str) -> Guarantee:
    """Return a guarantee by its name.

    Raises
    ------
    PrivacyError
        When no installed trainer or strategy declares it.
    """
    if (found := declared(name)) is None:
        raise PrivacyError(f"guarantee {name!r} is not declared by any trainer or strategy that is installed")
    return found
