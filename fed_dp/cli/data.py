"""`fed-dp data`: the known data sets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from fed_dp.errors import ConfigError

if TYPE_CHECKING:
    from fed_dp.data.options import Data

data = typer.Typer(
    help="The data sets: what is there, whether it is whole, how to get it.", no_args_is_help=True
)


@data.command("list")
def list_data() -> None:
    """List the known data sets and whether their files are there."""
    from fed_dp import plugins
    from fed_dp.data import home
    from fed_dp.data.options import Embedded, Published

    table = Table("name", "there", "natural clients", "about")
    for name, section in plugins.components("data").items():
        there = "yes" if issubclass(section, Embedded) else ""
        if issubclass(section, Published):
            folder = section.folder()
            there = "yes" if all((folder / file.name).is_file() for file in section.files(folder)) else "no"
        table.add_row(name, there, section.owners or "", section.about)
    console = Console()
    console.print(table)
    console.print(f"looked in {home()} (FED_DP_DATA)", soft_wrap=True, highlight=False)


@data.command("check")
def check_data(
    names: Annotated[list[str], typer.Argument(help="Data sets to read and verify.")],
    path: Annotated[Path | None, typer.Option(help="The folder of its files, if not the usual one.")] = None,
) -> None:
    """Read data sets whole and verify every file against its published checksum."""
    from fed_dp.data import read

    for name in names:
        _known(name)
        found = read(name, path)
        owners = (
            "" if found.train.owner is None else f", {len(set(found.train.owner.tolist()))} natural clients"
        )
        print(
            f"{name}: good; {len(found.train):,} training and {len(found.test):,} test records of shape "
            f"{found.shape}, {found.classes} classes{owners}"
        )
        for note in found.notes:
            print(f"{name}: {note}")


@data.command("fetch")
def fetch_data(
    names: Annotated[list[str], typer.Argument(help="Data sets to download.")],
    mirror: Annotated[
        str | None,
        typer.Option("--from", metavar="URL", help="Take the files from this mirror instead."),
    ] = None,
) -> None:
    """Download data sets from their public homes; each file is checked before it appears."""
    from fed_dp.data import fetch
    from fed_dp.data.options import Published

    for name in names:
        section = _known(name)
        if not issubclass(section, Published):
            print(f"{name}: embedded, nothing to fetch")
            continue
        for file in section.layouts[0]:
            fetch(section.folder(), file, mirror=mirror)


@data.command("describe")
def describe_data(
    folder: Annotated[
        Path, typer.Argument(help="A folder with train.csv, train.parquet, train.npz, or images.")
    ],
) -> None:
    """Propose the [data] section of an experiment, to be completed with public bounds.

    This looks at the records, and tells in comments what is in them: for somebody who may see them.
    """
    from fed_dp.data.describe import describe

    print(describe(folder), end="")


def _known(name: str) -> type[Data]:
    """Return a data set that stands for itself: not one of the user's own."""
    from fed_dp import plugins

    known = {key: each for key, each in plugins.components("data").items() if not each.at_sites}
    if name not in known:
        raise ConfigError(f"data set {name!r} is not known; known: {', '.join(known)}")
    return known[name]
