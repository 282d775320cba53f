"""The command line: parse, call, print. Heavy imports wait until a command needs them."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import typer.core
from rich.console import Console
from rich.table import Table

from fed_dp.cli import components
from fed_dp.cli.compare import audit, compare, demo, experiment_names, interrupt
from fed_dp.cli.data import data
from fed_dp.cli.deploy import deploy
from fed_dp.cli.ledger import ledger
from fed_dp.errors import ConfigError, FedDpError, ResumeError
from fed_dp.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fed_dp.experiment import Experiment
    from fed_dp.server.observers import Observer

typer.core.HAS_RICH = False  # help is plain text: with it, defaults would stand in \\[brackets]

app = typer.Typer(
    name="fed-dp",
    help="Private federated learning on Flower, where every number about privacy can be checked.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
experiments = typer.Typer(help="The experiments that come with the package.", no_args_is_help=True)
app.add_typer(experiments, name="experiments")
app.add_typer(data, name="data")
app.add_typer(ledger, name="ledger")
app.add_typer(deploy, name="deploy")
app.add_typer(audit, name="audit")
app.add_typer(demo, name="demo")

Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        "-p",
        metavar="NAME",
        help="How large, where an experiment has several (see: experiments list). Default: the first.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a key, as in rounds=20 (repeatable)."),
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fed-dp {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# ---------------------------------------------------------------------------------- simulate


@app.command()
def simulate(
    experiment: Annotated[
        str,
        typer.Argument(
            help="A shipped experiment (see: fed-dp experiments list), NAME:VARIANT, a TOML file, "
            "or, with --resume, a run folder.",
            autocompletion=experiment_names,
        ),
    ],
    settings: Settings = None,
    profile: Profile = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the newest unfinished run of this experiment."),
    ] = False,
    engine: Annotated[
        str,
        typer.Option(
            help="ray: many processes; in-process: this one; auto: ray, unless clients train one at a time."
        ),
    ] = "auto",
    runs: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print summary.json to standard output, the rest to standard error."),
    ] = False,
    track: Annotated[
        list[str] | None,
        typer.Option(help="Also write the curves to tensorboard or mlflow (repeatable; each is an extra)."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Run an experiment as a federated simulation and report accuracy, cost and privacy."""
    if engine not in ("auto", "ray", "in-process"):
        raise ConfigError(f"--engine = {engine!r}: expected 'auto', 'ray' or 'in-process'")
    name, variants, folder = _what_to_run(experiment, settings or [], resume, profile)
    from fed_dp.server.tracking import tracked
    from fed_dp.simulations.study import run_study, to_resume

    if resume and folder is None:
        folder = to_resume(runs, variants)
    console = Console(stderr=as_json, highlight=False)
    observers: list[Observer] = []

    def observe() -> Observer:
        observers.append(tracked(_observer(console, quiet), track or ()))
        return observers[-1]

    signal.signal(signal.SIGTERM, interrupt)
    try:
        path, summary = run_study(
            name,
            variants,
            observe=observe,
            engine=engine,  # type: ignore[arg-type]
            root=runs,
            folder=folder,
        )
    except KeyboardInterrupt:
        console.print("stopped; go on with the same command and --resume")
        raise typer.Exit(130) from None
    finally:
        for observer in observers:
            observer.stop()
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        from fed_dp.cli.show import show_summary

        show_summary(console, summary, variants)
        console.print(f"report: {path / 'report.html'}", soft_wrap=True)


def _what_to_run(
    source: str, settings: list[str], resume: bool, profile: str | None
) -> tuple[str, dict[str, Experiment], Path | None]:
    from fed_dp.experiment import build, group_of, override, select

    if Path(source).is_dir():
        from fed_dp.simulations.study import variants_of

        if not resume:
            raise ConfigError(f"{source} is a folder: to go on with the run in it, add --resume")
        if settings or profile:
            given = f"--set {settings[0]!r}" if settings else f"--profile {profile!r}"
            raise ConfigError(f"{given}: a resumed run keeps its own settings")
        return *variants_of(Path(source)), Path(source)
    name, chosen = select(source, profile)
    for setting in settings if any(group_of(key) != key for key in chosen) else ():
        if setting.partition("=")[0].strip() in ("seed", "data.fold", "data.folds"):
            raise ConfigError(f"--set {setting!r}: the experiment has seeds and folds of its own (repeats)")
    built = {key: build(override(tables, settings), where=source) for key, tables in chosen.items()}
    return next(iter(built.values())).name if len(built) == 1 else name, built, None


