"""fed-dp compare --tune: the best of a random number of runs, and what all of them cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fed_dp.comparison.tuning import tune
from fed_dp.errors import ConfigError
from fed_dp.experiment.comparing import plan

TABLES: dict[str, Any] = {
    "name": "tuned",
    "rounds": 3,
    "clients": {"count": 2},
    "model": {"name": "linear"},
    "compare": {
        "epsilons": [1.0],
        "seeds": 1,
        "tune": {"runs": 3, "grid": {"psgd": {"trainer.learning_rate": [0.001, 1.0]}}},
    },
    "variants": {
        "psgd": {
            "trainer": {"name": "psgd", "sample_rate": 0.5},
            "privacy": {"budget_epsilon": 1.0, "delta": 1e-5},
        },
        "plain": {"trainer": {"name": "sgd"}},
    },
}


def written(folder: Path, **tune: Any) -> Path:
    tables = {**TABLES, "compare": {**TABLES["compare"], "tune": {**TABLES["compare"]["tune"], **tune}}}
    path = folder / "tuned.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


def test_the_best_run_is_told_with_the_cost_of_choosing_it(tmp_path: Path) -> None:
    planned, seed = plan(written(tmp_path)), 3
    [found] = tune(planned, root=tmp_path / "runs", seed=seed)
    assert found.runs > 1
    assert found.chosen == {"trainer.learning_rate": 1.0}  # with the other, nothing is learnt
    assert found.validation > 0.2
    assert found.test > 0.2
    assert 0.9 < found.epsilon_chosen <= 1.0 < found.epsilon_selection
    assert found.epsilon_chosen < found.epsilon_all_runs
    assert (found.unit, found.neighbours) == ("record", "zero-out one")
    kept: list[bool] = []
    assert tune(planned, root=tmp_path / "runs", seed=seed, observe=lambda d: kept.append(d.kept)) == [found]
    assert all(kept)  # it goes on where it was
    assert tune(planned, root=tmp_path / "runs", seed=seed + 1) != [found]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"grid": {}}, "declares no grid"),
        ({"grid": {"nobody": {"trainer.learning_rate": [1.0]}}}, "the variants are"),
        ({"grid": {"plain": {"trainer.learning_rate": [1.0]}}}, "is not private: nothing is counted"),
        ({"grid": {"psgd": {"trainer.sample_rate": [0.1, 0.5]}}}, "release with different noise"),
        ({"grid": {"psgd": {"trainer.learning_rate": []}}}, "expected a list of values"),
        ({"grid": {"psgd": {"trainer.lr": [1.0]}}}, "unknown key trainer.lr"),
        ({"grid": 3}, "compare.tune: expected runs, and tables"),
        ({"runs": 0.5}, "expected a number from 1 to 100"),
        ({"runz": 5}, "unknown key compare.tune.runz"),
    ],
)
def test_a_mistake_is_one_line(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        tune(plan(written(tmp_path, **change)), root=tmp_path / "runs")
