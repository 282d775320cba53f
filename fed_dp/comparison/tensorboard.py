"""The curves of a comparison for TensorBoard: an extra, pip install 'fed-dp[tensorboard]'."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fed_dp.errors import ConfigError


def check() -> None:
    """Refuse at once, where the extra is missing."""
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        raise ConfigError("--tensorboard needs the extra: pip install 'fed-dp[tensorboard]'") from None


def export(outcome: Mapping[str, Any], folder: Path) -> None:
    """Write score and ε by round of every row, each as a run of its own."""
    check()
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for row in outcome["rows"]:
        if "by_round" not in row:
            continue
        level = "no-privacy" if row["epsilon"] is None else f"epsilon-{row['epsilon']:g}"
        writer = EventFileWriter(str(folder / f"{row['variant']}-{level}"))
        points = [(name, p["round"], p[name]) for p in row["by_round"] for name in p if name != "round"]
        points += [("epsilon", turn, spent) for turn, spent in enumerate(row["epsilon_by_round"], 1)]
        for tag, step, value in points:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(step=step, summary=summary))
        writer.close()
