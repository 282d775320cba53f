"""The command line of comparisons, audits and demonstrations."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fed_dp.errors import ConfigError, RunError

if TYPE_CHECKING:
    from fed_dp.audit.finding import Finding
    from fed_dp.comparison.run_cache import Done
    from fed_dp.experiment.comparing import Plan

audit = typer.Typer(
    help="Lower bounds on the privacy that is really lost: of a mechanism, a trainer, a whole run.",
    no_args_is_help=True,
)
demo = typer.Typer(help="What a curious server sees, in pictures.", no_args_is_help=True)

Json = Annotated[
    bool, typer.Option("--json", help="Print JSON to standard output, the rest to standard error.")
]
Epsilon = Annotated[float, typer.Option(help="The ε that is stated.")]
Factor = Annotated[
    float,
    typer.Option("--noise", metavar="FACTOR", help="Multiply the noise, as in 0.5: does the audit notice?"),
]
Confidence = Annotated[float, typer.Option(help="Of the bound.")]
Seed = Annotated[int, typer.Option(help="Of the trials.")]


def compare(
    experiment: Annotated[
        str, typer.Argument(help="A shipped experiment or a TOML file; its variants are what is compared.")
    ] = "compare-digits",
    epsilon: Annotated[
        str | None,
        typer.Option(metavar="E,E,…", help="Total ε of the runs. Default: the file's, or .5,1,2,8."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each. Default: the file's, or 3.")] = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME,…", help="These variants alone, and pSGD, and the references."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The file's quick profile: minutes.")] = False,
    profile: Annotated[str | None, typer.Option("--profile", "-p", metavar="NAME")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a key in all variants (repeatable)."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Runs at a time. Default: one per core.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run everything again, whatever is kept.")] = False,
    audits: Annotated[bool, typer.Option("--audit/--no-audit", help="Audit every private row.")] = True,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Choose from the file's [compare.tune] grid, and count what that costs."),
    ] = False,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also write the curves for TensorBoard (extra).")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Where run folders are made and results are kept.")] = Path(
        "runs"
    ),
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Compare mechanisms at several ε, over several seeds, against pSGD and without privacy.

    Every private variant of EXPERIMENT is run at every ε, all others once; pSGD, and the references
    centralised, standalone and without privacy, are added where the file has none. Results are kept: the same
    command goes on where it stopped, and repeats nothing.
    """
    from fed_dp.comparison.compare import compare as run
    from fed_dp.experiment.comparing import plan

    if quick and profile:
        raise ConfigError(f"--quick and --profile {profile!r}: expected one of them")
    planned = plan(
        experiment,
        epsilons=_numbers("--epsilon", epsilon),
        seeds=seeds,
        only=_words(only),
        settings=settings or [],
        wanted_profile="quick" if quick else profile,
    )
    if tensorboard is not None:
        from fed_dp.runs.event_file import check_tensorboard

        check_tensorboard("--tensorboard")
    console = Console(stderr=as_json, highlight=False)
    watch = _Watch(console, len({cell.experiment.digest for cell in planned.cells}), quiet)
    signal.signal(signal.SIGTERM, interrupt)
    if tune:
        _tune(console, planned, runs, jobs=jobs, fresh=fresh, quiet=quiet, as_json=as_json)
        return
    try:
        folder, found = run(
            planned,
            root=runs,
            command=f"fed-dp {shlex.join(sys.argv[1:])}",
            jobs=jobs,
            fresh=fresh,
            audit=audits,
            observe=watch,
        )
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on where it was")
        raise typer.Exit(130) from None
    finally:
        watch.stop()
    if tensorboard is not None:
        from fed_dp.comparison.tensorboard import export

        export(found, tensorboard)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _show(console, found)
        console.print(f"report: {folder / 'report.html'}", soft_wrap=True)
    if failed := [row for row in found["rows"] if row["failures"]]:
        first = failed[0]
        seed, why = next(iter(first["failures"].items()))
        raise RunError(
            f"{sum(len(row['failures']) for row in failed)} runs failed; {first['variant']}, ε = "
            f"{first['epsilon']}, seed {seed}: {why}"
        )


