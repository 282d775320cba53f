"""`fed-dp compare --tune`: choose hyper-parameters from a declared grid, and count what choosing costs.

    [compare.tune]
    runs = 6                                    # on average; at least 1
    [compare.tune.grid.psgd]                    # of the variant psgd
    "trainer.learning_rate" = [0.25, 0.5, 1, 2]

At every ε, so many runs are made, each with hyper-parameters drawn from the grid; the number is geometric.
The best is chosen by its accuracy on one half of the test records, which are not protected, and reported with
its accuracy on the other half. Three ε are told: of the chosen run alone, of the whole selection (for those
who see the chosen run and no other), and of all runs together (for the server and the sites, who see each).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fed_dp import seeds
from fed_dp.accounting import from_json, total
from fed_dp.accounting.selection import of_runs, selected_epsilon
from fed_dp.audit.releases import paid_most
from fed_dp.comparison.run_cache import Done, folder_of, run_cells
from fed_dp.errors import ConfigError, RunError
from fed_dp.experiment import Experiment
from fed_dp.experiment.comparing import Cell, Plan
from fed_dp.experiment.federation import load
from fed_dp.experiment.plan import release_plan
from fed_dp.experiment.source import build, override
from fed_dp.runs.saved_model import SavedModel
from fed_dp.runs.scores import metrics_of

MAX_RUNS = 10_000  # which no geometric number with such a mean reaches


@dataclass(frozen=True, slots=True)
class Tuned:
    """What came of choosing, for one variant at one ε."""

    variant: str
    runs: int
    mean_runs: float
    chosen: dict[str, Any]
    validation: float  # score on the half of the test records that it was chosen by
    test: float  # on the other half
    delta: float
    epsilon_chosen: float
    epsilon_selection: float
    epsilon_all_runs: float
    unit: str
    neighbours: str

    def tables(self) -> dict[str, Any]:
        """Return it as plain tables."""
        return asdict(self)


def tune(
    plan: Plan,
    *,
    root: Path,
    seed: int = 1,
    jobs: int | None = None,
    fresh: bool = False,
    observe: Callable[[Done], None] = lambda _: None,
) -> list[Tuned]:
    """Choose for every variant that has a grid, at every ε of the plan."""
    if not plan.tune.get("grid"):
        raise ConfigError(f"{plan.name} declares no grid: expected [compare.tune.grid.VARIANT] in its file")
    groups = {(name, epsilon): cells for name, epsilon, cells in _groups(plan, seed)}
    done = run_cells(
        [cell for cells in groups.values() for cell in cells],
        root=root,
        jobs=jobs,
        fresh=fresh,
        observe=observe,
    )
    if failed := [each for each in done if each.failure]:
        raise RunError(f"{len(failed)} runs failed; {failed[0].cell.variant}: {failed[0].failure}")
    by_cell = {id(each.cell): each for each in done}
    return [
        _chosen(name, [by_cell[id(cell)] for cell in cells], plan, root, seed)
        for (name, _), cells in groups.items()
    ]


def _groups(plan: Plan, seed: int) -> Iterator[tuple[str, float, list[Cell]]]:
    """Yield the runs of every variant with a grid at every ε."""
    mean = _mean(plan)
    grids: dict[str, dict[str, list[Any]]] = plan.tune.get("grid", {})
    there = {cell.variant for cell in plan.cells}
    if unknown := [name for name in grids if name not in there]:
        raise ConfigError(f"compare.tune.grid.{unknown[0]}: the variants are {', '.join(sorted(there))}")
    for place, ((name, grid), epsilon) in enumerate(product(grids.items(), plan.epsilons)):
        base = next((c for c in plan.cells if (c.variant, c.epsilon) == (name, epsilon)), None)
        if base is None:
            raise ConfigError(f"compare.tune.grid.{name}: {name!r} is not private: nothing is counted")
        points = _points(name, grid, base.experiment)
        rng = seeds.generator(seed, "tuning", place)
        count = min(int(rng.geometric(1 / mean)), MAX_RUNS)
        cells = []
        for run in range(count):
            point = points[int(rng.integers(len(points)))]
            own = 1 + seeds.integer(seed, "run of tuning", place, run) % 2**31
            cells.append(Cell(name, epsilon, own, _at(base.experiment, {**point, "seed": own})))
        yield name, epsilon, cells


def _mean(plan: Plan) -> float:
    if unknown := set(plan.tune) - {"runs", "grid"}:
        raise ConfigError(f"unknown key compare.tune.{min(unknown)}; allowed: runs, grid")
    mean = plan.tune.get("runs", 6)
    if type(mean) not in (int, float) or not 1 <= mean <= 100:
        raise ConfigError(f"compare.tune.runs = {mean!r}: expected a number from 1 to 100, the mean of runs")
    return float(mean)


def _points(name: str, grid: dict[str, list[Any]], base: Experiment) -> list[dict[str, Any]]:
    """Return all points of a grid; what is released must be the same at each."""
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"compare.tune.grid.{name}.{key!r} = {values!r}: expected a list of values")
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    plans = {release_plan(_at(base, point), client=0, size=1) for point in points}
    if len(plans) > 1:
        raise ConfigError(
            f"compare.tune.grid.{name}: its points release with different noise, and then what choosing "
            "costs is not known; expected keys that leave trainer.sample_rate, rounds and steps as they are"
        )
    return points


def _at(base: Experiment, point: dict[str, Any]) -> Experiment:
    settings = [f"{key}={value!r}" for key, value in point.items()]
    return build(override(base.tables(), settings), where=f"compare.tune: {base.name}")


def _chosen(name: str, runs: Sequence[Done], plan: Plan, root: Path, seed: int) -> Tuned:
    data = load(runs[0].cell.experiment.data)
    half = seeds.generator(seed, "validation records").random(len(data.test)) < 0.5
    inputs, scores = data.inputs(data.test), []
    metric = metrics_of(runs[0].summary)[0]
    for each in runs:
        model = SavedModel.load(folder_of(root, each.cell.experiment))
        scores.append([model.scores(inputs[rows], data.test.y[rows])[metric.name] for rows in (half, ~half)])
    best = int(
        np.argmax([validation if metric.higher_is_better else -validation for validation, _ in scores])
    )
    cost = runs[best].summary["privacy"]
    charges = [_charges(each) for each in runs]
    delta, mean = cost["delta"], _mean(plan)
    chosen = runs[best].cell.experiment.tables()
    return Tuned(
        variant=name,
        runs=len(runs),
        mean_runs=mean,
        chosen={key: _value(chosen, key) for key in plan.tune["grid"][name]},
        validation=scores[best][0],
        test=scores[best][1],
        delta=delta,
        epsilon_chosen=cost["epsilon_total"],
        epsilon_selection=selected_epsilon(charges[best], mean=mean, delta=delta),
        epsilon_all_runs=total(of_runs(charges), delta=delta),
        unit=cost["unit"],
        neighbours=cost["neighbours"],
    )


def _charges(done: Done) -> Counter[Any]:
    events = [event for line in done.lines for event in from_json(line["events"])]
    return Counter(event.charge for event in paid_most(events, done.summary["privacy"]))


def _value(tables: dict[str, Any], key: str) -> Any:
    found: Any = tables
    for part in key.split("."):
        found = found[part]
    return found
