"""startup/import: `import fed_dp` against `import numpy`, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import entries

REPEATS, LIMIT = 15, 3.0


def main() -> None:
    def importing(package: str) -> None:
        subprocess.run([sys.executable, "-c", f"import {package}"], check=True)

    baseline, value = entries.medians(
        lambda: importing("numpy"), lambda: importing("fed_dp"), repeats=REPEATS, dropped=1
    )
    entries.add(
        "startup/import", value=value, unit="s", baseline=baseline, ratio=value / baseline, limit=LIMIT
    )


if __name__ == "__main__":
    main()