def _tune(
    console: Console, planned: Plan, root: Path, *, jobs: int | None, fresh: bool, quiet: bool, as_json: bool
) -> None:
    """Choose hyper-parameters, and tell what the choice costs beside what the chosen run does."""
    from fed_dp.comparison.tuning import tune

    watch = _Watch(console, 0, quiet)
    try:
        rows = tune(planned, root=root, jobs=jobs, fresh=fresh, observe=watch)
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on where it was")
        raise typer.Exit(130) from None
    finally:
        watch.stop()
    if as_json:
        print(json.dumps([row.tables() for row in rows], indent=2))
        return
    table = Table(title=f"{planned.name}: the best of a random number of runs")
    table.add_column("mechanism")
    for heading in ("chosen", "runs"):
        table.add_column(heading)
    for heading in ("chosen run ε", "selection ε", "all runs ε", "score"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.variant,
            ", ".join(f"{key.rpartition('.')[2]} = {value}" for key, value in row.chosen.items()),
            f"{row.runs} (mean {row.mean_runs:g})",
            f"{row.epsilon_chosen:.3f}",
            f"{row.epsilon_selection:.3f}",
            f"{row.epsilon_all_runs:.3f}",
            f"{row.test:.4f}",
        )
    console.print(table)
    console.print(
        "selection ε: for those who see the chosen run and no other; all runs ε: for the server and the "
        "sites, who see every run. Chosen by one half of the test records, score on the other half.",
        soft_wrap=True,
    )
    for words in dict.fromkeys(f"one {r.unit}, {r.neighbours}, δ = {r.delta:g}" for r in rows):
        console.print(f"ε protects {words}", soft_wrap=True, markup=False)


def _numbers(flag: str, text: str | None) -> list[float]:
    try:
        return [float(part) for part in _words(text)]
    except ValueError:
        raise ConfigError(f"{flag} {text!r}: expected numbers above 0, as in 0.5,1,2") from None


