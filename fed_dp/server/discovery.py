"""Who takes part: wait for all expected nodes, ask each which client it is, sort by that."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fed_dp.errors import RunError
from fed_dp.server.replies import collected
from fed_dp.sharing import message as names
from fed_dp.strategies.failures import failure_of
from fed_dp.strategies.sites import Site

POLL = 0.2  # seconds
MAX_RECORDS = 10_000_000  # of a site: a site that announces many counts for much
MIN_WAIT = 30.0  # seconds that real sites have to describe themselves, however late they came


def discover(
    grid: Grid,
    *,
    expected: int,
    timeout: float,
    quorum: int | None = None,
    keys: Mapping[bytes, tuple[int, str]] | None = None,
    counted: bool = True,
    most: int = MAX_RECORDS,
) -> tuple[Site, ...]:
    """Return all sites in client order. Flower's node ids are random and unordered; these are not.

    Raises RunError when fewer nodes than expected are there after `timeout` seconds, when one
    cannot describe itself, or when two claim to be the same client. With `keys`, sites are real: whose key
    a node has says which client it is, whatever it says itself; those that are not ready by then are
    absent, and `quorum` of them are enough to begin. Real sites may keep the number of their records to
    themselves, and so do virtual ones where it is not `counted`.
    """
    deadline = time.monotonic() + timeout
    quorum = expected if quorum is None else quorum
    while len(nodes := sorted(grid.get_node_ids())) < expected and time.monotonic() < deadline:
        time.sleep(POLL)
    if len(nodes) < quorum:
        needed = "" if quorum == expected else f" ({quorum} would do: clients.quorum)"
        raise RunError(
            f"{len(nodes)} of {expected} nodes are there after {timeout:g} s{needed}: not starting"
        )
    owners = None if keys is None else _owners(grid, keys)
    requests = [Message(RecordDict(), node, MessageType.QUERY, group_id="0") for node in nodes]
    sites: dict[int, Site] = {}
    problems: list[str] = []
    for reply in _asked(grid, requests, deadline - time.monotonic(), real=keys is not None):
        if reply.has_error():
            problems.append(failure_of(reply.error).reason)
            continue
        answer = reply.content.metric_records.get(names.METRICS, MetricRecord())
        client, records = answer.get(names.PARTITION), answer.get(names.RECORDS)
        node, least, name = reply.metadata.src_node_id, int(counted and keys is None), ""
        if owners is not None:
            owner, name = owners.get(node, (-1, "nobody"))
            if client != owner:
                problems.append(f"the site with the key of {name} says it is client {client}, not {owner}")
                continue
        if not isinstance(client, int) or not 0 <= client < expected or client in sites:
            problems.append(f"a node says it is client {client}, expected 0..{expected - 1}, each once")
        elif not isinstance(records, int) or not least <= records <= most:
            problems.append(f"client {client} says it holds {records} records, expected {least} to {most}")
        else:
            told = reply.content.config_records.get(names.CONFIG, ConfigRecord())
            ledger = str(told.get(names.LEDGER, ""))[:100]
            scores, refuses = told.get(names.SCORES) is True, names.REFUSED in told
            sites[client] = Site(node, client, records, ledger, name, scores, refuses=refuses)
    if len(sites) < quorum:
        reason = problems[0] if problems else "no answer in time"
        raise RunError(f"{len(sites)} of {expected} clients are ready: {reason}")
    known = {client: name for client, name in (keys or {}).values()}
    return tuple(
        sites.get(client, Site(0, client, 0, name=known.get(client, ""))) for client in range(expected)
    )


def _asked(grid: Grid, requests: list[Message], left: float, *, real: bool) -> Iterable[Message]:
    if real:
        return collected(grid, requests, timeout=max(MIN_WAIT, left))
    return grid.send_and_receive(requests, timeout=max(1.0, left))


def _owners(grid: Grid, keys: Mapping[bytes, tuple[int, str]]) -> dict[int, tuple[int, str]]:
    """Return which client every node is, by its public key."""
    nodes = grid.get_nodes()
    return {node.node_id: keys[node.public_key] for node in nodes if node.public_key in keys}
