"""What the operator wants run: a run folder that says so. It outlives every process.

request.json   since when, wanted or stopped, why, Flower's number of the last try, how many came to nothing
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from fed_dp.errors import ConfigError, DataError, FedDpError, ModelError, ResumeError
from fed_dp.experiment import Experiment
from fed_dp.runs.folder import RunFolder, new_path, write_atomically

FILE = "request.json"
PERMANENT_ERRORS = (ConfigError, DataError, ModelError, ResumeError)  # what no other try can mend
Status = Literal["wanted", "stopped", "finished"]


class Request:
    """One run that was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def make(cls, runs: Path, experiment: Experiment) -> Request:
        """Ask for a new run."""
        folder = new_path(runs, experiment.name)
        RunFolder.create(folder, experiment)
        request = cls(folder)
        request._write({"wanted": True, "asked": time.time()})
        return request

    @property
    def status(self) -> Status:
        """Whether it is to be run, was given up, or is done."""
        if RunFolder(self.folder).finished:
            return "finished"
        return "wanted" if self._read().get("wanted") else "stopped"

    @property
    def asked(self) -> float:
        """When it was asked for first."""
        return float(self._read().get("asked", 0))

    @property
    def why(self) -> str:
        """Why the last try came to nothing."""
        return str(self._read().get("why", ""))

    @property
    def number(self) -> int | None:
        """Flower's number of the last try."""
        return self._read().get("number")

    @property
    def rounds(self) -> int:
        """How many rounds are done."""
        return RunFolder(self.folder).done

    def started(self, number: int) -> None:
        """Note that a try has begun."""
        with self._changing() as now:
            now |= {"number": number, "from": self.rounds, "why": "", "for_good": False}

    def forget(self) -> None:
        """Forget the last try: it ended with the server that made it, and says nothing about the run."""
        with self._changing() as now:
            now["number"] = None

    def note(self, error: FedDpError) -> None:
        """Note why a try ends."""
        with self._changing() as now:
            now |= {"why": str(error), "for_good": isinstance(error, PERMANENT_ERRORS)}

    def failed(self, *, most: int) -> None:
        """Note that a try came to nothing; give up after too many that finished no round."""
        with self._changing() as now:
            vain = 0 if self.rounds > now.get("from", 0) else now.get("vain", 0) + 1
            wanted = bool(now.get("wanted")) and not now.get("for_good") and vain <= most
            now |= {"vain": vain, "wanted": wanted}

    def again(self) -> None:
        """Ask for it once more."""
        with self._changing() as now:
            now |= {"wanted": True, "vain": 0, "number": None}

    def withdraw(self) -> None:
        """Ask for it no longer."""
        with self._changing() as now:
            now |= {"wanted": False, "why": "stopped by the operator"}

    def _read(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folder / FILE).read_text()))
        except (OSError, ValueError) as error:
            raise ResumeError(f"{self.folder / FILE} cannot be read: {error}") from None

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        """Read, let the caller change, write: one process at a time."""
        with (self.folder / ".request").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            now = self._read()
            yield now
            self._write(now)

    def _write(self, content: dict[str, Any]) -> None:
        write_atomically(self.folder / FILE, json.dumps(content, indent=2).encode())


def requests(runs: Path) -> Iterator[Request]:
    """Yield all runs that were ever asked for, the oldest first."""
    found = [Request(path.parent) for path in runs.glob(f"*/{FILE}")] if runs.is_dir() else []
    yield from sorted(found, key=lambda request: request.asked)
