"""Packages that only some uses need: extras, which are installed by themselves."""

from __future__ import annotations

from importlib.util import find_spec

from fed_dp.errors import ConfigError


def installed(package: str) -> bool:
    """Return whether a package is there, without importing it."""
    try:
        return find_spec(package) is not None
    except ValueError:  # an import of it is under way, or was made to fail
        return False


def need(*packages: str, extra: str, what: str) -> None:
    """Refuse what cannot be done without an extra.

    Raises
    ------
    ConfigError
        Naming what needs it and how to install it.
    """
    if not all(map(installed, packages)):
        raise ConfigError(f"{what} needs the extra: pip install 'fed-dp[{extra}]'")
