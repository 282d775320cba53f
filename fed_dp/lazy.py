"""Names of a package that are imported when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def exports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`: `modules` says in which of its modules each name is.

    Where it has another name there: "module:other".

    An experiment is read without torch, pandas or dp-accounting, which take seconds to import.
    """

    def get(name: str) -> Any:
        if (module := modules.get(name)) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, _, other = module.partition(":")
        return getattr(import_module(f"{package}.{home}"), other or name)

    return get
