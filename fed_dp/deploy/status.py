"""How a deployment stands: for its server's operator, and for a site's."""

from __future__ import annotations

import time
from dataclasses import dataclass

from fed_dp.accounting import Event, from_json
from fed_dp.accounting.statement import spent, standing
from fed_dp.deploy.control import Node, control
from fed_dp.deploy.run_queue import Request, requests
from fed_dp.deploy.server_file import ServerHome
from fed_dp.errors import DeployError
from fed_dp.experiment.plan import budget_of
from fed_dp.runs.folder import RunFolder


@dataclass(frozen=True, slots=True)
class SiteStatus:
    """One site, as the server sees it."""

    name: str
    online: bool | None  # None: the server does not run
    seen: str
    uploaded: int | None  # the last round of the run that it took part in
    spent: float | None  # ε of this run
    failure: str


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The newest run."""

    name: str
    status: str
    why: str
    rounds: int
    of: int
    delta: float
    standing: str  # what stands behind what was released: guarantee, unit, neighbours


def newest(home: ServerHome) -> Request | None:
    """Return the run that was asked for last."""
    return next(reversed(list(requests(home.runs))), None)


def status(home: ServerHome) -> tuple[RunStatus | None, list[SiteStatus], str]:
    """Return the newest run, every site, and why the server does not answer, if it does not."""
    nodes, why = dict[str, Node](), ""
    try:
        with control(home) as api:
            nodes = {node.name: node for node in api.nodes()}
    except DeployError as error:
        why = str(error)
    request = newest(home)
    run, events, failures, last = None, dict[int, list[Event]](), dict[int, str](), dict[int, int]()
    delta = 0.0
    if request is not None:
        folder = RunFolder(request.folder)
        experiment = folder.experiment()
        budget = budget_of(experiment)
        delta = budget.delta if budget else 0.0
        for line in folder.lines():
            failed = {int(key): why for key, why in line["failures"].items() if key.isdigit()}
            failures |= failed
            everybody = line["clients"]["asked"] + len(failed) >= experiment.clients.count
            for client in range(experiment.clients.count) if everybody else ():
                if client not in failed:
                    last[client] = line["round"]
                    failures.pop(client, None)
            for event in from_json(line["events"]):
                last[event.client] = line["round"]
        released = [event for _, event in folder.noted()]
        for event in released:
            events.setdefault(event.client, []).append(event)
        run = RunStatus(
            request.folder.name,
            request.status,
            request.why,
            request.rounds,
            experiment.rounds,
            delta,
            standing(released) if released else "",
        )
    found = []
    for name, client in home.sites().items():
        node = nodes.get(name)
        found.append(
            SiteStatus(
                name,
                None if why else node is not None and node.online,
                "never" if node is None or node.last_seen is None else ago(time.time() - node.last_seen),
                last.get(client),
                spent(events[client], delta=delta) if client in events else None,
                failures.get(client, ""),
            )
        )
    return run, found, why


def ago(seconds: float) -> str:
    """Write how long ago something was."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
