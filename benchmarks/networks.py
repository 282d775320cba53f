"""Networks by name, for benchmarks of what is below an experiment."""

from __future__ import annotations

from typing import Any

from fed_dp import plugins
from fed_dp.models import NetworkSpec


def network(
    name: str, shape: tuple[int, ...], classes: int, decided: dict[str, Any] | None = None, **options: Any
) -> NetworkSpec:
    """Return a network with its own options, and what a trainer decides of it."""
    return NetworkSpec(plugins.read("model", {"name": name, **options}), shape, classes, decided or {})
