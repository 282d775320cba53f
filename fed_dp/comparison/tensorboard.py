"""The curves of a comparison for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fed_dp.runs.event_file import EventFile


def export(outcome: Mapping[str, Any], folder: Path) -> None:
    """Write score and ε by round of every row, each as a run of its own."""
    for row in outcome["rows"]:
        if "by_round" not in row:
            continue
        level = "no-privacy" if row["epsilon"] is None else f"epsilon-{row['epsilon']:g}"
        curves = EventFile(folder / f"{row['variant']}-{level}")
        for point in row["by_round"]:
            curves.write(point["round"], {key: value for key, value in point.items() if key != "round"})
        for server_round, spent in enumerate(row["epsilon_by_round"], 1):
            curves.write(server_round, {"epsilon": spent})
        curves.close()
