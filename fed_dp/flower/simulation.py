"""Any pair of Flower apps over fed_dp's own grid: in this process, repeatable, without Flower's engine."""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fed_dp.errors import ConfigError
from fed_dp.simulations.grid import RUN_ID, SERVER_NODE, InProcessGrid

Value = bool | float | int | str


def simulate(
    server_app: ServerApp,
    client_app: ClientApp,
    *,
    nodes: int,
    run_config: Mapping[str, Value] | None = None,
) -> None:
    """Run a ServerApp and a ClientApp, as `flwr run` does, with `nodes` simulated nodes in this process.

    Node ids are 1, 2, …, and replies come in the order of the messages: the same seeds give the same result.
    An exception of a client is an error reply, as everywhere; its traceback is logged.

    Parameters
    ----------
    server_app, client_app
        The two apps.
    nodes
        How many; each has `partition-id` and `num-partitions` in its node config.
    run_config
        What both apps find in `context.run_config`.
    """
    if type(nodes) is not int or nodes < 1:
        raise ConfigError(f"nodes = {nodes!r}: expected a whole number from 1")
    config = dict(run_config or {})
    grid = InProcessGrid(nodes, config, client_app)
    server_app(grid, Context(RUN_ID, SERVER_NODE, {}, RecordDict(), config))
