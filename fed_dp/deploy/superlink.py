"""The SuperLink, with one door for sites and another for its operator. Run by `fed-dp deploy server`.

Flower serves three APIs on one port: Fleet (for sites), Control (who may take part, what is run) and Runtime,
and Control asks nobody who they are. Here the port that sites reach answers Fleet alone; all three are served
on loopback. A site may reply as itself alone, which Flower does not check.

`python -m fed_dp.deploy.superlink FOLDER`
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import uvicorn
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.http_logging import get_uvicorn_log_config
from flwr.supercore.logger import console_handler
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
from flwr.superlink.main import create_app
from flwr.superlink.servicer.fleet import fleet_handlers

from fed_dp.deploy.server_file import ServerHome

FLEET = "/v1/fleet/"
MAX_REQUEST_BYTES = 1 << 30  # bytes of a request


class FleetOnly:
    """An ASGI app that passes on what sites may ask, and nothing else."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["path"].startswith(FLEET) and _size(scope) <= MAX_REQUEST_BYTES:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": b"not for sites\n"})


def _size(scope: Any) -> int:
    """Return how large a request says it is; one that does not say is too large."""
    stated = dict(scope["headers"]).get(b"content-length", b"")
    return int(stated) if stated.isdigit() else MAX_REQUEST_BYTES + 1


def reject_spoofed_replies() -> None:
    """Refuse replies in another site's name: Flower checks who sends, but not whose reply it says it is."""
    push = fleet_handlers.push_messages

    def checked(request: Any, state: Any) -> Any:
        if any(m.metadata.src_node_id != request.node.node_id for m in request.messages_list):
            raise FlowerError(
                ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED, f"node {request.node.node_id} sent another's reply"
            )
        return push(request=request, state=state)

    fleet_handlers.push_messages = checked


def arguments(home: ServerHome) -> list[str]:
    """Return Flower's own arguments."""
    folder = home.folder
    return [
        "flower-superlink",
        *("--ssl-ca-certfile", str(folder / "ca.crt")),
        *("--ssl-certfile", str(folder / "server.crt")),
        *("--ssl-keyfile", str(folder / "server.key")),
        *("--database", str(folder / "superlink.db")),
        *("--host", "127.0.0.1", "--port", str(home.file.control_port)),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
    ]


async def serve(home: ServerHome) -> None:
    """Serve until either door closes."""
    sys.argv = arguments(home)
    config = _parse_superlink_lifespan_config()
    reject_spoofed_replies()
    app = create_app(config, SuperLinkLifespan)
    common: dict[str, Any] = {
        "log_config": get_uvicorn_log_config(console_handler.level),
        "access_log": False,
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_certfile": config.ssl_certfile,
    }
    doors = [
        uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=home.file.control_port, **common)),
        uvicorn.Server(
            uvicorn.Config(FleetOnly(app), host=home.file.host, port=home.file.port, lifespan="off", **common)
        ),
    ]
    tasks = [asyncio.create_task(door.serve()) for door in doors]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for door in doors:
        door.should_exit = True
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    start_parent_process_monitor(os.getppid())  # without `fed-dp deploy server` it would hold its ports
    asyncio.run(serve(ServerHome(Path(sys.argv[1]))))
