from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

import fed_dp
import fed_dp.accounting
import fed_dp.data
import fed_dp.errors
import fed_dp.experiment
import fed_dp.models
from fed_dp import plugins
from fed_dp.accounting import guarantees
from fed_dp.data.options import Data
from fed_dp.experiment.components import StrategyOptions, TrainerOptions
from fed_dp.models.network import Network
from fed_dp.options import Section
from fed_dp.tasks import Task

ROOT = Path(__file__).parent.parent


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["version"] == fed_dp.__version__


def test_exported_names_exist() -> None:
    for module in (fed_dp, fed_dp.accounting, fed_dp.data, fed_dp.experiment, fed_dp.models):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
        assert sorted(set(module.__all__)) == sorted(module.__all__)


KINDS: dict[plugins.Kind, type[Section]] = {
    "trainer": TrainerOptions,
    "strategy": StrategyOptions,
    "model": Network,
    "data": Data,
    "task": Task,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_component_is_registered_by_entry_point_under_its_own_name(kind: plugins.Kind) -> None:
    registered = plugins.components(kind)
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(registered) == set(listed[plugins.GROUPS[kind]])
    for name, component in registered.items():
        assert issubclass(component, KINDS[kind])
        assert get_args(component.model_fields["name"].annotation) == (name,)
        assert component.__doc__


def test_every_guarantee_is_declared_by_the_part_that_makes_its_releases() -> None:
    declared = [
        guarantee
        for kind in ("trainer", "strategy")
        for component in plugins.components(kind).values()  # type: ignore[arg-type]
        for guarantee in component.guarantees
    ]
    assert {guarantee.name for guarantee in declared} | {"none", "by_author"} == set(guarantees())


def test_reading_an_experiment_imports_nothing_heavy() -> None:
    code = (
        "import sys; from fed_dp.experiment import load_experiment, shipped; "
        "from fed_dp.experiment.source import build, profile, read_tables, variants; "
        "[build(t) for name in shipped() for t in variants(profile(read_tables(name))).values()]; "
        "heavy = ('torch', 'pandas', 'flwr', 'ray', 'opacus', 'sklearn', 'dp_accounting'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_error_stands_in_the_tree() -> None:
    drawn = fed_dp.errors.__doc__ or ""
    for name, value in vars(fed_dp.errors).items():
        if isinstance(value, type) and issubclass(value, fed_dp.errors.FedDpError):
            assert name in drawn


def test_the_links_lead_into_the_package() -> None:
    for name in ("strategies", "clients", "simulations"):
        link = ROOT / name
        assert link.is_symlink()
        assert link.resolve() == (ROOT / "fed_dp" / name).resolve()


def test_nothing_in_the_project_imports_through_the_links() -> None:
    for path in [*(ROOT / "fed_dp").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        for line in path.read_text().splitlines():
            assert not line.startswith(("from strategies", "from clients", "from simulations")), path
