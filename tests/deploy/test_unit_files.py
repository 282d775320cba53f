"""Unit files and the container file: they parse, and what they start exists."""

from __future__ import annotations

import configparser
import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fed_dp.cli.main import app

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "deployment"
UNITS = sorted(FOLDER.glob("*.service"))
KNOWN = ("FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD")


def exists(command: list[str]) -> bool:
    """Whether the command line knows this command, up to its first argument."""
    names = [part for part in command if part.isalpha()]
    return CliRunner().invoke(app, [*names, "--help"]).exit_code == 0


def test_there_are_two_units() -> None:
    assert [path.stem for path in UNITS] == ["fed-dp-server", "fed-dp-site"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_parses_and_starts_what_exists(path: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    service = unit["Service"]
    assert service["Restart"] == "always"
    for key in ("ExecStart", "ExecStartPre"):
        if key in service:
            program, *command = shlex.split(service[key])
            assert program.endswith("/fed-dp")
            assert exists(command[:2]), command
            assert Path(command[2]).parts[:3] == ("/", "var", "lib")
    if (analyse := shutil.which("systemd-analyze")) is not None:
        done = subprocess.run([analyse, "verify", str(path)], capture_output=True, text=True, check=False)
        assert "Unknown" not in done.stderr
        assert "Invalid" not in done.stderr


def test_the_container_file_parses_and_copies_what_is_there() -> None:
    lines = (FOLDER / "Containerfile").read_text().splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert {name for name, _ in steps} == set(KNOWN)
    for name, rest in steps:
        if name == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources)
        if name in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(part, str) for part in json.loads(rest))
    assert dict(map(tuple, steps))["USER"] == "fed-dp"  # type: ignore[arg-type]


def test_the_runbook_names_commands_that_exist() -> None:
    text = (ROOT / "docs" / "deployment.md").read_text()
    commands = {
        tuple(line.split()[1:3])
        for block in text.split("```")[1::2]
        for line in block.splitlines()
        if line.strip().startswith("fed-dp ")
    }
    assert ("deploy", "init") in commands
    for command in commands:
        assert exists(list(command)), command