def _words(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def interrupt(*_: object) -> NoReturn:
    """Take a signal as Ctrl-C."""
    raise KeyboardInterrupt


class _Watch:
    """The progress of a comparison: a bar in a terminal, else a line for each run."""

    def __init__(self, console: Console, total: int, quiet: bool) -> None:
        self._console, self._quiet, self._total, self._count = console, quiet, total, 0
        self._bar: Progress | None = None
        if console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("comparing"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TextColumn("{task.fields[last]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=total or None, last="")

    def __call__(self, done: Done) -> None:
        from fed_dp.runs.scores import final, metrics_of

        self._count += 1
        cell = done.cell
        at = "no privacy" if cell.epsilon is None else f"ε = {cell.epsilon:g}"
        text = f"{cell.variant}, {at}, seed {cell.seed}: "
        text += (
            f"failed: {done.failure}"
            if done.failure
            else f"{metrics_of(done.summary)[0].label} {final(done.summary):.4f}"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=self._count, last=text[:60])
        elif not self._quiet:
            kept = " (kept)" if done.kept else ""
            of = f"/{self._total}" if self._total else ""
            self._console.print(f"{self._count}{of} {text}{kept}", markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.stop()


def _show(console: Console, found: dict[str, Any]) -> None:
    from fed_dp.audit.finding import row_text

    score, label = found["score"], found["metric"]["label"]
    table = Table(
        title=f"{found['name']}: mean {label} (half of its 95 % interval), {len(found['seeds'])} seeds"
    )
    table.add_column("mechanism")
    for heading in ("total ε", label, "less pSGD", "p"):
        table.add_column(heading, justify="right")
    for heading in ("guarantee", "audit: ε"):
        table.add_column(heading)
    protected: dict[str, str] = {}
    for row in sorted(found["rows"], key=lambda r: (r["epsilon"] is not None, r["epsilon"] or 0)):
        if score not in row:
            continue
        cost, told, against = row["privacy"], row[score], row.get("against_baseline") or {}
        interval, p = told["interval"], against.get("p_adjusted")
        if cost is not None:
            protected[row["variant"]] = f"one {cost['unit']}, {cost['neighbours']}, δ = {cost['delta']:g}"
        table.add_row(
            row["variant"],
            "" if cost is None else f"{cost['epsilon_total']:.3f}",
            f"{told['mean']:.4f}" + ("" if interval is None else f" (±{told['mean'] - interval[0]:.3f})"),
            "" if "difference" not in against else f"{against['difference']:+.4f}",
            "" if p is None else f"{p:.3f}",
            "no privacy" if cost is None else cost["guarantee"],
            row_text(row["audit"], delta=cost["delta"]) if row.get("audit") else "",
        )
    console.print(table)
    for words in dict.fromkeys(protected.values()):
        who = ", ".join(name for name, each in protected.items() if each == words)
        console.print(f"ε protects {words}: {who}", soft_wrap=True, markup=False)


def experiment_names(incomplete: str) -> list[str]:
    """Complete the name of a shipped experiment, or of one of its variants."""
    from fed_dp.experiment import profile, read_tables, shipped, variants

    name, colon, _ = incomplete.partition(":")
    if colon and name in shipped():
        found = [f"{name}:{variant}" for variant in variants(profile(read_tables(name)))]
    else:
        found = list(shipped())
    return [each for each in found if each.startswith(incomplete)]


# --------------------------------------------------------------------------------------- audit


@audit.command("mechanism")
def audit_mechanism(
    name: Annotated[str, typer.Argument(help="A mechanism, or all.")] = "all",
    epsilon: Epsilon = 1.0,
    delta: Annotated[float, typer.Option(help="Of what is not pure.")] = 1e-5,
    noise: Factor = 1.0,
    as_json: Json = False,
) -> None:
    """Compute the exact loss of a mechanism between the worst neighbours known, from its own code."""
    from fed_dp.audit.mechanisms import MECHANISMS
    from fed_dp.audit.mechanisms import audit_mechanism as run

    names = list(MECHANISMS) if name == "all" else [name]
    _tell(
        [found for each in names for found in run(each, epsilon=epsilon, delta=delta, factor=noise)], as_json
    )


@audit.command("trainer")
def audit_trainer(
    name: Annotated[
        str,
        typer.Argument(help="psgd, dssgd, random_mask, dpa, pcdbn, adlm, ilm, svm, dpme or filter-priority."),
    ],
    variant: Annotated[
        str, typer.Option(help="proved, paper, paper_as_printed or paper_as_released.")
    ] = "proved",
    epsilon: Epsilon = 1.0,
    delta: Annotated[float | None, typer.Option(help="Default: 0 where it can be.")] = None,
    trials: Annotated[int, typer.Option(help="Runs in each of the two worlds.")] = 500,
    confidence: Confidence = 0.95,
    seed: Seed = 1,
    noise: Factor = 1.0,
    path: Annotated[
        str | None,
        typer.Option(help="Of psgd: 'client batches', hooks, ghost, vmap or secure. Default: as it chooses."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a trainer in two worlds that differ in a canary, and bound what tells them apart."""
    from fed_dp.audit.trainers import audit_trainer as run

    found = run(
        name,
        variant=variant,
        epsilon=epsilon,
        delta=delta,
        trials=trials,
        seed=seed,
        factor=noise,
        confidence=confidence,
        path=path,
    )
    _tell([found], as_json)


@audit.command("run")
def audit_run(
    experiment: Annotated[
        str,
        typer.Argument(
            help="A shipped experiment, NAME:VARIANT, or a TOML file.", autocompletion=experiment_names
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a key (repeatable)."),
    ] = None,
    profile: Annotated[str | None, typer.Option("--profile", "-p", metavar="NAME")] = None,
    canaries: Annotated[int, typer.Option(help="Records that are in or out by a fair coin.")] = 300,
    attack: Annotated[
        str, typer.Option(help="What canaries are guessed from: loss, or gradient (white box: noise images).")
    ] = "loss",
    confidence: Confidence = 0.95,
    seed: Seed = 1,
    as_json: Json = False,
) -> None:
    """Audit a whole federated run, once: canaries are in it by coin flips, and guessed from its models."""
    from fed_dp.audit.one_run import audit_run as run
    from fed_dp.experiment import load_experiment

    loaded = load_experiment(experiment, settings or [], wanted_profile=profile)
    found = run(
        loaded,
        canaries=canaries,
        seed=seed,
        confidence=confidence,
        attack=attack,  # type: ignore[arg-type]  # which is checked
    )
    _tell([found], as_json)


def _tell(found: list[Finding], as_json: bool) -> None:
    if as_json:
        print(json.dumps([each.tables() for each in found], indent=2))
        return
    console = Console(highlight=False)
    for each in found:
        for line in each.lines():
            console.print(line, soft_wrap=True, markup=False)


# ---------------------------------------------------------------------------------------- demo

Out = Annotated[Path, typer.Option(help="The page to write.")]


@demo.command("inversion")
def demo_inversion(
    out: Out = Path("inversion.html"),
    data: Annotated[str, typer.Option(help="digits or mnist.")] = "digits",
    seed: Seed = 1,
    as_json: Json = False,
) -> None:
    """Reconstruct a record from a DSSGD upload: dense, top 10 %, top 1 %, clipped, and with noise."""
    from fed_dp.demonstrations.inversion import inversion

    _shown(inversion(data, out, seed=seed), out, as_json)


@demo.command("membership")
def demo_membership(
    out: Out = Path("membership.html"),
    data: Annotated[str, typer.Option(help="digits or mnist.")] = "digits",
    seed: Seed = 1,
    as_json: Json = False,
) -> None:
    """Tell who was trained on by the loss alone: without privacy, and with pSGD at several ε."""
    from fed_dp.demonstrations.membership import membership

    _shown(membership(data, out, seed=seed), out, as_json)


def _shown(rows: list[dict[str, Any]], out: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    console = Console(highlight=False)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)
    console.print(f"pictures: {out}", soft_wrap=True)
