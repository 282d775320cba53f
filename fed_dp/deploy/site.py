"""`fed-dp deploy site`: keeps a site's SuperNode running, and says in words why the server refuses it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fed_dp.clients.site_file import SiteFile, site_path
from fed_dp.deploy.check import NotThere, check_connection, check_site
from fed_dp.deploy.server import end, environment
from fed_dp.errors import DeployError

RETRY_DELAY = 2.0  # seconds before another try
Say = Callable[[str], None]


def serve(folder: Path, say: Say, *, until: Callable[[], bool] = lambda: False) -> None:
    """Run until told to stop.

    A server that is not there is waited for, without limit: that is what a site is for. A server that
    cannot be trusted, a site that cannot work, and a key that the server does not know end it.
    """
    file = site_path(folder)
    site = SiteFile.read(file)
    for warning in check_site(site):
        say(f"warning: {warning}")
    refused_since: float | None = None
    told = ""
    while not until():
        try:
            check_connection(site)
        except NotThere as error:
            if str(error) != told:
                say(f"{error}; trying again every {RETRY_DELAY:g} s")
                told = str(error)
            _rest(until)
            continue
        told = ""
        began = time.monotonic()
        code, last = _run(file, until)
        if until():
            return
        lasted = time.monotonic() - began
        if "[code: 2004]" not in last and lasted > 3 * site.heartbeat:
            refused_since = None
        if "[code: 2004]" in last:
            # Flower says the same of a key it does not know and of a site whose last process died just now.
            refused_since = refused_since or time.monotonic()
            if time.monotonic() - refused_since > 2.5 * site.heartbeat:
                raise DeployError(
                    f"the server at {site.server} does not know this site's key ({site.key}): its operator "
                    "registers it with: fed-dp deploy init, and restarts the server"
                )
        else:
            say(f"the SuperNode ended (code {code}): {last[:300] or 'it said nothing'}; starting it again")
        _rest(until)


def _run(file: Path, until: Callable[[], bool]) -> tuple[int, str]:
    """Run a SuperNode to its end; return its code and why it ended, as far as it said so."""
    log_path = file.parent / "site.log"
    with log_path.open("ab") as log:
        start = log.tell()
        node = subprocess.Popen(
            [sys.executable, "-m", "fed_dp.deploy.supernode", str(file)],
            env={**environment(), "FLWR_HOME": str(file.parent / "flwr")},
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    try:
        while node.poll() is None and not until():
            time.sleep(0.2)
    finally:
        end(node)
    with log_path.open("rb") as log:
        log.seek(start)
        lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    why = next((line for line in reversed(lines) if "[code:" in line), lines[-1] if lines else "")
    return int(node.returncode), why


def _rest(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RETRY_DELAY
    while time.monotonic() < deadline and not until():
        time.sleep(0.1)
