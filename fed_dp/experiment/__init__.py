"""Experiments: a frozen model of everything that decides a result, and how it is read."""

from __future__ import annotations

from fed_dp.experiment.schema import Experiment
from fed_dp.experiment.source import (
    build,
    from_run_config,
    group_of,
    load_experiment,
    one_of,
    override,
    profile,
    read_tables,
    read_toml,
    select,
    shipped,
    to_run_config,
    validated,
    variants,
)

__all__ = [
    "Experiment",
    "build",
    "from_run_config",
    "group_of",
    "load_experiment",
    "one_of",
    "override",
    "profile",
    "read_tables",
    "read_toml",
    "select",
    "shipped",
    "to_run_config",
    "validated",
    "variants",
]
