"""DPME and Filter-Priority as trainers: counted once, charged before, trained on without records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fed_dp.accounting import Budget, Laplace, Ledger
from fed_dp.clients.building import make_trainer
from fed_dp.clients.dpme import Dpme
from fed_dp.clients.synthetic.trainer import SyntheticTrainer
from fed_dp.clients.trainer import ClientData, StagedTrainer
from fed_dp.errors import ConfigError
from fed_dp.experiment import Experiment, build
from fed_dp.experiment.federation import make_federation
from fed_dp.experiment.plan import guarantee_of, release_plan
from fed_dp.experiment.start import starting_weights
from fed_dp.mechanisms import SimulationNoise, histogram
from fed_dp.mechanisms.histogram import Grid
from fed_dp.models import Evaluator, Vector
from tests.clients.deployed import Deployed
from tests.mechanisms.privacy_loss import Spy

FEW, MANY = [20, 43], list(range(18, 36))
BOTH = ("dpme", "filter-priority")


def experiment(name: str = "dpme", attributes: list[int] = FEW, **changes: Any) -> Experiment:
    options = changes.pop("options", {})
    tables: dict[str, Any] = {
        "seed": 3,
        "rounds": 3,
        "clients": {"count": 2},
        "model": {"name": "logistic"},
        "trainer": {"name": name, "attributes": attributes, **options},
        "privacy": {"budget_epsilon": 4.0},
    }
    return build({**tables, **changes})


def ready(given: Experiment) -> tuple[SyntheticTrainer, Vector, ClientData]:
    members = make_federation(given)
    trainer, _ = make_trainer(given, members.dataset)
    assert isinstance(trainer, SyntheticTrainer)
    return trainer, starting_weights(given, members), ClientData(*members.client(0), 0, 1, given.seed)


def seeded(seed: int = 0) -> SimulationNoise:
    return SimulationNoise(np.random.default_rng(seed))


@pytest.mark.parametrize("name", BOTH)
def test_one_release_costs_the_whole_budget_and_the_noise_is_what_was_agreed(name: str) -> None:
    given = experiment(name)
    trainer, weights, site = ready(given)
    agreed, stated = release_plan(given, client=0, size=weights.size), guarantee_of(given)
    assert agreed is not None
    assert agreed.stages == (Laplace(4.0),)
    assert stated is not None
    assert (stated.status, stated.neighbours) == ("proved", "zero-out one")
    declared = guarantee_of(experiment(name, data={"expected_records": 700}))
    assert declared is not None
    assert declared.neighbours == "add/remove one"
    spy = Spy()
    trainer.release(weights, site, 1, spy)
    values, scale = spy.calls[0]
    assert scale == 1 / 4.0
    assert values.sum() == len(site.y)  # each record in one cell
    assert np.array_equal(values, np.round(values))


@pytest.mark.parametrize(("name", "attributes"), [(BOTH[0], FEW), (BOTH[1], FEW), (BOTH[1], MANY)])
def test_training_follows_from_what_was_released_alone(name: str, attributes: list[int]) -> None:
    trainer, weights, site = ready(experiment(name, attributes))
    assert isinstance(trainer, StagedTrainer)
    assert trainer.frozen(weights, 1).size == 0  # no weight decides the cells
    released = trainer.release(weights, site, 1, seeded())
    again = trainer.release(weights + 1, site, 1, seeded())
    assert released.tobytes() == again.tobytes()
    first = trainer.follow(weights, released, 1, records=len(site.y)).change
    second = trainer.follow(weights, released, 1, records=len(site.y)).change
    assert first.tobytes() == second.tobytes()
    assert np.abs(first).max() > 0.1
    settled = trainer.follow(weights + first, released, 1, records=len(site.y)).change
    assert np.abs(settled).max() < 1e-5  # it is there
    unused = np.ones(64, bool)
    unused[attributes] = False
    assert not first[:640].reshape(10, 64)[:, unused].any()  # which nothing was learnt from


@pytest.mark.parametrize(("attributes", "dense"), [(FEW, True), (MANY, False)])
def test_what_is_released_is_read_as_it_was_written(attributes: list[int], dense: bool) -> None:
    options = {"bins": 2}
    trainer, _, _ = ready(experiment("filter-priority", attributes, options=options))
    grid = Grid(len(attributes), 2, 10)
    assert (grid.cells <= histogram.LISTED) == dense
    cells = np.sort(np.random.default_rng(0).choice(grid.cells, 30, replace=False))
    counts = np.arange(1.0, 31.0)
    found = trainer._read(grid, trainer._written(grid, (cells, counts)))
    assert np.array_equal(found[0], cells)
    assert np.array_equal(found[1], counts)


def test_synthetic_records_without_noise_teach_what_their_attributes_tell() -> None:
    options = {"perturb": False, "bins": 3}
    given = experiment("filter-priority", list(range(64)), options={**options, "bins": 2}, privacy={}, seed=1)
    with pytest.raises(ConfigError, match=r"are 1\.84e\+20 cells; expected up to 9\.01e\+15"):
        ready(given)
    given = experiment("filter-priority", list(range(10, 38)), options=options, privacy={}, seed=1)
    trainer, weights, site = ready(given)
    data = make_federation(given).dataset
    evaluator = Evaluator(given.network(data.shape, 10), data.inputs(data.test), data.test.y)
    change = trainer.fit(weights, site, {}).change
    assert evaluator.scores(weights + change)["accuracy"] > 0.8


def test_a_grid_follows_from_the_public_number_of_records_alone() -> None:
    for name in BOTH:
        given = experiment(name, data={"expected_records": 700})
        trainer, weights, site = ready(given)
        declared = replace(site, expected_records=700)
        fewer = replace(declared, x=site.x[:100], y=site.y[:100])
        sizes = {len(trainer.release(weights, each, 1, seeded())) for each in (declared, fewer)}
        assert len(sizes) == 1
    grid = Dpme(attributes=(1, 2)).grid(attributes=7, classes=2, records=9000, secure=False)
    assert grid == Grid(7, 6, 2)
    finest = Dpme().grid(attributes=15, classes=2, records=10**9, secure=False)
    assert finest.bins == 2  # as many as it can list


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        (
            {"trainer": {"name": "dpme", "attributes": [3, 3]}},
            r"trainer.attributes names 3 twice: expected places that differ",
        ),
        (
            {"trainer": {"name": "dpme"}, "privacy": {"budget_epsilon": 1.0, "delta": 1e-5}},
            r"privacy.delta = 1e-05: .*'dpme' adds Laplace noise.*expected without privacy.delta",
        ),
        (
            {"trainer": {"name": "filter-priority", "perturb": False}},
            r"trainer.perturb = false adds no noise: no privacy key can hold",
        ),
        ({"trainer": {"name": "dpme", "attributes": []}}, r"trainer.attributes = \[\]: expected"),
        ({"trainer": {"name": "dpme", "size": 3}}, r"unknown key trainer.size = 3 \(only 'filter-priority'"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(tables: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        experiment(**tables)


@pytest.mark.parametrize(
    ("name", "tables", "says"),
    [
        (
            "dpme",
            {"attributes": MANY, "options": {"bins": 3}},
            r"18 attributes in 3 bins and 10 classes are 3874204890 cells.* up to 1048576: name fewer",
        ),
        ("dpme", {"attributes": [64]}, r"names 64: records have 64 numbers; expected 0..63"),
        (
            "filter-priority",
            {"attributes": MANY, "privacy": {"budget_epsilon": 1.0, "noise_source": "secure"}},
            r"noise_source = 'secure': of 2621440 cells.*expected up to 65536 cells",
        ),
    ],
)
def test_cells_that_cannot_be_counted_are_refused_before_anything_is_charged(
    name: str, tables: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        ready(experiment(name, **tables))


@pytest.mark.parametrize("name", BOTH)
def test_a_deployed_site_counts_once_with_exact_noise(name: str, tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "a.ledger", site="ward 7", budget=Budget(4.0, 0.0))
    given = experiment(name, privacy={"budget_epsilon": 4.0, "noise_source": "secure"})
    for turn in (1, 2):
        Deployed(given, ledger.path).answer(turn)
    account, _ = ledger.read()
    assert account.number == 1
    assert account.spent == pytest.approx(4.0)
