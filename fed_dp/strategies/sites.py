"""Who takes part: wait for all expected nodes, ask each which client it is, sort by that."""

from __future__ import annotations

import time
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fed_dp.errors import RunError
from fed_dp.sharing import message as names


@dataclass(frozen=True, slots=True)
class Site:
    """A node that takes part: its Flower id, its client number, its public number of records.

    `ledger` names a real site's ledger, the same in every run; a virtual client has none.
    """

    node: int
    client: int
    records: int
    ledger: str = ""


def discover(grid: Grid, *, expected: int, timeout: float) -> tuple[Site, ...]:
    """Return all sites in client order. Flower's node ids are random and unordered; these are not.

    Raises RunError when fewer nodes than expected are there after `timeout` seconds, when one
    cannot describe itself, or when two claim to be the same client.
    """
    deadline = time.monotonic() + timeout
    while len(nodes := sorted(grid.get_node_ids())) < expected:
        if time.monotonic() > deadline:
            raise RunError(f"{len(nodes)} of {expected} nodes are there after {timeout:g} s: not starting")
        time.sleep(0.2)
    questions = [Message(RecordDict(), node, MessageType.QUERY, group_id="0") for node in nodes]
    sites: dict[int, Site] = {}
    problems: list[str] = []
    for reply in grid.send_and_receive(questions, timeout=max(1.0, deadline - time.monotonic())):
        if reply.has_error():
            problems.append(reply.error.reason or f"error code {reply.error.code}")
            continue
        answer = reply.content.metric_records.get(names.METRICS, MetricRecord())
        client, records = answer.get(names.PARTITION), answer.get(names.RECORDS)
        if not isinstance(client, int) or not 0 <= client < expected or client in sites:
            problems.append(f"a node says it is client {client}, expected 0..{expected - 1}, each once")
        elif not isinstance(records, int) or not 0 < records < 2**40:
            problems.append(f"client {client} says it holds {records} records, expected 1 or more")
        else:
            told = reply.content.config_records.get(names.CONFIG, ConfigRecord())
            ledger = str(told.get(names.LEDGER, ""))[:100]
            sites[client] = Site(reply.metadata.src_node_id, client, records, ledger)
    if len(sites) < expected:
        reason = problems[0] if problems else "no answer in time"
        raise RunError(f"{len(sites)} of {expected} clients are ready: {reason}")
    return tuple(sites[client] for client in range(expected))
