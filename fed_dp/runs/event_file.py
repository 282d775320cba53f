"""Event files of TensorBoard: an extra, pip install 'fed-dp[tensorboard]'."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fed_dp.extras import need


def check_tensorboard(key: str) -> None:
    """Refuse at once, where the extra is missing; `key` is what asked for it."""
    need("tensorboard", extra="tensorboard", what=key)


class EventFile:
    """The curves of one run."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer: Any = EventFileWriter(str(folder))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write a point of each curve."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
        self._writer.add_event(Event(step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
