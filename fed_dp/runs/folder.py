"""A run folder: what a run leaves behind, written so that a crash loses a round, or a second of shorter ones.

experiment.toml   the resolved experiment, with its digest
metrics.jsonl     one line per round, flushed
data.sha256       which records it is about
checkpoint/       server state after the last finished round
ledgers.sqlite    what each private client has spent; of real sites, whose ledgers are their own:
releases.jsonl    what their uploads released, noted as they came
failures.log      of a simulation: tracebacks of clients that failed, the first of each kind
model.npz         the trained model
report.html       the same for people
summary.json      the result; its presence says that the run is finished
"""

from __future__ import annotations

import json
import os
import time
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tomli_w

from fed_dp.accounting import Event, from_json, to_json
from fed_dp.errors import ConfigError, ResumeError, RunError
from fed_dp.experiment import Experiment, build
from fed_dp.runs.saved_model import NAME as MODEL

Line = dict[str, Any]
LEDGERS = "ledgers.sqlite"
REPORT = "report.html"
RELEASES = "releases.jsonl"
FAILURES = "failures.log"


class RunFolder:
    """One run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, experiment: Experiment) -> RunFolder:
        """Make a new folder and write the experiment into it.

        One that was stopped before its experiment was written holds nothing, and is used again.
        """
        try:
            (path / "checkpoint").mkdir(parents=True, exist_ok=_is_empty(path))
            text = f"# resolved; digest {experiment.digest}\n{tomli_w.dumps(experiment.tables())}"
            write_atomically(path / "experiment.toml", text.encode())
        except OSError as error:
            raise RunError(f"run folder {path} cannot be written: {error.strerror}") from None
        return cls(path)

    @classmethod
    def open(cls, path: Path, experiment: Experiment) -> RunFolder:
        """Open a folder to resume it; it must belong to the same experiment."""
        found = cls(path).experiment()
        if found.digest != experiment.digest:
            raise ResumeError(
                f"{path} was made by another experiment (digest {found.digest[:12]}, now "
                f"{experiment.digest[:12]}): resume it with its own settings, or start a new run"
            )
        return cls(path)

    def experiment(self) -> Experiment:
        """Read the experiment that made this folder."""
        try:
            return build(tomllib.loads((self.path / "experiment.toml").read_text()), where=str(self.path))
        except (OSError, ValueError) as error:  # TOML's and Unicode's errors are ValueErrors
            raise ResumeError(f"{self.path} is not a run folder: {error}") from None

    def same_data(self, fingerprint: str) -> bool:
        """Note which records the run is about, refuse to go on with others; return whether it had begun."""
        path = self.path / "data.sha256"
        if not path.is_file():
            write_atomically(path, fingerprint.encode())
            return False
        if path.read_text() != fingerprint:
            raise ResumeError(f"{self.path}: the data set has changed since this run began; start a new run")
        return True

    @property
    def finished(self) -> bool:
        """Whether the run has its summary."""
        return (self.path / "summary.json").is_file()

    def keep_traceback(self, client: int, traceback: str) -> None:
        """Add the traceback of a client's exception."""
        with (self.path / FAILURES).open("a", encoding="utf-8") as out:
            out.write(f"client {client}\n{traceback}\n")

    # ---------------------------------------------------------------------------- metrics

    def append(self, line: Line, *, sync: bool = True) -> None:
        """Add one round's line; with `sync`, force all lines to disk."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
            out.flush()
            if sync:
                os.fsync(out.fileno())

    def lines(self) -> list[Line]:
        """Return the rounds written so far, up to the first line that is damaged or half written."""
        path = self.path / "metrics.jsonl"
        lines: list[Line] = []
        for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                break
            if not isinstance(line, dict) or not {"round", "events"} <= line.keys():
                break
            lines.append(line)
        return lines

    def rewind(self, done: int) -> list[Line]:
        """Drop lines of rounds after `done` (they were written, but not checkpointed)."""
        kept = [line for line in self.lines() if line["round"] <= done]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        write_atomically(self.path / "metrics.jsonl", text.encode())
        return kept

    # --------------------------------------------------------------------------- releases

    def note(self, head: str, events: Sequence[Event]) -> None:
        """Note, on disk, what a real site's upload released: it counts, whatever becomes of its round."""
        with (self.path / RELEASES).open("a", encoding="utf-8") as out:
            out.write(json.dumps([head, to_json(events)]) + "\n")
            out.flush()
            os.fsync(out.fileno())

    def noted(self) -> Iterator[tuple[str, Event]]:
        """Yield what was noted; a line that was half written is of an upload that was not used."""
        path = self.path / RELEASES
        for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
            try:
                head, events = json.loads(text)
            except ValueError:
                continue
            for event in from_json(events):
                yield str(head), event

    # ------------------------------------------------------------------------- checkpoint

    def save(self, done: int, state: Mapping[str, np.ndarray]) -> None:
        """Write the server state after round `done`, then drop older ones."""
        with atomically(self.path / "checkpoint" / f"server-{done:06d}.npz") as out:
            np.savez(out, **state)  # type: ignore[arg-type]
        for old in (self.path / "checkpoint").iterdir():
            number = old.name.partition(".")[0].rpartition("-")[2]
            if number.isdigit() and int(number) < done:
                old.unlink(missing_ok=True)

    @property
    def done(self) -> int:
        """How many rounds are checkpointed."""
        last = self._checkpoint()
        return 0 if last is None else int(last.stem.rpartition("-")[2])

    def latest(self) -> tuple[int, dict[str, np.ndarray]] | None:
        """Return the last checkpoint: how many rounds are done, and the server state."""
        if (last := self._checkpoint()) is None:
            return None
        try:
            with last.open("rb") as handle, np.load(handle, allow_pickle=False) as archive:
                return int(last.stem.rpartition("-")[2]), dict(archive)
        except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
            raise ResumeError(f"{last} is damaged ({error}): delete it and resume, or start anew") from None

    def _checkpoint(self) -> Path | None:
        return max((self.path / "checkpoint").glob("server-*.npz"), default=None)

    def summary(self) -> dict[str, Any]:
        """Read the summary of a finished run."""
        path = self.path / "summary.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ResumeError(f"{path} cannot be read ({error}): delete it and resume") from None
        return dict(found)

    def keep_model(self, content: bytes) -> None:
        """Write the trained model."""
        write_atomically(self.path / MODEL, content)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary: the run is finished."""
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=2).encode() + b"\n")


def new_path(root: Path, name: str) -> Path:
    """Return a fresh folder name under `root`: NAME-TIME, with a number if that is taken."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        if not (path := root / (stem + suffix)).exists():
            return path
    raise RunError(f"{root} is full of folders called {stem}")


def _is_empty(path: Path) -> bool:
    """Return whether a folder holds nothing but what comes before the experiment."""
    begun = {"checkpoint", "experiment.toml.part"}
    return path.is_dir() and not any(path.glob("checkpoint/*")) and {p.name for p in path.iterdir()} <= begun


@contextmanager
def atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write such that readers see the old content or the new, never a part."""
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())
    partial.replace(path)


def write_output(path: Path, data: bytes) -> None:
    """Write a file that the user has named.

    Raises
    ------
    ConfigError
        When it cannot be written.
    """
    try:
        write_atomically(path, data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write all of a file at once, atomically."""
    with atomically(path) as out:
        out.write(content)
