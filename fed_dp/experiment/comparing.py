"""Which runs a comparison is made of: every private variant of a file at every ε, for every seed.

Any experiment file can be compared. What is not private in it is a reference, run once for each seed. A
file that has none gets pSGD, and the three references: centralised, standalone, and federated without
privacy. `[compare]` holds the file's own `epsilons` and `seeds`, and changes to the file at one ε:

    [compare]
    epsilons = [0.5, 1, 2, 8]
    seeds = 5
    [compare.at."0.5".variants.psgd.trainer]
    learning_rate = 2.0

`[compare.tune]` declares what may be chosen (see `fed_dp.comparison.tuning`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fed_dp import plugins
from fed_dp.errors import ConfigError
from fed_dp.experiment.schema import DEFAULTS, Experiment
from fed_dp.experiment.source import Tables, build, merged, override, profile, read_tables, variants

EPSILONS = (0.5, 1.0, 2.0, 8.0)
SEEDS = 3
DELTA = 1e-5
BASELINE = "psgd"
REFERENCES = {"centralised": "centralised", "standalone": "standalone", "averaging": "no-privacy"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a variant, at one ε (none: it is not private), with one seed."""

    variant: str
    epsilon: float | None
    seed: int
    experiment: Experiment


@dataclass(frozen=True, slots=True)
class Plan:
    """All runs of a comparison; `baseline` is the pSGD variant that the others are tested against."""

    name: str
    baseline: str
    epsilons: tuple[float, ...]
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]
    tune: Tables = field(default_factory=dict)  # [compare.tune]: which hyper-parameters may be chosen


def plan(
    source: str | Path,
    *,
    epsilons: Sequence[float] = (),
    seeds: int | None = None,
    only: Sequence[str] = (),
    settings: Sequence[str] = (),
    wanted_profile: str | None = None,
) -> Plan:
    """Return what `fed-dp compare` runs; what is not given is the file's own, or else the default."""
    tables = profile(read_tables(source), wanted_profile)
    given = _section(tables, str(source))
    levels = tuple(float(e) for e in epsilons or given.get("epsilons", EPSILONS))
    if not levels or len(set(levels)) < len(levels) or not all(0 < e < math.inf for e in levels):
        raise ConfigError(f"epsilons = {list(levels)}: expected numbers above 0 that differ")
    count = given.get("seeds", SEEDS) if seeds is None else seeds
    if type(count) is not int or count < 1:
        raise ConfigError(f"seeds = {count!r}: expected a whole number from 1")
    for setting in settings:
        if (key := setting.partition("=")[0].strip()) in ("seed", "privacy.budget_epsilon"):
            raise ConfigError(f"--set {setting!r}: a comparison has its own {key}; use --seeds and --epsilon")
    cells: list[Cell] = []
    baseline = ""
    for number, epsilon in enumerate(levels):
        at = merged(tables, given.get("at", {}).get(f"{epsilon:g}", {}))
        built = {
            name: build(override(each, settings), where=f"{source}:{name}")
            for name, each in variants(at).items()
        }
        baseline = _complete(built, at, settings, str(source))
        chosen = _chosen(built, only, baseline, str(source))
        for name, experiment in chosen.items():
            if experiment.private or number == 0:
                level = epsilon if experiment.private else None
                cells += [_cell(name, experiment, level, seed) for seed in range(1, count + 1)]
    ordered = sorted(cells, key=lambda cell: (cell.epsilon is not None, cell.seed))
    return Plan(
        str(tables["name"]),
        baseline,
        levels,
        tuple(range(1, count + 1)),
        tuple(ordered),
        given.get("tune", {}),
    )


