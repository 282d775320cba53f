"""Running a comparison's cells: in parallel on this machine's cores, each result kept by its digest.

A cell is a whole run in one process, on one thread; there are as many at a time as cores. Its run folder is
named after its experiment's digest: a finished one is not run again, by this comparison or another, and an
unfinished one goes on where it stopped. A result of other versions, or of other records, does not count.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fed_dp.errors import ConfigError, FedDpError, ResumeError, RunError
from fed_dp.experiment import Experiment, build
from fed_dp.experiment.comparing import Cell
from fed_dp.experiment.federation import load, make_federation
from fed_dp.runs.folder import Line, RunFolder
from fed_dp.server.observers import Silent
from fed_dp.server.summary import versions
from fed_dp.simulations.runner import check, simulate

CACHE = "compared"  # under the folder of runs
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),  # halves the cost of per-record gradients
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a cell: its summary and its lines, or why there are none."""

    cell: Cell
    summary: dict[str, Any]
    lines: list[Line]
    failure: str = ""
    kept: bool = False  # from an earlier comparison


def run_cells(
    cells: Sequence[Cell],
    *,
    root: Path,
    jobs: int | None = None,
    fresh: bool = False,
    observe: Callable[[Done], None] = lambda _: None,
) -> list[Done]:
    """Run what is not there yet, tell of each cell as it is done, and return all, in the given order."""
    if jobs is not None and jobs < 1:
        raise ConfigError(f"--jobs = {jobs}: expected a whole number from 1")
    for experiment in {cell.experiment.digest: cell.experiment for cell in _firsts(cells)}.values():
        check(experiment)
    found: dict[str, Done] = {}
    todo: dict[str, Cell] = {}
    for cell in cells:
        folder = folder_of(root, cell.experiment)
        if cell.experiment.digest in found or cell.experiment.digest in todo:
            continue
        if not fresh and (kept := _kept(cell.experiment, folder)) is not None:
            found[cell.experiment.digest] = Done(cell, kept, RunFolder(folder).lines(), kept=True)
            observe(found[cell.experiment.digest])
        else:
            todo[cell.experiment.digest] = cell
    try:
        (root / CACHE).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"--runs {str(root)!r} cannot be written: {error.strerror}") from None
    for done in _run(todo, root, min(jobs or os.cpu_count() or 1, max(len(todo), 1)), fresh):
        found[done.cell.experiment.digest] = done
        observe(done)
    return [_as(found[cell.experiment.digest], cell) for cell in cells]


def _firsts(cells: Sequence[Cell]) -> list[Cell]:
    """Return a cell of each variant: what is wrong with one is wrong with all of them."""
    return list({cell.variant: cell for cell in reversed(cells)}.values())


def _as(done: Done, cell: Cell) -> Done:
    return Done(cell, done.summary, done.lines, done.failure, done.kept)


def folder_of(root: Path, experiment: Experiment) -> Path:
    """Return where an experiment's run folder is, or will be."""
    return root / CACHE / experiment.digest[:20]


def _kept(experiment: Experiment, folder: Path) -> dict[str, Any] | None:
    """Return the summary that is there already, if it is of the same records and the same versions."""
    if not RunFolder(folder).finished:
        return None
    try:
        summary = RunFolder.open(folder, experiment).summary()
    except FedDpError:
        return None
    same = summary.get("versions") == versions()
    return summary if same and summary["data"]["sha256"] == _fingerprint(experiment) else None


def _fingerprint(experiment: Experiment) -> str:
    """Return which records an experiment is about; with folds, they depend on its seed."""
    section = experiment.data
    return (load(section) if section.folds is None else make_federation(experiment).dataset).fingerprint()


def _run(todo: dict[str, Cell], root: Path, jobs: int, fresh: bool) -> Iterator[Done]:
    if not todo:
        return
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    with _pool(jobs) as pool:
        # The longest first would be best; those of many rounds are a fair guess at it.
        ordered = sorted(todo.values(), key=lambda cell: -cell.experiment.rounds)
        waiting: dict[Future[dict[str, Any]], Cell] = {}
        with _interrupts_blocked():  # this starts the processes
            for cell in ordered:
                tables, folder = json.dumps(cell.experiment.tables()), str(folder_of(root, cell.experiment))
                waiting[pool.submit(_work, tables, folder, fresh)] = cell
        while waiting:
            ready, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in ready:
                cell = waiting.pop(future)
                try:
                    summary = future.result()
                except BrokenProcessPool:
                    raise RunError(
                        f"a process of the comparison died, likely for want of memory, at {cell.variant}: "
                        "try --jobs 1; what is done is kept"
                    ) from None
                except Exception as error:  # whatever a run raises, the others go on
                    name = "" if isinstance(error, FedDpError) else f"{type(error).__name__}: "
                    yield Done(cell, {}, [], failure=f"{name}{error}")
                    continue
                yield Done(cell, summary, RunFolder(folder_of(root, cell.experiment)).lines())


@contextmanager
def _pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Give worker processes; whichever way it ends, they end at once."""
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_leave_interrupts)
    try:
        yield pool
    except BaseException:
        for process in list((pool._processes or {}).values()):  # its own way waits for running cells
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C for processes that are started meanwhile; here, one that comes is handled afterwards.

    They inherit it, and so leave interrupts to this process from their first moment on, not only when they
    have imported what they run.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_interrupts() -> None:
    """Let the parent alone decide what Ctrl-C means; and end when it does, however it does."""
    import threading

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()

    def watch() -> None:
        import time

        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(tables: str, folder: str, fresh: bool) -> dict[str, Any]:
    """Run one cell in this process; another process that is at the same cell is waited for."""
    experiment, path = build(json.loads(tables)), Path(folder)
    with path.with_suffix(".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not fresh and (kept := _kept(experiment, path)) is not None:
            return kept
        began = path.with_suffix(".versions")
        now = json.dumps(versions())
        if fresh or RunFolder(path).finished or not began.is_file() or began.read_text() != now:
            shutil.rmtree(path, ignore_errors=True)  # of other versions or records
        began.write_text(now)
        try:
            return _simulated(experiment, path)
        except ResumeError:  # it cannot go on where it stopped: other records, or noise that has no seed
            shutil.rmtree(path, ignore_errors=True)
            return _simulated(experiment, path)


def _simulated(experiment: Experiment, path: Path) -> dict[str, Any]:
    return simulate(experiment, observer=Silent(), engine="in-process", folder=path)[1]
