"""`fed-dp deploy`: real sites. Parse, call, print."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fed_dp.errors import ConfigError, DeployError

deploy = typer.Typer(
    help="Real sites: provision, run and watch a federation over TLS, with authenticated sites.",
    no_args_is_help=True,
)
ServerFolder = Annotated[Path, typer.Argument(help="The server's folder, made by deploy init.")]
SiteFolder = Annotated[Path, typer.Argument(help="The site's folder (its start kit), or its site.toml.")]


@deploy.command("init")
def init(
    folder: Annotated[
        Path, typer.Argument(help="Where to make it; an existing one gets the new sites alone.")
    ],
    sites: Annotated[str, typer.Option(help="Names of the sites, separated by commas.")],
    host: Annotated[str, typer.Option(help="Name or address at which sites find the server.")] = "localhost",
    port: Annotated[int, typer.Option(help="The port for sites.")] = 9092,
    control_port: Annotated[int, typer.Option(help="The port for the operator, on loopback alone.")] = 9093,
    epsilon: Annotated[float, typer.Option(help="The most each new site ever spends, over all runs.")] = 4.0,
    delta: Annotated[float, typer.Option(help="Its δ; 0 allows pure ε alone.")] = 1e-5,
    days: Annotated[int, typer.Option(help="How long the server's certificate is valid.")] = 825,
) -> None:
    """Make an authority, the server's folder, and a start kit for every site.

    Run again with more names, it adds those and touches nothing else.
    """
    from fed_dp.accounting import Budget
    from fed_dp.deploy.provision import Plan, provision

    names = tuple(name.strip() for name in sites.split(",") if name.strip())
    plan = Plan(names, Budget(epsilon, delta), host, port, control_port, days)
    new, old = provision(folder, plan)
    for name in new:
        print(f"{folder / 'sites' / name}: kit of {name}, budget ε = {epsilon:g}, δ = {delta:g}")
    for name in old:
        print(f"{folder / 'sites' / name}: there already, left as it is")
    print(f"{folder / 'authority'}: signs certificates; keep it off line")
    print(f"next: put test.csv into {folder / 'server' / 'data'}; fed-dp deploy server {folder / 'server'}")
    if new:
        print("then give every site its kit, by a safe way: it holds the site's private key")


@deploy.command("renew")
def renew_certificate(
    folder: Annotated[Path, typer.Argument(help="The provisioned folder, with its authority.")],
    days: Annotated[int, typer.Option(help="How long it is valid.")] = 825,
) -> None:
    """Issue a new server certificate; restart the server to use it. Sites need nothing new."""
    from fed_dp.deploy.provision import renew

    print(f"{renew(folder, days=days)}: renewed for {days} days; restart the server")


@deploy.command("revoke")
def revoke_site(
    folder: ServerFolder,
    name: Annotated[str, typer.Argument(help="The site whose key was lost or stolen.")],
) -> None:
    """Let a site in no more; restart the server then. Its number stays taken."""
    from fed_dp.deploy.provision import revoke

    revoke(folder, name)
    print(f"{name}: revoked; restart the server. A new key lets it in again: fed-dp deploy rekey")


@deploy.command("forget")
def forget_ledger(
    folder: ServerFolder,
    name: Annotated[str, typer.Argument(help="The site whose ledger was replaced on purpose.")],
) -> None:
    """Forget a site's ledger, so that it may take part with another one. No run may be going on.

    What was charged to the old ledger is not charged to the new one: only the site's own engineer can say
    that it is right to begin again.
    """
    from fed_dp.deploy.server_file import ServerHome
    from fed_dp.server.ledger_heads import LedgerHeads

    if not (count := LedgerHeads(ServerHome(folder).runs).forget(name)):
        raise ConfigError(f"no ledger of a site {name!r} is remembered in {folder}")
    print(
        f"{name}: {count} ledger{'s' if count > 1 else ''} forgotten; the next run takes the one that it has"
    )


@deploy.command("rekey")
def rekey_site(
    folder: Annotated[Path, typer.Argument(help="The provisioned folder.")],
    name: Annotated[str, typer.Argument(help="The site that needs a new key.")],
) -> None:
    """Give a site a new key, under its old name, number and ledger; restart the server then."""
    from fed_dp.deploy.provision import rekey

    key = rekey(folder, name)
    print(f"{key}: give it to {name}, by a safe way; copy server/sites to the server, and restart it")


@deploy.command("server")
def server(folder: ServerFolder) -> None:
    """Run the server: let the sites in, and see the runs through that were asked for.

    Stopped or killed, it goes on where it was when it is started again.
    """
    from fed_dp.deploy.server import serve
    from fed_dp.deploy.server_file import ServerHome

    serve(ServerHome(folder), _say, until=_until_stopped())


@deploy.command("site")
def site(folder: SiteFolder) -> None:
    """Run a site: take part in whatever its own file allows, and in nothing else.

    A server that is not there is waited for without limit.
    """
    from fed_dp.deploy.site import serve

    serve(folder, _say, until=_until_stopped())


@deploy.command("check")
def check(
    folder: SiteFolder,
    experiment: Annotated[
        str | None,
        typer.Option(help="An experiment's file: its records are read, and this site's policy is asked."),
    ] = None,
) -> None:
    """Look, at a site, before it begins: key, certificates, ledger, records, clock, server."""
    from fed_dp.clients.site_file import SiteFile
    from fed_dp.deploy.check import findings
    from fed_dp.deploy.submit import AT_SITES
    from fed_dp.experiment import load_experiment

    wanted = None if experiment is None else load_experiment(experiment, [f"data.path={AT_SITES}"])
    good = True
    for what, fine, found in findings(SiteFile.read(folder), wanted):
        good = good and fine
        print(f"{'good' if fine else 'FAULT':5}  {what}: {found}")
    if not good:
        raise DeployError("this site cannot take part yet")


@deploy.command("run")
def run(
    experiment: Annotated[
        str | None, typer.Argument(help="A shipped experiment, NAME:VARIANT, or a TOML file.")
    ] = None,
    folder: Annotated[Path, typer.Option("--server", help="The server's folder; it must be running.")] = Path(
        "."
    ),
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a key (repeatable)."),
    ] = None,
    profile: Annotated[str | None, typer.Option("--profile", "-p", metavar="NAME", help="How large.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest run that was given up.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Ask, and do not watch.")] = False,
    patience: Annotated[
        float, typer.Option(help="Stop watching when nothing happened for so many seconds.")
    ] = 7200,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json to standard output.")] = False,
) -> None:
    """Run an experiment across the sites, and watch it. Ctrl-C ends watching, not the run."""
    from fed_dp.deploy.server_file import ServerHome
    from fed_dp.deploy.submit import ask, deployable, to_resume, watch
    from fed_dp.runs.folder import REPORT, RunFolder
    from fed_dp.server.app import PlainLines, round_text

    home = ServerHome(folder)
    if resume == (experiment is not None):
        raise ConfigError("expected an experiment, or --resume alone")
    request = (
        to_resume(home)
        if experiment is None
        else ask(home, deployable(home, experiment, settings or [], profile))
    )
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    wanted = RunFolder(request.folder).experiment()
    PlainLines(console.file).started(wanted, request.folder, request.rounds)  # type: ignore[arg-type]
    if detach:
        return
    budget = wanted.privacy.budget_epsilon
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        watch(
            request,
            patience=patience,
            tell=lambda line: console.print(
                round_text(line, rounds=wanted.rounds, budget=budget), markup=False
            ),
        )
    except KeyboardInterrupt:
        console.print(f"not watching any more; the run goes on: fed-dp deploy status {home.folder}")
        raise typer.Exit(130) from None
    summary = RunFolder(request.folder).summary()
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        from fed_dp.cli.show import show_summary

        show_summary(console, summary, {wanted.name: wanted})
        console.print(f"report: {request.folder / REPORT}")


@deploy.command("stop")
def stop(folder: ServerFolder) -> None:
    """Stop the newest run; --resume goes on with it."""
    from fed_dp.deploy.control import control
    from fed_dp.deploy.server_file import ServerHome
    from fed_dp.deploy.status import newest

    home = ServerHome(folder)
    request = newest(home)
    if request is None or request.status != "wanted":
        raise ConfigError(f"{home.runs}: nothing is being run")
    request.withdraw()
    if request.number is not None:
        with control(home) as api:
            api.stop(request.number)
    print(f"{request.folder.name}: stopped after round {request.rounds}")


@deploy.command("status")
def status(
    folder: Annotated[Path, typer.Argument(help="The server's folder, or a site's.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Tell how things stand: at the server, sites, round and ε; at a site, its ledger."""
    from fed_dp.clients.site_file import FILE as SITE_FILE

    if (folder / SITE_FILE).is_file() or folder.name == SITE_FILE:
        _site_status(folder, as_json)
        return
    from dataclasses import asdict

    from fed_dp.deploy.server_file import ServerHome
    from fed_dp.deploy.status import status as found_status

    home = ServerHome(folder)
    newest, sites, why = found_status(home)
    if as_json:
        told = {
            "run": newest and asdict(newest),
            "sites": [asdict(each) for each in sites],
            "server": why or "up",
        }
        print(json.dumps(told, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(why or f"the server answers at {home.control}", markup=False)
    if newest is not None:
        because = f": {newest.why}" if newest.why else ""
        console.print(
            f"run {newest.name}: {newest.status}, round {newest.rounds} of {newest.of}{because}", markup=False
        )
    table = Table(
        "site",
        "online",
        "last seen",
        "last round",
        f"ε of this run, δ = {newest.delta if newest else 0:g}",
        "why not",
    )
    for each in sites:
        table.add_row(
            each.name,
            "?" if each.online is None else "yes" if each.online else "no",
            each.seen,
            "" if each.uploaded is None else str(each.uploaded),
            "" if each.spent is None else f"{each.spent:.4g}",
            each.failure,
        )
    console.print(table)
    if newest is not None and newest.standing:
        console.print(f"ε over this run so far: {newest.standing}", markup=False)
    console.print("ε is what the server has seen of this run; each site's own ledger has the whole of it")


@deploy.command("demo")
def demo(
    folder: Annotated[
        Path | None, typer.Argument(help="Where to make it; it must not exist. Default: runs/demo-TIME.")
    ] = None,
) -> None:
    """Show four hospitals (UCI heart disease) as four sites on loopback: DSSGD, pSGD and hybrid SVM.

    Everything is real but the distance: TLS, authenticated sites, a ledger for each. Takes some minutes.
    """
    from fed_dp.accounting import Statement
    from fed_dp.accounting.statement import standing
    from fed_dp.deploy import demo as show
    from fed_dp.deploy.hospitals import HOSPITALS
    from fed_dp.runs.folder import new_path
    from fed_dp.runs.report import metric_words, owner_metrics
    from fed_dp.runs.scores import final, text
    from fed_dp.server.app import round_text

    place = (folder or new_path(Path("runs"), "demo")).absolute()
    if place.exists():
        raise ConfigError(f"{place} exists: the demonstration makes a folder of its own")
    console = Console(highlight=False, soft_wrap=True)
    home = show.prepare(place)
    console.print(f"provisioned {', '.join(HOSPITALS)} in {place}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found: dict[str, dict[str, Any]] = {}
    with show.running(place, home, console.print):
        for variant in show.RUNS:
            console.print(f"{variant}:")
            found[variant] = show.run(
                home,
                variant,
                lambda wanted, line: console.print(
                    "  " + round_text(line, rounds=wanted.rounds, budget=wanted.privacy.budget_epsilon),
                    markup=False,
                ),
            )
    metrics = owner_metrics(found.values())
    table = Table(
        "run", *HOSPITALS, "all", title=f"{metric_words(metrics)} on each hospital's own test records"
    )
    for variant, summary in found.items():
        scores = summary["by_owner"]
        each = [text(scores[name], metrics) if name in scores else "not told" for name in HOSPITALS]
        whole = {metric.name: final(summary, metric) for metric in metrics}
        table.add_row(variant, *each, text(whole, metrics))
    console.print(table)
    for variant, summary in found.items():
        for line in Statement(**summary["privacy"]).lines():
            console.print(f"{variant}: {line}", markup=False)
    ledgers = Table("site", "spent ε, all three runs", "of", "δ", "charges", title="the ledgers, on disk")
    kept = show.ledgers(place)
    for account, _ in kept:
        budget = account.budget
        ledgers.add_row(
            account.site,
            account.spent_text,
            f"{budget.epsilon:g}",
            f"{budget.delta:g}",
            str(account.number),
        )
    console.print(ledgers)
    console.print(standing(entry.event for _, entries in kept for entry in entries), markup=False)
    console.print(f"everything is in {place}: kits in sites/, run folders in server/runs/")


def _site_status(folder: Path, as_json: bool) -> None:
    from fed_dp.accounting.statement import standing
    from fed_dp.clients.site_file import SiteFile

    own = SiteFile.read(folder)
    account, entries = own.opened().read()
    budget, last = account.budget, entries[-1] if entries else None
    if as_json:
        told: dict[str, Any] = {
            "site": own.name,
            "spent": None if account.unprotected else account.spent,  # no bound
            "metered": account.metered,
            "epsilon": budget.epsilon,
            "delta": budget.delta,
            "charges": len(entries),
            "mark": account.ledger_head,
            "last": last.when if last else None,
        }
        print(json.dumps(told, indent=2))
        return
    print(
        f"{own.name}: spent ε = {account.spent_text} of {budget.epsilon:g}, δ = {budget.delta:g}, in "
        f"{len(entries)} charges over all runs"
    )
    if last is not None:
        print(standing(entry.event for entry in entries))
        event = last.event
        print(f"last: {last.when}, round {event.round}, {event.release.mechanism}, {event.stated.status}")


def _say(text: str) -> None:
    from datetime import UTC, datetime

    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {text}", flush=True)


def _until_stopped() -> Callable[[], bool]:
    """Return what tells whether SIGTERM or Ctrl-C has come."""
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, _: stopped.append(signum))
    return lambda: bool(stopped)
