"""The SuperNode, running the site's own program and nothing that a server sends: `fed-dp deploy site`.

Flower's SuperNode runs whatever app the server hands out. Here, what is handed out is never unpacked: every
message is answered by the installed `fed_dp.clients.app`, in a process of its own, under the site's own file.
The three of Flower's names that decide this are replaced below; a Flower in which they are missing does
not start.

`python -m fed_dp.deploy.supernode FOLDER`
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fed_dp.clients.site_file import SiteFile, site_path
from fed_dp.deploy.authority import write_secret
from fed_dp.sharing import message as names

POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
HANDING_OVER = "yield_object_contents"  # Flower's function that waits for the parts of a reply
LONGEST = 15.0  # seconds without a new part; they come from a process on this machine
BEATING = (  # where Flower reads how often to send heartbeats
    "flwr.supercore.heartbeat",
    "flwr.supernode.fleet_http_connection",
    "flwr.supercore.corestate.in_memory_corestate",
)


def _replaced(module: str, **new: Any) -> None:
    """Put values in place of a module's names, each of which must be there."""
    found = __import__(module, fromlist=["*"])
    for name, value in new.items():
        if not hasattr(found, name):
            raise SystemExit(
                f"{module} has no {name}: this Flower is not the one that fed_dp was made for (1.41)"
            )
        setattr(found, name, value)


def beat(seconds: float) -> None:
    """Send heartbeats so often, in this process."""
    for module in BEATING:
        _replaced(module, HEARTBEAT_DEFAULT_INTERVAL=seconds)


# ----------------------------------------------------------------------------- one message


def answer(spec: dict[str, Any], seconds: float) -> None:
    """Answer one message by the installed ClientApp, in this process, which ends with it."""
    beat(seconds)
    _replaced(
        "flwr.supernode.runtime.run_clientapp",
        install_from_fab=lambda *_, **__: None,
        get_project_dir=lambda *_: Path(),
        get_load_client_app_fn=lambda **_: _installed,
    )
    from flwr.supernode.runtime.run_clientapp import run_clientapp

    run_clientapp(**spec, runtime_dependency_install=False)


def _installed(*_: Any) -> Any:
    from fed_dp.clients.app import app

    return app


class InstalledAppExecutor:
    """Flower's executor: it starts a process for every message, and runs no other kind of task."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["fed_dp.deploy.preload"])
        self._children: list[Any] = []

    def get_eligible_capacity(self, supported_task_types: Any, **_: Any) -> tuple[set[Any], set[str]]:
        """Return what kinds of tasks may be acquired."""
        from flwr.supercore.constant import TaskType

        return {TaskType.CLIENT_APP}, set()

    def wait_for_capacity(self, *_: Any, **__: Any) -> None:
        """Do not wait: a site answers one message at a time."""

    def launch(self, spec: Any) -> Any:
        """Start a process for one message."""
        from flwr.supercore.constant import TaskType
        from flwr.supercore.superexec.executor import LaunchResult

        if spec.task_type != TaskType.CLIENT_APP:
            return LaunchResult.failed(f"a site runs no {spec.task_type}")
        told = {
            "runtime_api_address": spec.runtime_api_address,
            "token": spec.token,
            "insecure": True,  # on loopback, between the site's own processes
            "parent_pid": os.getpid(),
        }
        child = self._context.Process(target=answer, args=(told, self._seconds), daemon=True)
        child.start()
        self._children.append(child)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Let go of processes that have ended."""
        self._children = [child for child in self._children if child.is_alive()]

    def close(self) -> None:
        """End what is running."""
        for child in self._children:
            child.terminate()


def execute(address: str, secret: str, parent: str, seconds: str) -> None:
    """Acquire messages from this site's SuperNode and answer them."""
    beat(float(seconds))
    os.environ.setdefault(POLL, "0.2")
    _replaced(
        "flwr.supercore.superexec.run_superexec",
        get_executor=lambda *_, **__: InstalledAppExecutor(float(seconds)),
    )
    from flwr.supercore.superexec.run_superexec import run_superexec

    run_superexec(
        runtime_api_address=address,
        insecure=True,
        superexec_auth_secret=Path(secret).read_bytes(),
        parent_pid=int(parent),
        runtime_dependency_install=False,
    )


# ---------------------------------------------------------------------------------- the node


class BoundedClock:
    """Time for Flower's loop that passes messages on: no pause of it is longer than half a second.

    Nor does it wait for ever: when the process that answers dies in the middle of handing over its reply,
    Flower waits for the rest without limit, and the site would never answer again.
    """

    waited = 0.0

    @classmethod
    def sleep(cls, seconds: float) -> None:
        """Sleep, briefly."""
        pause = min(seconds, 0.5)
        cls.waited = cls.waited + pause if sys._getframe(1).f_code.co_name == HANDING_OVER else 0.0
        if cls.waited > LONGEST:
            cls.waited = 0.0
            raise TimeoutError("the rest of a reply did not come: the process that made it is gone")
        time.sleep(pause)


def serve(folder: Path) -> None:
    """Run the SuperNode of a site's folder, and its executor beside it."""
    file = site_path(folder)
    site = SiteFile.read(file)
    if set(str(file)) & set('"\\\n'):
        raise SystemExit(f"{file}: Flower cannot be told a path with quotes or backslashes")
    beat(site.heartbeat)
    _replaced("flwr.supernode.start_client_internal", time=BoundedClock)  # which looks for messages every 3 s
    port = site.port or free_ports(1)[0]
    secret = file.parent / ".executor-secret"
    secret.unlink(missing_ok=True)
    write_secret(secret, secrets.token_bytes(32))  # so that nobody else on this machine answers in its place
    subprocess.Popen(
        [
            *(sys.executable, "-m", "fed_dp.deploy.supernode", "--execute"),
            *(f"127.0.0.1:{port}", str(secret), str(os.getpid()), str(site.heartbeat)),
        ]
    )
    sys.argv = [
        "flower-supernode",
        *("--root-certificates", site.authority),
        *("--superlink", site.server),
        *("--auth-supernode-private-key", site.key),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--isolation", "process", "--superexec-auth-secret-file", str(secret)),
        *("--node-config", f'{names.SITE}="{file}"'),
    ]
    from flwr.supercore.app_utils import start_parent_process_monitor
    from flwr.supernode.cli.flower_supernode import flower_supernode

    start_parent_process_monitor(os.getppid())  # without `fed-dp deploy site` it would hold the site's place
    flower_supernode()


def free_ports(count: int) -> list[int]:
    """Return ports on loopback that nobody listens on."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


if __name__ == "__main__":
    if sys.argv[1] == "--execute":
        execute(*sys.argv[2:6])
    else:
        serve(Path(sys.argv[1]))
