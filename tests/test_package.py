from __future__ import annotations

import tomllib
from pathlib import Path
from typing import get_args

import fed_dp
import fed_dp.accounting
import fed_dp.data
import fed_dp.errors
import fed_dp.experiment
import fed_dp.models
from fed_dp.experiment import schema
from fed_dp.strategies.rounds import STRATEGIES

ROOT = Path(__file__).parent.parent


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["version"] == fed_dp.__version__


def test_exported_names_exist() -> None:
    for module in (fed_dp, fed_dp.accounting, fed_dp.data, fed_dp.experiment, fed_dp.models):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
        assert sorted(set(module.__all__)) == sorted(module.__all__)


def test_the_schema_names_what_the_registries_hold() -> None:
    assert set(get_args(schema.DataName)) == {*fed_dp.data.SOURCES, "folder"}
    assert set(get_args(schema.ModelName)) == set(fed_dp.models.BUILDERS)
    sections = get_args(get_args(schema.Strategy)[0])
    names = {get_args(section.model_fields["name"].annotation)[0] for section in sections}
    assert names == set(STRATEGIES)


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
