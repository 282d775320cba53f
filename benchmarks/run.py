"""Run every bench_*.py beside this file, print a table, exit 1 when an entry is over its limit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from entries import LATEST, over
from rich.console import Console
from rich.table import Table


def main() -> int:
    LATEST.unlink(missing_ok=True)
    failed = []
    for script in sorted(Path(__file__).parent.glob("bench_*.py")):
        print(f"== {script.name}", file=sys.stderr, flush=True)
        if subprocess.run([sys.executable, str(script)], check=False).returncode:
            failed.append(script.name)
    entries = json.loads(LATEST.read_text()) if LATEST.is_file() else {}
    table = Table("benchmark", "value", "baseline", "ratio", "limit", "")
    for name, entry in entries.items():
        numbers = (
            f"{entry[key]:.4g}" if entry[key] is not None else "" for key in ("baseline", "ratio", "limit")
        )
        table.add_row(
            name, f"{entry['value']:.4g} {entry['unit']}", *numbers, "OVER" if over(entry) else "ok"
        )
    Console().print(table)
    for name in failed:
        print(f"error: {name} failed", file=sys.stderr)
    return int(bool(failed) or not entries or any(map(over, entries.values())))


if __name__ == "__main__":
    sys.exit(main())