def _observer(console: Console, quiet: bool) -> Observer:
    from fed_dp.server.app import PlainLines
    from fed_dp.server.observers import Silent
    from fed_dp.simulations.progress import ProgressBar

    if quiet:
        return Silent()
    return ProgressBar(console) if console.is_terminal else PlainLines(console.file)  # type: ignore[arg-type]


app.command("compare")(compare)
app.command("plugins")(components.list_plugins)
app.command("conformance")(components.conformance)
app.command("schema")(components.schema)
app.command("export")(components.export)

# ------------------------------------------------------------------------------------ predict


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="A finished run's folder, or the model.npz in it.")],
    inputs: Annotated[
        Path | None,
        typer.Argument(
            help="Records without labels: a table as in the experiment's data folder, or an npz file with X. "
            "Without it: score the experiment's own test records."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the probabilities here, as CSV. Default: standard output.")
    ] = None,
) -> None:
    """Predict with a trained model: each class' probability for every record.

    RUN is a finished run's folder, or the model.npz in it. INPUTS are records without labels: a table as in
    the experiment's data folder, or an npz file with X. Without INPUTS, the test records are scored.
    """
    import numpy as np

    from fed_dp.data import read_inputs
    from fed_dp.data.formats import read_npz
    from fed_dp.data.sets.own_folder import OwnFolder
    from fed_dp.experiment.federation import make_federation
    from fed_dp.runs.folder import RunFolder
    from fed_dp.runs.saved_model import SavedModel

    model = SavedModel.load(run)
    section = model.experiment.data
    if inputs is None:
        if not run.is_dir():
            raise ConfigError(f"{run}: only a run folder tells which its test records were; name that")
        data = make_federation(RunFolder(run).experiment()).dataset
        for name, value in model.scores(data.inputs(data.test), data.test.y).items():
            print(f"{name} {value:.4f}")
        return
    names: Iterable[str] = map(str, range(model.classes))
    if isinstance(section, OwnFolder):
        x, names = read_inputs(section.folder_options(), inputs), section.output_names
    elif inputs.suffix == ".npz":
        [x] = read_npz(inputs, ("X",))
    else:
        raise ConfigError(
            f"{inputs}: data.name = {section.name!r} takes an npz file with X, scaled as its own"
        )
    found = model.predict(x)
    lines = [",".join(names), *(",".join(f"{value:.6g}" for value in row) for row in np.asarray(found))]
    if out is None:
        print("\n".join(lines))
        return
    try:
        out.write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise ConfigError(f"--out {str(out)!r} cannot be written: {error.strerror}") from None


# -------------------------------------------------------------------------------- experiments


@experiments.command("list")
def list_experiments() -> None:
    """List the shipped experiments."""
    from fed_dp.experiment import group_of, profile, read_tables, shipped, variants

    table = Table("name", "profiles", "variants of the first", "what it shows")
    for name in shipped():
        tables = read_tables(name)
        found = list(dict.fromkeys(map(group_of, variants(profile(tables)))))
        table.add_row(
            name,
            ", ".join(tables.get("profiles", {})),
            "" if found == [name] else ", ".join(found),
            tables.get("description", ""),
        )
    Console().print(table)


@experiments.command("show")
def show_experiment(
    name: Annotated[str, typer.Argument(help="A shipped name, NAME:VARIANT, or a TOML file.")],
    settings: Settings = None,
    profile: Profile = None,
) -> None:
    """Print an experiment as it would run: every key, resolved, with its digest."""
    import tomli_w

    _, built, _ = _what_to_run(name, settings or [], resume=False, profile=profile)
    for experiment in built.values():
        print(f"# digest {experiment.digest}")
        print(tomli_w.dumps(experiment.tables()))


def main() -> None:
    """Run the command line; a user's mistake is one line and a code other than 0, never a traceback."""
    try:
        app()
    except FedDpError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        code = 2 if isinstance(error, ConfigError | ResumeError) else 1
        raise SystemExit(code) from None


if __name__ == "__main__":
    main()
