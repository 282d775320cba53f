"""Trainers, strategies, networks and data sets by name: the package's own and those of installed packages.

Each is a class that declares itself (its options, what it needs and offers, how it is built), registered
under an entry point: `fed_dp.trainers`, `fed_dp.strategies`, `fed_dp.models` or `fed_dp.datasets`. fed_dp's
own are registered in the same way, in its pyproject.toml. A class is imported when it is first asked for.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from pydantic import BeforeValidator

from fed_dp.errors import ConfigError
from fed_dp.options import Section

Kind = Literal["trainer", "strategy", "model", "data"]  # as the experiment's tables are called
GROUPS: dict[Kind, str] = {
    "trainer": "fed_dp.trainers",
    "strategy": "fed_dp.strategies",
    "model": "fed_dp.models",
    "data": "fed_dp.datasets",
}


def names(kind: Kind) -> tuple[str, ...]:
    """Return the names of all components of a kind, sorted."""
    return tuple(_registered(kind))


def built_in(kind: Kind) -> tuple[str, ...]:
    """Return the names of fed_dp's own components of a kind."""
    return tuple(
        name
        for name, entries in _registered(kind).items()
        if all(entry.value.startswith("fed_dp.") for entry in entries)
    )


@lru_cache(maxsize=256)
def find(kind: Kind, name: str) -> type[Any]:
    """Return the class of a component.

    Raises
    ------
    ConfigError
        When there is none of this name, two packages have one each, or it cannot be imported.
    """
    if (found := _registered(kind).get(name)) is None:
        raise ConfigError(f"{kind}.name = {name!r}: expected one of {', '.join(map(repr, names(kind)))}")
    if len(found) > 1:
        raise ConfigError(
            f"{kind}.name = {name!r} is registered by {' and by '.join(e.value for e in found)}"
        )
    [entry] = found
    try:
        component = entry.load()
    except Exception as error:
        raise ConfigError(
            f"{kind}.name = {name!r}: {entry.value} cannot be imported ({type(error).__name__}: {error})"
        ) from error
    if not (isinstance(component, type) and issubclass(component, Section)):
        raise ConfigError(f"{kind}.name = {name!r}: {entry.value} is not a class derived from Section")
    return component


def components(kind: Kind) -> dict[str, type[Any]]:
    """Return all components of a kind by name; this imports them."""
    return {name: find(kind, name) for name in names(kind)}


def read(kind: Kind, value: Any, *, default: str | None = None) -> Any:
    """Return the component that a table describes; anything but a table is returned as it is."""
    if not isinstance(value, dict):
        return value
    table = dict(value)
    name = table.setdefault("name", default)
    if not isinstance(name, str):
        raise ValueError(
            f"{kind}.name is missing" if name is None else f"{kind}.name = {name!r}: expected a name"
        )
    try:
        component: type[Section] = find(kind, name)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return component.model_validate(table)


def by_name(kind: Kind, *, default: str | None = None) -> BeforeValidator:
    """Return what turns a table into the component that its name asks for, as a field's annotation."""
    return BeforeValidator(lambda value: read(kind, value, default=default))


@lru_cache(maxsize=4)
def _registered(kind: Kind) -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entry_points(group=GROUPS[kind]), key=lambda entry: (entry.name, entry.value)):
        found.setdefault(entry.name, []).append(entry)
    return found
