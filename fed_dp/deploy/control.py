"""Flower's Control API, for the server's operator: who may take part, who is there, what runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import tomli_w
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from fed_dp.deploy import authority
from fed_dp.deploy.server_file import ServerHome
from fed_dp.errors import DeployError
from fed_dp.version import __version__

PATIENCE = 2  # intervals without a heartbeat after which Flower takes a node for dead


@dataclass(frozen=True, slots=True)
class Node:
    """A site as the SuperLink sees it; times are seconds since 1970."""

    identity: int
    name: str
    online: bool
    last_seen: float | None


class Control:
    """A connection to the Control API."""

    def __init__(self, home: ServerHome, client: ControlHttpClient) -> None:
        self._home, self._client = home, client

    def register(self) -> list[str]:
        """Let the SuperLink know every provisioned key, and no other; return the names of new ones."""
        keys = self._home.keys()
        nodes = self._client.ListNodes(ListNodesRequest()).nodes_info
        known = {node.public_key: node.node_id for node in nodes}
        for key, identity in known.items():
            if key not in keys:
                self._client.UnregisterNode(UnregisterNodeRequest(node_id=identity))
        new = [(key, name) for key, (_, name) in keys.items() if key not in known]
        for key, _ in new:
            self._client.RegisterNode(RegisterNodeRequest(public_key=key))
        return [name for _, name in new]

    def nodes(self) -> list[Node]:
        """Return the sites, in the order of their numbers."""
        keys = self._home.keys()
        found = []
        for node in self._client.ListNodes(ListNodesRequest()).nodes_info:
            if node.public_key in keys:
                client, name = keys[node.public_key]
                seen = node.online_until - PATIENCE * node.heartbeat_interval if node.online_until else None
                found.append((client, Node(node.node_id, name, node.status == "online", seen)))
        return [node for _, node in sorted(found, key=lambda pair: pair[0])]

    def start(self, config: Mapping[str, bool | float | int | str]) -> int:
        """Start a run of our ServerApp; return Flower's number of it."""
        content = app_bundle(config)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        request = StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto(dict(config)))
        response = self._client.StartRun(request)
        if not response.HasField("run_id"):
            raise DeployError("the SuperLink did not start the run")
        return int(response.run_id)

    def running(self, number: int) -> bool:
        """Return whether a run has not ended."""
        runs = self._client.ListRuns(ListRunsRequest(run_id=number)).run_dict
        return any(not run.finished_at for run in runs.values())

    def stop(self, number: int) -> None:
        """End a run."""
        self._client.StopRun(StopRunRequest(run_id=number))


@contextmanager
def control(home: ServerHome) -> Iterator[Control]:
    """Connect to the Control API on loopback; a DeployError says that it is not there."""
    authority.read_certificate(home.folder / "ca.crt")
    client = ControlHttpClient.from_server_address(
        server_address=home.control,
        insecure=False,
        root_certificates=(home.folder / "ca.crt").read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="fed-dp")],
    )
    try:
        yield Control(home, client)
    except httpx.TransportError as error:
        raise DeployError(
            f"the server at {home.control} does not answer ({error}): start it with: fed-dp deploy server "
            f"{home.folder}"
        ) from None
    except httpx.HTTPStatusError as error:
        raise DeployError(f"the SuperLink refused: {error.response.text[:300]}") from None
    finally:
        client.close()


def app_bundle(config: Mapping[str, Any]) -> bytes:
    """Return a Flower app that holds no code: server and sites run what they have installed."""
    about = {
        "project": {"name": "fed-dp", "version": __version__, "license": {"text": "Apache-2.0"}},
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fed-dp",
                    "components": {
                        "serverapp": "fed_dp.deploy.server_app:app",
                        "clientapp": "fed_dp.clients.app:app",
                    },
                    "config": {key: type(value)() for key, value in config.items()},
                }
            }
        },
    }
    content, _ = build_fab_from_files({"pyproject.toml": tomli_w.dumps(about).encode()})
    return content
