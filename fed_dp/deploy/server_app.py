"""The ServerApp of a deployment: the same rounds as in a simulation, over sites that are real.

It runs in a process of the SuperLink, finds the server's folder in the environment, and can be killed at any
moment: the next one goes on after the last finished round.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fed_dp.deploy.run_queue import Request
from fed_dp.deploy.server_file import ServerHome
from fed_dp.errors import FedDpError, RunError
from fed_dp.experiment import from_run_config
from fed_dp.runs.folder import RunFolder
from fed_dp.server.app import RUN_FOLDER, PlainLines
from fed_dp.server.networked import Deployment
from fed_dp.server.rounds import run_rounds
from fed_dp.server.tracking import tracked

HOME = "FED_DP_SERVER"  # of the environment: the server's folder, which is nobody else's business
PATIENCE = 60.0  # seconds to wait for an earlier process of the same run to end

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run, or go on with, the run that was asked for."""
    home = ServerHome(Path(os.environ[HOME]))
    experiment = from_run_config(context.run_config)
    request = Request(home.runs / str(context.run_config[RUN_FOLDER]))
    try:
        with alone(request.folder):
            folder = RunFolder.open(request.folder, experiment)
            if not folder.finished:
                deployment = Deployment(home.data, home.keys(), home.file.join_timeout, home.file.max_records)
                observer = tracked(PlainLines(), home.file.track)
                try:
                    run_rounds(experiment, grid, folder, observer, deployment)
                finally:
                    observer.stop()
    except FedDpError as error:
        request.note(error)
        raise


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the run folder for this process alone; the system lets go of it when the process dies."""
    deadline = time.monotonic() + PATIENCE
    with (folder / "lock").open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunError(f"{folder} is in use by another process for {PATIENCE:g} s") from None
                time.sleep(0.2)
        yield
