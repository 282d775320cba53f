"""Which runs a comparison is made of, how they are run and kept, and what is made of them."""

from __future__ import annotations

import csv
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_rel

from fed_dp.comparison import run_cache as running
from fed_dp.comparison.compare import compare
from fed_dp.comparison.outcome import holm, outcome, paired
from fed_dp.comparison.report import charts
from fed_dp.comparison.run_cache import CACHE, Done, run_cells
from fed_dp.errors import ConfigError
from fed_dp.experiment.comparing import EPSILONS, REFERENCES, Plan, plan
from fed_dp.server.observers import Silent
from fed_dp.simulations.runner import simulate
from tests.clock import Immediate

FILE = """
rounds = 2
[clients]
count = 3
[trainer]
name = "sgd"
[compare]
epsilons = [1, 4]
seeds = 2
[compare.at.4.variants.mine.trainer]
learning_rate = 0.7
[variants.mine]
trainer = { name = "psgd", sample_rate = 0.5, learning_rate = 0.3 }
privacy = { budget_epsilon = 9.0, delta = 1e-4 }
[variants.sums]
rounds = 1
data = { public_records = 50 }
model = { name = "class-sums" }
trainer = { name = "ilm" }
strategy = { name = "statistics" }
privacy = { budget_epsilon = 9.0 }
"""


def written(tmp_path: Path, text: str = FILE) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_every_private_variant_at_every_epsilon_and_every_reference_once(tmp_path: Path) -> None:
    found = plan(written(tmp_path))
    assert found.baseline == "mine"  # it is pSGD, whatever its name
    told = {(cell.variant, cell.epsilon) for cell in found.cells}
    assert told == {(name, e) for name in ("mine", "sums") for e in (1.0, 4.0)} | {
        (name, None) for name in REFERENCES.values()
    }
    assert len(found.cells) == 2 * len(told)
    for cell in found.cells:
        assert cell.experiment.seed == cell.seed
        assert cell.experiment.privacy.budget_epsilon == cell.epsilon
    rates = {c.epsilon: c.experiment.trainer.learning_rate for c in found.cells if c.variant == "mine"}  # type: ignore[attr-defined]
    assert rates == {1.0: 0.3, 4.0: 0.7}


def test_what_is_given_wins(tmp_path: Path) -> None:
    found = plan(
        written(tmp_path), epsilons=[2], seeds=1, only=["sums"], settings=["clients.count=4", "rounds=3"]
    )
    assert {cell.variant for cell in found.cells} == {"mine", "sums", *REFERENCES.values()}
    assert {cell.experiment.clients.count for cell in found.cells} == {4}
    assert {cell.experiment.rounds for cell in found.cells} == {3}
    assert found.epsilons == (2.0,)
    alone = plan(written(tmp_path, "[trainer]\nname = 'sgd'\n[clients]\ncount = 3\n"))
    assert alone.baseline == "psgd"  # added
    assert alone.epsilons == EPSILONS
    assert {c.variant for c in alone.cells} == {"psgd", "mine", "centralised", "standalone"}


def test_references_have_the_files_own_network_where_psgds_needs_released_moments(tmp_path: Path) -> None:
    text = FILE.replace(
        'trainer = { name = "psgd", sample_rate = 0.5, learning_rate = 0.3 }',
        'rounds = 5\nmodel = { name = "scattering" }\n'
        'trainer = { name = "psgd", sample_rate = 0.5, learning_rate = 0.3 }',
    )
    found = {cell.variant: cell.experiment for cell in plan(written(tmp_path, text)).cells}
    assert found["mine"].model.name == "scattering"
    for reference in REFERENCES.values():
        assert (found[reference].model.name, found[reference].rounds) == ("small-mlp", 2)


@pytest.mark.parametrize("name", ["compare-digits", "compare-mnist", "compare-fashion"])
def test_shipped_comparisons_can_be_planned_and_choose_no_rate_of_psgd(name: str) -> None:
    found = plan(name)
    rates = {c.experiment.tables()["trainer"]["learning_rate"] for c in found.cells if "psgd" in c.variant}
    assert rates == {"auto"}
    assert {cell.variant for cell in found.cells} > {"psgd", "dpa", *REFERENCES.values()}


def test_a_file_of_one_statistics_run_gets_psgd_on_an_ordinary_network(tmp_path: Path) -> None:
    text = """
rounds = 2
[model]
name = "scattering"
[trainer]
name = "dpa"
[strategy]
name = "statistics"
[privacy]
budget_epsilon = 1.0
delta = 1e-4
"""
    found = plan(written(tmp_path, text))
    [psgd] = {cell.experiment.model.name for cell in found.cells if cell.variant == "psgd"}
    assert psgd == "small-mlp"
    assert {c.experiment.privacy.delta for c in found.cells if c.epsilon} == {1e-4}


