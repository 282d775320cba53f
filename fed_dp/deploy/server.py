"""`fed-dp deploy server`: keeps a SuperLink running, lets the provisioned sites in, and sees runs through.

What is to be run stands in the run folders, so that a server that was killed goes on where it was.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fed_dp.deploy import authority
from fed_dp.deploy.control import Control, control
from fed_dp.deploy.run_queue import Request, requests
from fed_dp.deploy.server_app import HOME
from fed_dp.deploy.server_file import ServerHome
from fed_dp.errors import DeployError, FedDpError
from fed_dp.experiment import to_run_config
from fed_dp.runs.folder import RunFolder
from fed_dp.server.app import RUN_FOLDER

START = 60.0  # seconds that a SuperLink may take to answer
POLL_INTERVAL = 1.0  # seconds between two looks at what is to be run
RETRY_DELAY = 2.0  # seconds before a run is tried again
MAX_UNANSWERED = 5  # looks in a row that the SuperLink may leave unanswered
Say = Callable[[str], None]


def environment(home: ServerHome | None = None) -> dict[str, str]:
    """Return what our and Flower's processes are started with: our programs first, no surprises."""
    told = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if home is not None:
        told |= {
            HOME: str(home.folder),
            "FLWR_HOME": str(home.folder / "flwr"),
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        }
    return told


def check_server(home: ServerHome) -> list[str]:
    """Refuse what cannot work; return warnings."""
    folder = home.folder
    ca, certificate = (authority.read_certificate(folder / name) for name in ("ca.crt", "server.crt"))
    found = [
        authority.check_dates(ca, f"the authority's certificate {folder / 'ca.crt'}"),
        authority.check_dates(certificate, f"the server's certificate {folder / 'server.crt'}"),
    ]
    authority.check_issued(certificate, ca, f"the server's certificate {folder / 'server.crt'}")
    if not (folder / "server.key").is_file():
        raise DeployError(f"{folder / 'server.key'} is missing: issue another with: fed-dp deploy renew")
    if (mode := (folder / "server.key").stat().st_mode) & 0o077:
        raise DeployError(f"{folder / 'server.key'} can be read by others (mode {mode & 0o777:o}): chmod 600")
    home.keys()
    for port in (home.file.port, home.file.control_port):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_here(home) if port == home.file.port else "127.0.0.1", port))
            except OSError as error:
                raise DeployError(f"port {port} cannot be used: {error.strerror}") from None
    return [warning for warning in found if warning]


def serve(home: ServerHome, say: Say, *, until: Callable[[], bool] = lambda: False) -> None:
    """Run until told to stop. Raises DeployError when the SuperLink dies: whoever supervises starts anew."""
    for warning in check_server(home):
        say(f"warning: {warning}")
    home.runs.mkdir(exist_ok=True, mode=0o700)
    with (home.folder / "superlink.log").open("ab") as log:
        link = subprocess.Popen(
            [sys.executable, "-m", "fed_dp.deploy.superlink", str(home.folder)],
            env=environment(home),
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    try:
        _wait_for(home, link)
        with control(home) as api:
            new = api.register()
        say(
            f"listening on {home.file.host}:{home.file.port} for {len(home.keys())} sites"
            + (f", {', '.join(new)} of them new" if new else "")
            + f"; log: {home.folder / 'superlink.log'}"
        )
        _forget_tries(home)
        vain = 0
        while not until():
            if link.poll() is not None:
                raise DeployError(f"the SuperLink ended with code {link.returncode}: {_last_line(home)}")
            try:
                with control(home) as api:
                    _see_through(home, api, say)
                vain = 0
            except DeployError as error:  # busy, perhaps
                vain += 1
                if vain >= MAX_UNANSWERED:
                    raise
                say(f"warning: {error}")
            time.sleep(POLL_INTERVAL)
    finally:
        end(link)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end; make it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(20)


def _here(home: ServerHome) -> str:
    """Return an address of this machine at which its door for sites can be tried."""
    return "127.0.0.1" if home.file.host in ("0.0.0.0", "::", "") else home.file.host


def _wait_for(home: ServerHome, link: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        if link.poll() is not None:
            raise DeployError(f"the SuperLink did not start (code {link.returncode}): {_last_line(home)}")
        try:
            socket.create_connection((_here(home), home.file.port), 1).close()
            with control(home) as api:
                api.nodes()
            return
        except (OSError, DeployError):
            time.sleep(0.2)
    raise DeployError(f"the SuperLink did not answer within {START:g} s: see {home.folder / 'superlink.log'}")


def _last_line(home: ServerHome) -> str:
    lines = (home.folder / "superlink.log").read_text(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def _forget_tries(home: ServerHome) -> None:
    """End the tries of an earlier SuperLink: their ServerApps are gone, and nothing they ask for counts."""
    for request in requests(home.runs):
        if request.status == "wanted" and (number := request.number) is not None:
            with control(home) as api:
                if api.running(number):
                    api.stop(number)
            request.forget()


def _see_through(home: ServerHome, api: Control, say: Say) -> None:
    """Look after the oldest run that is wanted: start it, or start it again."""
    request = next((each for each in requests(home.runs) if each.status == "wanted"), None)
    if request is None:
        return
    if (number := request.number) is not None:
        if api.running(number):
            return
        if request.status == "finished":  # it ended while we looked
            return
        request.failed(most=home.file.restarts)
        say(f"{request.folder.name}: stopped after round {request.rounds}{_because(request)}")
        if not _wanted(request):
            say(f"{request.folder.name}: given up; ask again with: fed-dp deploy run --resume")
            return
        time.sleep(RETRY_DELAY)
        if not _wanted(request):
            return
    try:
        experiment = RunFolder(request.folder).experiment()
    except FedDpError as error:
        request.note(error)
        request.failed(most=0)
        say(f"{request.folder.name}: given up: {error}")
        return
    config = {**to_run_config(experiment), RUN_FOLDER: request.folder.name}
    request.started(number := api.start(config))
    if not _wanted(request):  # withdrawn in between
        api.stop(number)
        return
    say(f"{request.folder.name}: started" + (f" after round {request.rounds}" if request.rounds else ""))


def _wanted(request: Request) -> bool:
    """Look again: another process may have changed it."""
    return request.status == "wanted"


def _because(request: Request) -> str:
    return f": {request.why}" if request.why else ""