def _section(tables: Tables, where: str) -> Tables:
    """Return `[compare]`, and refuse what a comparison would not use."""
    given = tables.pop("compare", {})
    allowed = {"epsilons", "seeds", "at", "tune"}
    if not isinstance(given, dict) or (wrong := set(given) - allowed):
        extra = f"unknown key compare.{min(wrong)}; " if isinstance(given, dict) else ""
        raise ConfigError(f"{where}: {extra}compare: expected a table of {', '.join(sorted(allowed))}")
    levels = given.get("epsilons", [])
    if not isinstance(levels, list) or not all(type(e) in (int, float) for e in levels):
        raise ConfigError(f"{where}: compare.epsilons = {levels!r}: expected a list of numbers above 0")
    tune = given.get("tune", {})
    grids = tune.get("grid", {}) if isinstance(tune, dict) else None
    if not isinstance(grids, dict) or not all(isinstance(each, dict) for each in grids.values()):
        raise ConfigError(f"{where}: compare.tune: expected runs, and tables as in [compare.tune.grid.NAME]")
    at = given.get("at", {})
    if not isinstance(at, dict) or not all(isinstance(each, dict) for each in at.values()):
        raise ConfigError(f'{where}: compare.at: expected tables, as in [compare.at."0.5".variants.NAME]')
    for key in at:
        if not _is_level(key):
            raise ConfigError(f"{where}: compare.at.{key!r}: expected an ε, written as in 0.5 or 8")
    repeats = tables.pop("repeats", {})
    if not isinstance(repeats, dict):
        raise ConfigError(f"{where}: repeats = {repeats!r}: expected a table of seeds and folds")
    if "folds" in repeats:
        raise ConfigError(f"{where}: repeats.folds = {repeats['folds']!r}: a comparison repeats seeds alone")
    if isinstance(repeats.get("seeds"), int):
        given.setdefault("seeds", repeats["seeds"])
    return given


def _is_level(key: str) -> bool:
    """Return whether a key is an ε as a plan would write it: others would never be used."""
    try:
        return float(key) > 0 and f"{float(key):g}" == key
    except ValueError:
        return False


def _complete(built: dict[str, Experiment], tables: Tables, settings: Sequence[str], where: str) -> str:
    """Add what is missing: pSGD, and the references. Return the baseline's name.

    References are on pSGD's network; where that cannot be trained without noise, on the file's own.
    """
    found = [name for name, e in built.items() if e.trainer.name == BASELINE]
    plain = [name for name in found if built[name].strategy.name == DEFAULTS["strategy"]]
    name = BASELINE if BASELINE in found else next(iter(plain or found), BASELINE)
    base = copy.deepcopy(tables)
    for key in ("variants", "privacy"):
        base.pop(key, None)
    if not found:
        if name in built:
            raise ConfigError(f"{where}: variant {name!r} is not pSGD: every comparison has it; rename yours")
        model = base.get("model", {}).get("name", DEFAULTS["model"])
        if plugins.find("model", model).offers != plugins.find("trainer", BASELINE).needs:
            base.pop("model")
        deltas = [e.privacy.delta for e in built.values() if e.privacy.delta is not None]
        added = {
            "name": f"{base['name']}-{name}",
            "trainer": {"name": "psgd"},
            "strategy": {"name": "averaging"},
            "privacy": {"budget_epsilon": 1.0, "delta": deltas[0] if deltas else DELTA},
        }
        built[name] = build(override(merged(base, added), settings), where=f"{where}:{name}")
    beside = built[name]
    strategies = {e.strategy.name for e in built.values() if not e.private}
    trainer = base.get("trainer", {})
    plainly = beside.model.offers == plugins.find("trainer", "sgd").needs
    for strategy, reference in REFERENCES.items():
        if strategy in strategies or reference in built:
            continue
        own = beside.tables() if plainly else copy.deepcopy(base)
        own["trainer"] = trainer if trainer.get("name", "sgd") == "sgd" else {"name": "sgd"}
        own["strategy"] = {"name": strategy}
        own["name"] = f"{base['name']}-{reference}"
        own.pop("privacy", None)
        built[reference] = build(override(own, settings), where=f"{where}:{reference}")
    return name


def _chosen(
    built: dict[str, Experiment], only: Sequence[str], baseline: str, where: str
) -> dict[str, Experiment]:
    if unknown := [name for name in only if name not in built]:
        raise ConfigError(f"--only {unknown[0]!r}: {where} has {', '.join(built)}")
    wanted = {*only, baseline} if only else set(built)
    return {name: e for name, e in built.items() if name in wanted or not e.private}


def _cell(variant: str, experiment: Experiment, epsilon: float | None, seed: int) -> Cell:
    changes: Tables = {"seed": seed}
    if epsilon is not None:
        changes["privacy"] = {"budget_epsilon": epsilon}
    tables = merged(experiment.tables(), changes)
    return Cell(variant, epsilon, seed, build(tables, where=variant))
