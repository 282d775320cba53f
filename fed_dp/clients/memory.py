"""What a client keeps between rounds and never sends: a trainer's state, its own parameters.

(The latter where it downloads a part only.) A virtual client keeps it in its Flower Context. A deployed site
keeps it on disk, because a Context is lost when the site restarts; each round has a file of its own, so
that a round that is repeated begins where it began the first time. Parameters that no noise has covered must
never start another experiment: a file is named by the whole digest of its own, and says inside whose it is
and under which guarantee.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from numpy.typing import NDArray

from fed_dp.clients.trainer import State
from fed_dp.errors import PrivacyError
from fed_dp.models import Vector
from fed_dp.sharing.update import MAX_ABS_VALUE

STATE, LOCAL = "trainer", "local"  # the records of a Context, and the parts of a file
OWNER = "owner"  # … where this part says whose it is


class Memory(Protocol):
    """Where it is kept."""

    def state(self) -> State:
        """Return the trainer's state; empty before the first round."""
        ...

    def own(self) -> Vector | None:
        """Return the client's own parameters; None before the first round."""
        ...

    def keep(self, state: State, own: Vector | None) -> None:
        """Keep both for the next round."""
        ...


@dataclass(frozen=True, slots=True)
class InContext:
    """A virtual client's, or a site's that has no folder for it: lasts as long as its node runs."""

    context: Context

    def state(self) -> State:
        """Read the trainer's state."""
        record = self.context.state.get(STATE)
        if not isinstance(record, MetricRecord):
            return {}
        return {key: [float(v) for v in values] for key, values in record.items() if isinstance(values, list)}

    def own(self) -> Vector | None:
        """Read the client's own parameters."""
        record = self.context.state.get(LOCAL)
        return record[LOCAL].numpy() if isinstance(record, ArrayRecord) else None

    def keep(self, state: State, own: Vector | None) -> None:
        """Write both."""
        self.context.state[STATE] = MetricRecord({key: list(values) for key, values in state.items()})
        if own is not None:
            self.context.state[LOCAL] = ArrayRecord({LOCAL: Array(own)})


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A deployed site's: one file for each of an experiment's last two rounds, for its owner alone."""

    folder: Path
    experiment: str  # the digest
    server_round: int  # the one that is asked for
    guarantee: str = "none"  # under which the experiment releases

    def state(self) -> State:
        """Read the trainer's state as it was after the round before."""
        return {
            key.removeprefix(f"{STATE}."): [float(v) for v in values]
            for key, values in self._before().items()
            if key not in (LOCAL, OWNER)
        }

    def own(self) -> Vector | None:
        """Read the site's own parameters as they were after the round before."""
        return self._before().get(LOCAL)

    def keep(self, state: State, own: Vector | None) -> None:
        """Write this round's file; drop those that no repetition can need."""
        parts: dict[str, NDArray[Any]] = {f"{STATE}.{key}": np.array(values) for key, values in state.items()}
        if own is not None:
            parts[LOCAL] = own
        if not parts:
            return
        parts[OWNER] = self._owner
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._path(self.server_round)
        partial = path.with_suffix(".part")
        with open(os.open(partial, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as out:
            np.savez(out, **parts)  # type: ignore[arg-type]
            out.flush()
            os.fsync(out.fileno())
        partial.replace(path)
        kept = sorted(self._rounds(), key=lambda number: (self._path(number).stat().st_mtime_ns, number))
        for number in kept[:-2]:  # in whichever order a server asks
            self._path(number).unlink(missing_ok=True)

    def _before(self) -> dict[str, NDArray[Any]]:
        earlier = [number for number in self._rounds() if number < self.server_round]
        if not earlier:
            return {}
        path = self._path(earlier[-1])
        try:
            with path.open("rb") as handle, np.load(handle, allow_pickle=False) as archive:
                parts = dict(archive)
        except Exception as error:  # damaged: whatever it holds stays unsaid
            raise PrivacyError(f"{path} is damaged ({type(error).__name__}); nothing was sent") from None
        if not np.array_equal(parts.get(OWNER, np.array([])), self._owner):
            raise PrivacyError(f"{path} belongs to another experiment or guarantee; nothing was sent")
        if LOCAL in parts and not np.abs(parts[LOCAL]).max(initial=0) <= MAX_ABS_VALUE:
            raise PrivacyError(f"{path} holds weights beyond ±{MAX_ABS_VALUE:g}; nothing was sent")
        return parts

    @property
    def _owner(self) -> NDArray[np.str_]:
        return np.array([self.experiment, self.guarantee])

    def _path(self, server_round: int) -> Path:
        return self.folder / f"{self.experiment}-{server_round:06d}.npz"

    def _rounds(self) -> list[int]:
        found = self.folder.glob(f"{self.experiment}-*.npz") if self.folder.is_dir() else ()
        return sorted(int(path.stem.rpartition("-")[2]) for path in found)
