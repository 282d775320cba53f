"""Trainers, strategies, networks, data sets and tasks by name: fed_dp's own and installed packages' own.

Each is a class that declares itself (its options, what it needs and offers, how it is built), registered
under an entry point: `fed_dp.trainers`, `fed_dp.strategies`, `fed_dp.models`, `fed_dp.datasets` or
`fed_dp.tasks`. fed_dp's own are registered in the same way, in its pyproject.toml. A class is imported when
it is first asked for. In place of a name there may be an import path, "package.module:name", and a program
that calls fed_dp may `share` objects of its own under one.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal

from pydantic import BeforeValidator

from fed_dp.errors import ConfigError
from fed_dp.options import Section

Kind = Literal["trainer", "strategy", "model", "data", "task"]  # as the experiment's tables are called
GROUPS: dict[Kind, str] = {
    "trainer": "fed_dp.trainers",
    "strategy": "fed_dp.strategies",
    "model": "fed_dp.models",
    "data": "fed_dp.datasets",
    "task": "fed_dp.tasks",
}


def names(kind: Kind) -> tuple[str, ...]:
    """Return the names of all components of a kind, sorted."""
    return tuple(_registered(kind))


def entries(kind: Kind, name: str) -> list[EntryPoint]:
    """Return the entry points that register a name: more than one where packages are at odds."""
    return list(_registered(kind).get(name, ()))


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
    if ":" in name:
        component = _component(imported(name, key=f"{kind}.name"), kind, name, name)
        _BY_PATH[kind, name] = component
        return component
    if (found := _registered(kind).get(name)) is None:
        raise ConfigError(
            f"{kind}.name = {name!r}: expected one of {', '.join(map(repr, names(kind)))}, or an import "
            "path, package.module:name"
        )
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
    return _component(component, kind, name, entry.value)


_BY_PATH: dict[tuple[Kind, str], type[Any]] = {}


def found_by_path() -> tuple[tuple[Kind, type[Any]], ...]:
    """Return the components that this process has found by import path so far, with their kinds."""
    return tuple((kind, component) for (kind, _), component in _BY_PATH.items())


def _component(component: Any, kind: Kind, name: str, path: str) -> type[Any]:
    if not (isinstance(component, type) and issubclass(component, Section)):
        raise ConfigError(f"{kind}.name = {name!r}: {path} is not a class derived from Section")
    return component


Shared = tuple[Any, str]  # an object, and the SHA-256 of its code, which another process may not have
_SHARED: dict[str, Shared] = {}  # objects of the program that calls fed_dp, by import path


def share(path: str, value: Any) -> None:
    """Let an object be found under an import path: one that no module holds."""
    adopt({path: (value, code_of(value))})


def shared() -> dict[str, Shared]:
    """Return all objects that are shared: other processes of the same run `adopt` them."""
    return dict(_SHARED)


def adopt(objects: Mapping[str, Shared]) -> None:
    """Share what another process of the same run shares."""
    _SHARED.update(objects)
    find.cache_clear()


def imported(path: str, *, key: str) -> Any:
    """Return the object of an import path, "package.module:name".

    Raises
    ------
    ConfigError
        When there is no such module or object, or the module raises while it is imported. `key` says whose
        value the path is.
    """
    if path in _SHARED:
        return _SHARED[path][0]
    module, colon, name = path.partition(":")
    if not (colon and name and all(part.isidentifier() for part in (*module.split("."), *name.split(".")))):
        raise ConfigError(f"{key} = {path!r}: expected an import path, package.module:name")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise ConfigError(f"{key} = {path!r}: there is no module {error.name!r}") from None
        raise ConfigError(
            f"{key} = {path!r}: {module} needs {error.name!r}, which is not installed"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{key} = {path!r}: {module} cannot be imported ({type(error).__name__}: {error})"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{key} = {path!r}: {module} has no {name!r}")
        found = getattr(found, part)
    return found


def code_of(value: Any) -> str:
    """Return a SHA-256 of the code that an object is made by: its module's file, or its own source.

    Objects of `__main__` (a script, a notebook) are known by their own source: the rest of it may change.
    """
    for kept, code in _SHARED.values():
        if kept is value:
            return code
    made = value if inspect.isclass(value) or inspect.isroutine(value) else type(value)
    try:
        if made.__module__ == "__main__":
            text = inspect.getsource(made).encode()
        else:
            text = Path(inspect.getfile(made)).read_bytes()
    except (OSError, TypeError):  # typed in, or built in
        text = f"{made.__module__}:{made.__qualname__}".encode()
    return f"sha256:{hashlib.sha256(text).hexdigest()}"


def same_code(path: str, noted: str | None, *, key: str) -> str:
    """Return the code of what an import path names.

    Raises
    ------
    ConfigError
        When it is not there, or other code than was noted.
    """
    found = code_of(imported(path, key=f"{key}.factory"))
    if noted not in (None, found):
        raise ConfigError(f"{key}.code = {noted!r}: the code of {path!r} is {found!r} here")
    return found


def foreign_code(component: Any) -> str | None:
    """Return the code of another package's component, with that package's version; None for fed_dp's own."""
    made = component if isinstance(component, type) else type(component)
    package = made.__module__.partition(".")[0]
    if package == "fed_dp":
        return None
    version = getattr(sys.modules.get(package), "__version__", "")
    return f"{made.__module__}:{made.__qualname__} {version} {code_of(made)}"


def components(kind: Kind) -> dict[str, type[Any]]:
    """Return all components of a kind by name; this imports them, those of other packages, too."""
    return {name: find(kind, name) for name in names(kind)}


def own_components(kind: Kind) -> dict[str, type[Any]]:
    """Return fed_dp's own components of a kind by name: a site that names them imports nothing else."""
    return {name: find(kind, name) for name in built_in(kind)}


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
    if ":" not in name:
        return component.model_validate(table)
    del table["name"]  # it may be registered under another, or none
    if component.model_fields["name"].is_required():
        table["name"] = name
    return component.model_validate(table).model_copy(update={"name": name})


def by_name(kind: Kind, *, default: str | None = None) -> BeforeValidator:
    """Return what turns a table into the component that its name asks for, as a field's annotation."""
    return BeforeValidator(lambda value: read(kind, value, default=default))


@lru_cache(maxsize=8)
def _registered(kind: Kind) -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entry_points(group=GROUPS[kind]), key=lambda entry: (entry.name, entry.value)):
        found.setdefault(entry.name, []).append(entry)
    return found
