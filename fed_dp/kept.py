"""What a process keeps because it is costly to compute again: up to so many bytes, the last used longest."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """Values by a whole number. The last one is kept, however large it is."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._values: OrderedDict[int, tuple[T, int]] = OrderedDict()

    def get(self, key: int) -> T | None:
        """Return a value, or None."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: int, value: T, size: int) -> None:
        """Keep a value of so many bytes; let go of others where there are too many."""
        if key in self._values:
            self._bytes -= self._values.pop(key)[1]
        self._values[key] = value, size
        self._bytes += size
        while self._bytes > self._max_bytes and len(self._values) > 1:
            self._bytes -= self._values.popitem(last=False)[1][1]
