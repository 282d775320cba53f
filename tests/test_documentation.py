"""The documentation: its examples run as they stand, its links lead somewhere, its commands exist."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest
import typer.main

from fed_dp.cli.main import app
from fed_dp.experiment import shipped

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
DOCUMENTED = ("fed_dp", "fed_dp.flower.selective", "fed_dp.flower.private", "fed_dp.flower.ledger_mod")
EXAMPLES = [path for path in PAGES if ">>> " in path.read_text()]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run_as_they_stand(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = doctest.testfile(str(path), module_relative=False)
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize("name", DOCUMENTED)
def test_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = doctest.testmod(import_module(name))
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (path.parent / target).exists(), target


def test_commands_in_the_pages_are_commands() -> None:
    known = typer.main.get_command(app)
    commands = known.commands  # type: ignore[attr-defined]
    for path in PAGES:
        for line in path.read_text().splitlines():
            if not (found := re.match(r"^(?:\.venv/bin/)?fed-dp ([a-z]+)(?: ([a-z]+))?", line)):
                continue
            first, second = found.groups()
            assert first in commands, line
            below = getattr(commands[first], "commands", None)
            if below and second:
                assert second in below, line


def test_shipped_experiments_named_in_the_pages_exist() -> None:
    names = shipped()
    for path in PAGES:
        for name in re.findall(r"fed-dp (?:simulate|compare) ([a-z][a-z0-9-]*)(?=[\s:`)])", path.read_text()):
            assert name in names, (path, name)
