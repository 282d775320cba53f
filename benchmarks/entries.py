"""What every benchmark script shares: how to time fairly, and where results go.

An entry is {name: {value, unit, baseline, ratio, limit}}; ratios are measured within one run.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

LATEST = Path(__file__).parent / "latest.json"


def medians(*works: Callable[[], object], repeats: int, dropped: int) -> list[float]:
    """Return the median seconds of each, measured in turn; the first `dropped` rounds warm up."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for work, spent in zip(works, times, strict=True):
            began = time.perf_counter()
            work()
            spent.append(time.perf_counter() - began)
    return [statistics.median(spent[dropped:]) for spent in times]


def add(
    name: str, *, value: float, unit: str, baseline: float | None, ratio: float | None, limit: float
) -> None:
    """Add one entry to latest.json. What is compared with the limit is the ratio, or else the value."""
    entries = json.loads(LATEST.read_text()) if LATEST.is_file() else {}
    entries[name] = {
        "value": value,
        "unit": unit,
        "baseline": baseline,
        "ratio": ratio,
        "limit": limit,
    }
    LATEST.write_text(json.dumps(entries, indent=2) + "\n")
    print(
        f"{name}: {value:.4g} {unit}" + (f", {ratio:.3f} × baseline" if ratio is not None else ""),
        file=sys.stderr,
    )


def add_times(name: str, seconds: float, *, baseline: float, limit: float) -> None:
    """Add the time of a client-round against the baseline's."""
    add(
        name,
        value=1e3 * seconds,
        unit="ms per client-round",
        baseline=1e3 * baseline,
        ratio=seconds / baseline,
        limit=limit,
    )


def over(entry: dict[str, float | None]) -> bool:
    """Return whether an entry breaks its limit."""
    measured = entry["ratio"] if entry["ratio"] is not None else entry["value"]
    return measured is None or entry["limit"] is None or measured > entry["limit"]
