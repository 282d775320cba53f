"""From an experiment to a run across real sites: what must hold of it, and how it is watched."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fed_dp import plugins
from fed_dp.clients.building import make_trainer
from fed_dp.deploy.control import control
from fed_dp.deploy.run_queue import Request, requests
from fed_dp.deploy.server_file import ServerHome
from fed_dp.errors import ConfigError, DeployError, ResumeError, RunError
from fed_dp.experiment import Experiment, build, one_of
from fed_dp.experiment.federation import at_server
from fed_dp.experiment.plan import guarantee_of
from fed_dp.runs.folder import Line, RunFolder

AT_SITES = "/at-each-site"  # stands for data.path: every site has its own, and nobody else's business
POLL_INTERVAL = 0.5  # seconds


def deployable(
    home: ServerHome, source: str, settings: Sequence[str], profile: str | None = None
) -> Experiment:
    """Read an experiment and refuse what real sites cannot or must not run."""
    tables = one_of(source, settings, wanted_profile=profile)
    if isinstance(data := tables.get("data"), dict) and data.get("name") == "folder":
        data["path"] = AT_SITES
    experiment = build(tables, where=source)
    sites = home.sites()
    if experiment.clients.count != len(sites):
        raise ConfigError(
            f"clients.count = {experiment.clients.count}: {len(sites)} sites are provisioned "
            f"({', '.join(sites)}); expected -s clients.count={len(sites)}"
        )
    strategy = experiment.strategy
    if not strategy.deployable:
        allowed = (name for name, each in plugins.components("strategy").items() if each.deployable)
        raise ConfigError(
            f"strategy.name = {strategy.name!r} is for simulations; across sites, allowed: "
            f"{', '.join(allowed)}"
        )
    try:
        strategy.check_deployable()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if experiment.private and experiment.privacy.noise_source != "secure":
        raise ConfigError(
            f"privacy.noise_source = {experiment.privacy.noise_source!r} is seeded: sites draw from the "
            "operating system's entropy alone; expected -s privacy.noise_source=secure"
        )
    guarantee = guarantee_of(experiment)
    if guarantee is not None and guarantee.status not in ("proved", "claimed"):
        raise ConfigError(
            f"privacy.variant = {experiment.privacy.variant!r} is {guarantee.status}: no site releases it"
        )
    federation = at_server(experiment, path=home.data)
    make_trainer(experiment, federation.dataset)
    return experiment


def ask(home: ServerHome, experiment: Experiment) -> Request:
    """Ask the server, which must be running, for a run."""
    with control(home) as api:
        api.nodes()
    return Request.make(home.runs, experiment)


def to_resume(home: ServerHome) -> Request:
    """Return the newest run that was given up, asked for again."""
    with control(home) as api:
        api.nodes()
    for request in reversed(list(requests(home.runs))):
        if request.status != "finished":
            request.again()
            return request
    raise ResumeError(f"{home.runs} holds no unfinished run")


def watch(request: Request, *, patience: float, tell: Callable[[Line], None]) -> None:
    """Tell of every round; return when the run is finished. Nothing for `patience` seconds ends watching."""
    told, last = 0, time.monotonic()
    folder = RunFolder(request.folder)
    while True:
        status = request.status
        for line in folder.lines()[told:]:
            tell(line)
            told, last = told + 1, time.monotonic()
        if status == "finished":
            return
        if status == "stopped":
            raise RunError(f"{request.folder.name} was given up after round {request.rounds}: {request.why}")
        if time.monotonic() - last > patience:
            raise DeployError(
                f"nothing has happened for {patience:g} s (--patience); the run is still wanted, and goes on "
                f"when the server can: fed-dp deploy status {request.folder.parent.parent}"
            )
        time.sleep(POLL_INTERVAL)
