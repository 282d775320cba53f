"""`fed-dp plugins`, `conformance`, `schema` and `export`: what is installed, and what comes out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fed_dp.errors import ConfigError


def list_plugins(
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Also the components that come with fed_dp.")
    ] = False,
) -> None:
    """List trainers, strategies, networks, data sets and tasks of other packages that are installed.

    One that cannot be imported is listed with the reason; then the exit code is 1.
    """
    from fed_dp import plugins

    table = Table("kind", "name", "from", "package", "about")
    broken: list[str] = []
    for kind in plugins.GROUPS:
        own = plugins.built_in(kind)
        for name in plugins.names(kind):
            if name in own and not everything:
                continue
            try:
                about = (plugins.find(kind, name).__doc__ or "").strip().partition("\n")[0]
            except ConfigError as error:
                about = "cannot be loaded"
                broken.append(str(error))
            for entry in plugins.entries(kind, name):
                package = "" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
                table.add_row(kind, name, entry.value, package, about)
    console = Console()
    if table.row_count:
        console.print(table)
    else:
        console.print("no package but fed_dp has components; --all lists fed_dp's own")
    for line in broken:
        print(f"error: {line}", file=sys.stderr)
    if broken:
        raise typer.Exit(1)


def conformance(
    name: Annotated[
        str,
        typer.Argument(help="A registered trainer, or an import path as in package.module:Class."),
    ],
    trials: Annotated[
        int, typer.Option(help="Runs in each of the two worlds of each audit; 0: no audits.")
    ] = 200,
    confidence: Annotated[float, typer.Option(help="Of the audits' lower bounds.")] = 0.999,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Try whether a trainer does what all must, and audit what it releases. Exit code 1: it does not.

    The experiments are those that its own audits() names, of every form that it has.
    """
    from fed_dp.audit.conformance import Result, conformance, experiments_of
    from fed_dp.audit.trainers import audit_trainer

    results = list(conformance(name))
    findings = []
    for form, experiment in experiments_of(name).items():
        if trials and experiment.private:
            finding = audit_trainer(name, variant=form, trials=trials, confidence=confidence)
            findings.append(finding)
            if finding.guarantee.stated == "proved":
                lower = f"at least ε = {finding.bound:.3f} is lost, stated is {finding.claim:g}"
                why = lower if finding.refuted else ""
                results.append(Result(form, "its proved guarantee is not refuted by its audit", why))
    failed = [result for result in results if result.why]
    if as_json:
        told = [{"form": r.form, "check": r.check, "passed": not r.why, "why": r.why} for r in results]
        print(
            json.dumps({"trainer": name, "checks": told, "audits": [f.tables() for f in findings]}, indent=2)
        )
    else:
        console = Console(highlight=False)
        table = Table("privacy.variant", "check", "", title=f"conformance of {name}")
        for result in results:
            table.add_row(result.form, result.check, result.why or "passed")
        console.print(table)
        for finding in findings:
            for line in finding.lines():
                console.print(line, soft_wrap=True, markup=False)
        console.print(f"{len(results) - len(failed)} of {len(results)} passed")
    if failed:
        raise typer.Exit(1)


def schema(
    out: Annotated[Path | None, typer.Argument(help="The file to write. Default: standard output.")] = None,
) -> None:
    """Print the JSON Schema of experiment files, for editors that complete and check TOML.

    It has the components of all packages that are installed.
    """
    from fed_dp.experiment.json_schema import json_schema
    from fed_dp.runs.folder import write_output

    text = json.dumps(json_schema(), indent=2)
    if out is None:
        print(text)
    else:
        write_output(out, text.encode() + b"\n")


def export(
    run: Annotated[Path, typer.Argument(help="A finished run's folder, or the model.npz in it.")],
    out: Annotated[Path, typer.Argument(help="The file to write, as in model.pt.")],
    onnx: Annotated[bool, typer.Option("--onnx", help="ONNX (needs the extra fed-dp[onnx]).")] = False,
    torch_export: Annotated[
        bool, typer.Option("--torch-export", help="A program of torch.export, which runs without its code.")
    ] = False,
) -> None:
    """Write a trained model for plain PyTorch: by default its state_dict."""
    from fed_dp.runs.export import write_model

    if onnx and torch_export:
        raise ConfigError("--onnx and --torch-export: expected one of them")
    write_model(run, out, form="onnx" if onnx else "torch-export" if torch_export else "state-dict")
    print(out)