@pytest.mark.parametrize(
    ("change", "options", "line"),
    [
        (("seeds = 2", "seeds = 0"), {}, "seeds = 0: expected a whole number from 1"),
        (("seeds = 2", "sedes = 2"), {}, "unknown key compare.sedes"),
        (("[1, 4]", "[1, 'x']"), {}, "compare.epsilons"),
        (("[1, 4]", "[1, 4, -4]"), {}, "expected numbers above 0 that differ"),
        (("compare.at.4", 'compare.at."4.0"'), {}, "compare.at.'4.0': expected an ε"),
        (("compare.at.4", "compare.at.four"), {}, "compare.at.'four': expected an ε"),
        (("", ""), {"epsilons": [1, 1]}, "expected numbers above 0 that differ"),
        (("", ""), {"only": ["nobody"]}, "--only 'nobody'"),
        (("", ""), {"settings": ["seed=3"]}, "a comparison has its own seed"),
        (("", ""), {"settings": ["privacy.budget_epsilon=3"]}, "its own privacy.budget_epsilon"),
        (("rounds = 2", "rounds = 2\nrepeats = { folds = 3 }"), {}, "repeats.folds = 3"),
        (("rounds = 2", "rounds = 2\nrepeats = 3"), {}, "repeats = 3: expected a table"),
        (("", ""), {"wanted_profile": "quick"}, "no profile 'quick'"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    change: tuple[str, str], options: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=line.replace("[", r"\[")) as caught:
        plan(written(tmp_path, FILE.replace(*change) if change[0] else FILE), **options)
    assert "\n" not in str(caught.value)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells run in this process: starting another takes longer than the cells of a test."""
    monkeypatch.setattr(running, "_pool", lambda jobs: nullcontext(Immediate()))


def small_plan(tmp_path: Path) -> Plan:
    return plan(written(tmp_path), epsilons=[4], seeds=2)


def test_cells_run_in_parallel_are_kept_and_equal_a_run_alone(tmp_path: Path) -> None:
    planned = small_plan(tmp_path)
    done = run_cells(planned.cells, root=tmp_path, jobs=2)
    assert not any(each.kept or each.failure for each in done)
    again = run_cells(planned.cells, root=tmp_path)
    assert all(each.kept for each in again)
    assert [each.summary for each in again] == [each.summary for each in done]
    alone = next(each for each in done if each.cell.variant == "mine")
    _, summary = simulate(alone.cell.experiment, observer=Silent(), engine="in-process", root=tmp_path / "x")
    assert summary["accuracy"] == alone.summary["accuracy"]
    assert summary["privacy"] == alone.summary["privacy"]


@pytest.mark.usefixtures("here")
def test_only_results_of_the_same_versions_and_records_are_kept(tmp_path: Path) -> None:
    cells = [cell for cell in small_plan(tmp_path).cells if cell.variant == "centralised"][:1]
    [first] = run_cells(cells, root=tmp_path)
    folder = tmp_path / CACHE / first.cell.experiment.digest[:20]
    text = (folder / "summary.json").read_text()
    for key, value in (("versions", {}), ("data", {**first.summary["data"], "sha256": "another"})):
        (folder / "summary.json").write_text(json.dumps({**first.summary, key: value}))
        [other] = run_cells(cells, root=tmp_path)
        assert not other.kept
        assert other.summary["accuracy"] == first.summary["accuracy"]
    (folder / "summary.json").write_text(text[: len(text) // 2])  # half a file
    [mended] = run_cells(cells, root=tmp_path)
    assert not mended.kept
    assert mended.summary["accuracy"] == first.summary["accuracy"]
    [anew] = run_cells(cells, root=tmp_path, fresh=True)
    assert not anew.kept
    (folder / "summary.json").unlink()  # it was stopped …
    folder.with_suffix(".versions").write_text("{}")  # … and is of other versions: begun again, not resumed
    (folder / "old").touch()
    run_cells(cells, root=tmp_path)
    assert not (folder / "old").exists()


@pytest.mark.usefixtures("here")
def test_folds_are_kept_and_what_cannot_be_resumed_begins_again(tmp_path: Path) -> None:
    folded = plan(written(tmp_path), epsilons=[4], seeds=1, settings=["data.folds=3", "data.fold=1"])
    cells = [cell for cell in folded.cells if cell.variant in ("mine", "centralised")]
    run_cells(cells, root=tmp_path)
    again = run_cells(cells, root=tmp_path)
    assert all(each.kept for each in again)
    folder = tmp_path / CACHE / cells[-1].experiment.digest[:20]
    (folder / "summary.json").unlink()
    (folder / "data.sha256").write_text("other records")
    [mended] = run_cells(cells[-1:], root=tmp_path)
    assert not mended.failure
    assert mended.summary == again[-1].summary | {"seconds": mended.summary["seconds"]}


@pytest.mark.usefixtures("here")
def test_a_run_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    planned = small_plan(tmp_path)
    cells = [replace(c) for c in planned.cells if c.variant in ("mine", "centralised")]
    bad = cells[-1].experiment.model_copy(update={"round_timeout": 1e-9})
    broken = bad.model_copy(
        update={"data": bad.data.model_copy(update={"partition": _impossible(bad)}), "name": "broken"}
    )
    cells[-1] = replace(cells[-1], experiment=broken)
    done = run_cells(cells, root=tmp_path, jobs=2)
    assert [bool(each.failure) for each in done] == [False] * (len(cells) - 1) + [True]
    found = outcome(replace(planned, cells=tuple(cells)), done, command="c")
    [row] = [row for row in found["rows"] if row["failures"]]
    assert row["variant"] == "mine"
    json.dumps(found, allow_nan=False)


def _impossible(experiment: Any) -> Any:
    from fed_dp.data.options import Dirichlet

    return Dirichlet(name="dirichlet", alpha=0.01, min_records=400)


def test_wrong_jobs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--jobs = 0"):
        run_cells([], root=tmp_path, jobs=0)


def test_a_worker_that_dies_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fed_dp.errors import RunError

    monkeypatch.setattr(running, "_work", _dies)
    with pytest.raises(RunError, match="what is done is kept"):
        run_cells(small_plan(tmp_path).cells[:1], root=tmp_path, jobs=1)


def _dies(tables: str, folder: str, fresh: bool) -> dict[str, Any]:
    import os

    os._exit(9)


def test_paired_differences_are_students() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(1, 1, 8), rng.normal(0, 1, 8)
    found = paired(ours.tolist(), theirs.tolist())
    expected = ttest_rel(ours, theirs)
    interval = expected.confidence_interval(0.95)
    assert found["p"] == pytest.approx(expected.pvalue)
    assert found["interval"] == pytest.approx([interval.low, interval.high])
    assert paired([0.5], [0.25]) == {"difference": 0.25, "interval": None, "p": None, "p_adjusted": None}
    assert paired([0.5, 0.75], [0.25, 0.5])["p"] is None  # all differences are equal


def test_holm_adjusts_in_order() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


@pytest.mark.usefixtures("here")
def test_a_comparison_leaves_a_report_and_the_same_numbers_everywhere(tmp_path: Path) -> None:
    told: list[Done] = []
    folder, found = compare(
        small_plan(tmp_path), root=tmp_path / "runs", command="fed-dp compare mine.toml", observe=told.append
    )
    assert len(told) == 10
    assert json.loads((folder / "comparison.json").read_text()) == found
    with (folder / "table.csv").open() as handle:
        lines = list(csv.DictReader(handle))
    assert len(lines) == len(found["rows"]) == 5
    for line, row in zip(lines, found["rows"], strict=True):
        assert float(line["mean"]) == row["accuracy"]["mean"]
        assert line["guarantee"] == ("none" if row["privacy"] is None else row["privacy"]["guarantee"])
    for chart in charts(found):
        for kind in ("png", "svg"):
            assert (folder / "figures" / f"{chart.key}.{kind}").stat().st_size > 1000
    private = [row for row in found["rows"] if row["privacy"]]
    assert all(row["audit"]["verdict"].startswith("not refuted") for row in private)
    assert {row["variant"]: row["paid_once"] for row in private} == {"mine": False, "sums": True}
    spending = {series.name: series.points for series in charts(found)[2].series}
    assert [p.x for p in spending["mine"]] == [1, 2]
    assert spending["mine"][0].y < spending["mine"][1].y  # grows
    assert spending["sums"][-1].x == 2
    assert len({p.y for p in spending["sums"]}) == 1  # flat
    [sums] = [row for row in private if row["variant"] == "sums"]
    assert sums["against_baseline"]["difference"] == pytest.approx(
        sums["accuracy"]["mean"] - next(r for r in private if r["variant"] == "mine")["accuracy"]["mean"]
    )


def test_curves_for_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from fed_dp.comparison.tensorboard import export

    row = {
        "variant": "psgd",
        "epsilon": 2.0,
        "by_round": [{"round": 1, "accuracy": 0.5}, {"round": 2, "accuracy": 0.75}],
        "epsilon_by_round": [1.5, 2.0],
    }
    export({"rows": [row, {"variant": "failed", "epsilon": 1.0}]}, tmp_path / "board")
    [folder] = (tmp_path / "board").iterdir()
    read = EventAccumulator(str(folder))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("accuracy")] == [(1, 0.5), (2, 0.75)]
    assert [e.value for e in read.Scalars("epsilon")] == [1.5, 2.0]
