"""`fed-dp ledger`: a site's ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fed_dp.errors import ConfigError

ledger = typer.Typer(
    help="A site's ledger: what it may spend, what it has spent, whether it is whole.", no_args_is_help=True
)

LedgerFile = Annotated[Path, typer.Argument(help="A ledger file, or the run folder of a private simulation.")]
SiteName = Annotated[str | None, typer.Option("--site", help="Which site, where the file holds several.")]


@ledger.command("create")
def create_ledger(
    path: Annotated[Path, typer.Argument(help="The file to make; it must not exist.")],
    site: Annotated[str, typer.Option(help="The name of the site.")],
    epsilon: Annotated[float, typer.Option(help="The most this site ever spends, over all runs.")],
    delta: Annotated[float, typer.Option(help="Its δ; 0 allows pure ε alone.")] = 0.0,
) -> None:
    """Make a site's ledger. Its budget can never be changed."""
    from fed_dp.accounting import Budget, Ledger

    Ledger.create(path, site=site, budget=Budget(epsilon, delta))
    print(f"{path}: site {site!r} may spend ε = {epsilon:g}, δ = {delta:g} in all, and has spent nothing")


@ledger.command("show")
def show_ledger(path: LedgerFile, site: SiteName = None) -> None:
    """Show what was spent of the budget, the total first, then every charge. All seals are checked."""
    from fed_dp.accounting import Ledger
    from fed_dp.accounting.statement import standing, weakest

    file = _ledger_file(path)
    console = Console(highlight=False)
    names = [site] if site else Ledger(file).sites()
    accounts = [Ledger(file, name).read() for name in names]
    table = Table("site", "spent ε", "of", "δ", "guarantee", "charges", "last entry")
    for account, entries in accounts:
        table.add_row(
            account.site,
            account.spent_text,
            f"{account.budget.epsilon:g}",
            f"{account.budget.delta:g}",
            "none" if account.unprotected else weakest(entry.event for entry in entries) or "",
            str(len(entries)),
            account.ledger_head[:24],
        )
    console.print(table)
    if len(accounts) == 1:
        console.print(f"ledger head: {accounts[0][0].ledger_head}", soft_wrap=True)
        if accounts[0][1]:
            console.print(standing(entry.event for entry in accounts[0][1]), soft_wrap=True)
    if len(accounts) > 1:
        console.print("one site's charges: --site NAME")
        return
    for entry in accounts[0][1]:
        event, guarantee = entry.event, entry.event.stated
        what = ", ".join(
            f"{key} {value if isinstance(value, str) else f'{value:g}'}"
            for key, value in event.tables()["release"].items()
            if key != "mechanism"
        )
        console.print(
            f"{entry.number}: {entry.when or 'simulated'}, round {event.round}, {event.release.mechanism} "
            f"({what}), {guarantee.status} per {guarantee.unit}, noise: {event.noise_source}",
            soft_wrap=True,
            markup=False,
        )


@ledger.command("verify")
def verify_ledger(
    path: LedgerFile,
    site: SiteName = None,
    head: Annotated[
        str | None,
        typer.Option("--head", metavar="NUMBER:SEAL", help="What the server has seen: finds an older copy."),
    ] = None,
) -> None:
    """Check every seal of a ledger, and that it contains what the server has seen."""
    from fed_dp.accounting import Ledger

    file = _ledger_file(path)
    names = [site] if site else Ledger(file).sites()
    if head and len(names) > 1:
        raise ConfigError(f"--head = {head!r}: {file} holds {len(names)} sites; name one with --site")
    for name in names:
        account, entries = Ledger(file, name).read(known=head)
        budget = account.budget
        print(f"{name}: good; {len(entries)} charges, spent ε = {account.spent_text} of {budget.epsilon:g}")


def _ledger_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    from fed_dp.runs.folder import LEDGERS

    if not (file := path / LEDGERS).is_file():
        runs = sorted(found.parent.name for found in path.glob(f"*/{LEDGERS}"))
        has = f"; the runs in it: {', '.join(runs)}" if runs else ": nothing in it was charged"
        raise ConfigError(f"{path} has no ledgers{has}")
    return file
