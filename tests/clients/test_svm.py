"""The private SVM as a trainer: released once, charged before, followed without records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.svm import SVC

from fed_dp.accounting import Budget, Gaussian, Laplace, Ledger, from_json
from fed_dp.clients.building import make_trainer
from fed_dp.clients.svm import Svm
from fed_dp.clients.svm.trainer import SvmTrainer
from fed_dp.clients.trainer import ClientData, StagedTrainer
from fed_dp.errors import BudgetExceeded, ConfigError, PrivacyError
from fed_dp.experiment import Experiment, build
from fed_dp.experiment.federation import make_federation
from fed_dp.experiment.plan import guarantee_of, release_plan, warning_of
from fed_dp.experiment.start import starting_weights
from fed_dp.mechanisms import SimulationNoise
from fed_dp.mechanisms.statistics import ROUNDING
from fed_dp.mechanisms.support_vector import (
    COST_PER_RECORD,
    TOLERANCE,
    default_cost,
    paper_scale,
    score_noise,
    sensitivity,
    steps,
)
from fed_dp.models import Evaluator, Vector
from fed_dp.sharing import message as names
from tests.clients.deployed import Deployed
from tests.mechanisms.privacy_loss import Spy

PLAIN_TRAINER = {"name": "svm", "perturb": False}


def experiment(**changes: Any) -> Experiment:
    tables: dict[str, Any] = {
        "seed": 3,
        "rounds": 3,
        "data": {"public_records": 30},
        "clients": {"count": 4},
        "model": {"name": "rbf", "features": 40},
        "trainer": {"name": "svm", "cost": 50.0},
        "privacy": {"budget_epsilon": 4.0},
    }
    return build({**tables, **changes})


def ready(given: Experiment) -> tuple[SvmTrainer, Vector, ClientData]:
    members = make_federation(given)
    trainer, _ = make_trainer(given, members.dataset)
    assert isinstance(trainer, SvmTrainer)
    return trainer, starting_weights(given, members), ClientData(*members.client(0), 0, 1, given.seed)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "gamma"),
        ({"trainer": {"name": "svm", "cost": 50.0, "noise": "laplace"}}, "laplace"),
        ({"privacy": {"budget_epsilon": 4.0, "delta": 1e-5}}, "gaussian"),
        ({"privacy": {"budget_epsilon": 4.0, "variant": "paper"}}, "paper"),
        ({"privacy": {"budget_epsilon": 4.0, "noise_source": "secure"}}, "laplace"),
    ],
)
def test_the_noise_is_what_was_agreed(changes: dict[str, Any], kind: str) -> None:
    given = experiment(**changes)
    assert isinstance(given.trainer, Svm)
    assert given.trainer.noise_kind(given) == kind
    trainer, weights, site = ready(given)
    agreed = release_plan(given, client=0, size=weights.size)
    assert agreed is not None
    assert agreed.stages == (agreed.release,)
    spy = Spy()
    trainer.release(weights, site, 1, spy)
    [(values, scale)] = spy.calls
    assert values.shape == (10, 40)  # one problem for each digit, against the rest
    records = len(site.y)
    delta = sensitivity(cost=50.0, records=records, problems=10)
    if kind == "gaussian":
        assert isinstance(agreed.release, Gaussian)
        wanted = agreed.release.noise_multiplier * delta
    elif kind == "paper":
        wanted = 10 * paper_scale(cost=50.0, records=records, features=40, epsilon=4.0)
    else:
        assert agreed.release == Laplace(4.0)
        wanted = delta / 4.0 * (1 if kind == "gamma" else np.sqrt(400))
    assert wanted <= scale <= wanted * (1 + 2 * ROUNDING)


def test_each_class_is_told_from_the_rest_and_features_learn() -> None:
    trainer, weights, site = ready(experiment(trainer={"name": "svm", "perturb": False}, privacy={}))
    assert not trainer.is_private
    fit = trainer.fit(weights, site, {})
    again = trainer.fit(weights + fit.change, site, {})
    assert np.abs(again.change).max() < 1e-6  # it is there already
    assert not fit.change[: trainer.frozen(weights, 1).size].any()  # frequencies stay


def test_what_follows_needs_no_record_and_moves_by_its_part() -> None:
    for strategy, step in (({"name": "averaging"}, 1.0), ({"name": "dssgd"}, 0.25)):
        trainer, weights, site = ready(experiment(strategy=strategy))
        assert isinstance(trainer, StagedTrainer)
        released = trainer.release(weights, site, 1, SimulationNoise(np.random.default_rng(0)))
        change = trainer.follow(weights, released, 1, records=len(site.y)).change
        assert change[-400:] == pytest.approx(step * (released - weights[-400:]))


def test_no_number_and_one_class_are_no_error() -> None:
    trainer, weights, site = ready(experiment())
    broken = replace(site, x=np.full_like(site.x, np.nan))
    alike = replace(site, y=np.zeros_like(site.y))
    for records in (broken, alike):
        released = trainer.release(weights, records, 1, SimulationNoise(np.random.default_rng(0)))
        assert np.isfinite(released).all()


def test_whatever_frequencies_a_server_sends_no_record_counts_for_more() -> None:
    """Features have norm 1 for any ρ: the w of neighbours stay as near."""
    trainer, weights, site = ready(experiment())
    rng = np.random.default_rng(0)
    for scale in (0.0, 1.0, 900.0):
        sent = weights.copy()
        sent[:-400] = rng.uniform(-scale, scale, size=weights.size - 400)
        other = replace(site, x=site.x.copy(), y=site.y.copy())
        other.x[0], other.y[0] = -site.x[0] * 3, (site.y[0] + 1) % 10
        one, two = (solved(trainer, sent, each) for each in (site, other))
        assert np.linalg.norm(one - two) <= sensitivity(cost=50.0, records=len(site.y), problems=10)


def test_the_printed_objective_is_refuted_and_says_so() -> None:
    printed = experiment(privacy={"budget_epsilon": 4.0, "variant": "paper_as_printed"})
    assert guarantee_of(printed).status == "refuted"  # type: ignore[union-attr]
    assert "not divide C by n" in (warning_of(printed) or "")
    assert warning_of(experiment(privacy={"budget_epsilon": 4.0, "variant": "paper"})) is None
    assert ready(printed)[0]._as_printed


@pytest.mark.parametrize("delta", [None, 1e-5])
def test_a_deployed_site_releases_once(delta: float | None, tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "a.ledger", site="ward 7", budget=Budget(4.0, delta or 0.0))
    privacy = {"budget_epsilon": 4.0, "noise_source": "secure"} | ({"delta": delta} if delta else {})
    given = experiment(privacy=privacy)
    replies = [Deployed(given, ledger.path).answer(turn) for turn in (1, 2)]
    bodies = [reply.content.array_records[names.ARRAYS][names.CHANGE].data for reply in replies]
    assert bodies[0] == bodies[1]
    account, entries = ledger.read()
    assert account.number == 1
    assert account.spent == pytest.approx(4.0)
    told = replies[1].content.config_records[names.CONFIG][names.EVENTS]
    assert from_json(str(told)) == (entries[0].event,)


def auc(needs: Callable[[str], None], seed: int, **changes: Any) -> float:
    needs("adult-numbers")
    partition = {"name": "fraction", "fraction": 0.82973}
    given = experiment(
        seed=seed,
        data={"name": "adult-numbers", "public_records": 20, "partition": partition},
        clients={"count": 1},
        model={"name": "rbf"},
        **{"trainer": {"name": "svm"}, "privacy": {"budget_epsilon": 1.0}, **changes},
    )
    members = make_federation(given)
    trainer, weights, site = ready(given)
    assert changes.get("strategy") or len(site.y) == 27_000
    noise = None if not trainer.is_private else SimulationNoise(np.random.default_rng(seed))
    released = trainer.release(weights, site, 1, noise)
    change = trainer.follow(weights, released, 1, records=len(site.y)).change
    data = members.dataset
    evaluator = Evaluator(given.network(data.shape, 2), data.inputs(data.test), data.test.y)
    return evaluator.scores(weights + change)["auc"]


def test_the_hybrid_svm_on_adult(needs: Callable[[str], None]) -> None:
    seeds = (1, 2, 3, 4, 5)
    hybrid = np.mean([auc(needs, seed) for seed in seeds])
    plain = {"trainer": {"name": "svm", "perturb": False}, "privacy": {}}
    without = np.mean([auc(needs, seed, **plain) for seed in seeds])
    public = np.mean([auc(needs, seed, strategy={"name": "public"}, **plain) for seed in seeds])
    assert hybrid > without - 0.02
    assert hybrid > public + 0.02


def solved(trainer: SvmTrainer, weights: Vector, site: ClientData) -> np.ndarray:
    """What noise is added to."""
    spy = Spy()
    trainer.release(weights, site, 1, spy)
    [(values, _)] = spy.calls
    return np.asarray(values)


def test_what_is_released_is_solved_with_c_over_n() -> None:
    trainer, weights, site = ready(experiment())
    found = solved(trainer, weights, site)
    assert np.linalg.norm(found, axis=1).max() <= 50.0  # as any w is, then
    twice = replace(site, x=np.repeat(site.x, 2, 0), y=np.repeat(site.y, 2), expected_records=0)
    assert solved(trainer, weights, twice) == pytest.approx(found, abs=2 * TOLERANCE * 50 / len(site.y))


def test_whether_a_site_answers_does_not_depend_on_a_label(tmp_path: Path) -> None:
    """At ε = 1e-6, "the solver did not reach the agreed accuracy" told one label of C/n = 5,000."""
    z = np.ones((2, *ready(experiment())[2].x.shape[1:]), np.float32)
    for cost in (2_000.0, 10_000.0):
        privacy = {"budget_epsilon": 1e-6}
        trainer, weights, site = ready(experiment(trainer={"name": "svm", "cost": cost}, privacy=privacy))
        answers = set()
        for labels in ([0, 0], [0, 1], [3, 3], [7, 2]):
            pair = replace(site, x=z, y=np.array(labels), expected_records=0)
            try:
                trainer.release(weights, pair, 1, SimulationNoise(np.random.default_rng(0)))
                answers.add("released")
            except PrivacyError as error:
                answers.add(str(error))
        assert len(answers) == 1
        assert ("C/n = 5000" in answers.pop()) == (cost == 10_000.0)


def test_other_frequencies_are_another_release_and_the_budget_does_not_pay_twice(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "a.ledger", site="ward 7", budget=Budget(4.0, 0.0))
    given = experiment(privacy={"budget_epsilon": 4.0, "noise_source": "secure"})
    Deployed(given, ledger.path).answer(1)
    with pytest.raises(BudgetExceeded):
        Deployed(given, ledger.path).answer(2, fill=0.25)
    assert ledger.read()[0].number == 1


def test_a_site_far_from_the_model_still_sends_what_a_message_may_hold() -> None:
    trainer, weights, site = ready(experiment())
    far = weights.copy()
    far[-400:] = -1000
    change = trainer.follow(far, np.full(400, 1000, np.float32), 1, records=len(site.y)).change
    assert np.abs(change).max() <= 1000


def test_a_site_never_fits_an_encoder_to_its_own_records(tmp_path: Path) -> None:
    """A server that sends a part of the model would have it fitted to what the run config calls public."""
    ledger = Ledger.create(tmp_path / "a.ledger", site="ward 7", budget=Budget(4.0, 0.0))
    given = experiment(privacy={"budget_epsilon": 4.0, "noise_source": "secure"})
    with pytest.raises(PrivacyError, match="part of the model is missing; nothing was sent"):
        Deployed(given, ledger.path).answer(part=True)
    assert ledger.read()[0].number == 0


def test_more_records_than_declared_are_left_out_and_decide_nothing() -> None:
    """Else whether it is refused, or how long it takes, tells their number."""
    trainer, weights, site = ready(experiment(data={"public_records": 30, "expected_records": 60}))
    declared = replace(site, expected_records=60)
    fewer = replace(declared, x=site.x[:60], y=site.y[:60])
    assert np.array_equal(solved(trainer, weights, declared), solved(trainer, weights, fewer))


# ----------------------------------------------------------------------------- C by rule


AUTO: dict[str, Any] = {"trainer": {"name": "svm"}}


def auto(records: int, sites: int = 4) -> float:
    """C by hand: gamma noise, ten problems of 40 features, ε = 4: over four sites half of it."""
    one = score_noise(kind="gamma", noise_value=4.0, records=records, problems=10, features=40)
    return default_cost(records=records, score_noise=one / np.sqrt(sites))


def test_c_by_rule_is_what_the_noise_is_made_for() -> None:
    trainer, weights, site = ready(experiment(**AUTO))
    spy = Spy()
    trainer.release(weights, site, 1, spy)
    [(values, scale)] = spy.calls
    cost = auto(len(site.y))
    wanted = sensitivity(cost=cost, records=len(site.y), problems=10) / 4.0
    assert scale == pytest.approx(wanted * (1 + ROUNDING))
    stated = experiment(trainer={"name": "svm", "cost": cost})
    assert solved(ready(stated)[0], weights, site) == pytest.approx(values)


def test_c_by_rule_follows_from_public_numbers_and_from_no_record() -> None:
    declared = experiment(**AUTO, data={"public_records": 30, "expected_records": 60})
    trainer, weights, site = ready(declared)
    scales = set()
    for x, y in ((site.x, site.y), (site.x[:20], site.y[:20]), (-site.x, np.zeros_like(site.y))):
        spy = Spy()
        trainer.release(weights, replace(site, x=x, y=y, expected_records=60), 1, spy)
        scales.add(spy.calls[0][1])
    assert len(scales) == 1
    wanted = sensitivity(cost=auto(60), records=60, problems=10) / 4.0
    assert scales.pop() == pytest.approx(wanted * (1 + ROUNDING))


def test_a_sites_limit_holds_for_c_by_rule() -> None:
    declared = {"public_records": 30, "expected_records": 5_000}
    for tables, cost in ((AUTO, None), ({"trainer": {"name": "svm", "cost": 70.0}}, 70.0)):
        given = experiment(**tables, data=declared)
        [(most, key)] = given.trainer.limits(given, client=0).values()
        assert key == "steps"
        assert most >= steps(cost=cost or auto(5_000), records=5_000, expected=5_000)
        assert cost is None or most == steps(cost=cost, records=5_000, expected=5_000)
    unknown = experiment(**AUTO)
    assert unknown.trainer.limits(unknown, client=0)["steps for trainer.cost"][0] < 10_000


def test_what_is_no_number_and_no_rule_is_refused() -> None:
    for wrong in ("best", 0.0, 1e7):
        with pytest.raises(ConfigError, match=r"trainer\.cost"):
            experiment(trainer={"name": "svm", "cost": wrong})


# ----------------------------------------------------------------------------- the kernel itself


def exact(**changes: Any) -> Experiment:
    tables: dict[str, Any] = {
        "trainer": {"name": "svm", "perturb": False},
        "model": {"name": "rbf-exact"},
        "strategy": {"name": "public"},
        "data": {"public_records": 120},
        "privacy": {},
    }
    return experiment(**{**tables, **changes})


@pytest.mark.parametrize("cost", ["auto", 30.0])
def test_public_records_alone_are_scikit_learns_svc_with_the_papers_kernel(cost: Any) -> None:
    given = exact(
        data={"name": "health-weekly", "public_records": 120}, trainer={**PLAIN_TRAINER, "cost": cost}
    )
    members = make_federation(given)
    trainer, net = make_trainer(given, members.dataset)
    public = members.public
    assert public is not None
    start = starting_weights(given, members)
    net.load(start + trainer.fit(start, ClientData(*public, 0, 1, given.seed), {}).change)
    flat = public[0].reshape(120, -1)
    width = 2 * np.sqrt(flat.shape[1])
    machine = SVC(C=COST_PER_RECORD if cost == "auto" else cost / 120, gamma=1 / width**2).fit(
        flat, public[1]
    )
    test = members.dataset.inputs(members.dataset.test)
    assert net.network.intercepts.item() == pytest.approx(machine.intercept_[0], abs=1e-5)
    with torch.no_grad():
        told = net.network(torch.from_numpy(test)).numpy()
    margins = machine.decision_function(test.reshape(len(test), -1))
    assert (told[:, 1] - told[:, 0]) / 2 == pytest.approx(margins, abs=1e-3)
    kept = net.network.support.numpy()
    assert kept[machine.support_].tobytes() == flat[machine.support_].tobytes()  # they are the records
    assert not kept[np.setdiff1d(np.arange(120), machine.support_)].any()


def test_each_class_is_told_from_the_rest_by_the_kernel_and_one_class_alone_by_nothing() -> None:
    given = exact()
    members = make_federation(given)
    trainer, _ = make_trainer(given, members.dataset)
    start = starting_weights(given, members)
    site = ClientData(*members.client(0), 0, 1, given.seed)
    data = members.dataset
    evaluator = Evaluator(given.network(data.shape, 10), data.inputs(data.test), data.test.y)
    assert evaluator.scores(start + trainer.fit(start, site, {}).change)["accuracy"] > 0.8
    alike = trainer.fit(start, replace(site, y=np.zeros_like(site.y)), {}).change
    assert (evaluator.predictions(alike).argmax(1) == 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"strategy": {"name": "averaging"}},
            "public records alone, not 'averaging'",
        ),
        ({"strategy": {"name": "centralised"}}, "consists of the records that it is trained on"),
        ({"trainer": {"name": "svm", "perturb": False, "frequencies": "random"}}, "and no frequencies"),
        (
            {"trainer": {"name": "svm"}, "privacy": {"budget_epsilon": 1.0}},
            "expected with trainer.perturb = false",
        ),
    ],
)
def test_a_machine_of_records_is_made_of_public_ones_alone(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        exact(**changes)
