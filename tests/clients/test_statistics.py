"""Trainers of the functional mechanism: released once, followed without records, held by real sites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from fed_dp.accounting import Budget, Gaussian, Laplace, Ledger, from_json
from fed_dp.clients.building import make_trainer
from fed_dp.clients.functional.statistics import StatisticsTrainer
from fed_dp.clients.trainer import ClientData, StagedTrainer
from fed_dp.errors import BudgetExceeded, PrivacyError
from fed_dp.experiment import Experiment, build
from fed_dp.experiment.federation import make_federation
from fed_dp.experiment.plan import release_plan
from fed_dp.experiment.start import starting_weights
from fed_dp.mechanisms import SecureNoise, SimulationNoise
from fed_dp.mechanisms.statistics import ROUNDING
from fed_dp.models import Vector
from fed_dp.sharing import message as names
from fed_dp.sharing.codec import decode
from tests.clients.deployed import Deployed
from tests.mechanisms.privacy_loss import Spy

PUBLIC = {"public_records": 200}
MODELS: dict[str, dict[str, Any]] = {
    "unit-linear": {"trainer": {"name": "dpa"}},
    "random-features": {"trainer": {"name": "dpa"}, "model": {"features": 40}},
    "private-pca": {"trainer": {"name": "dpa"}, "model": {"features": 40, "components": 12}},
    "scattering": {"trainer": {"name": "dpa"}, "model": {"components": 30}},
    "scattering-random": {"trainer": {"name": "dpa"}, "model": {"features": 40}},
    "patch-filters": {"trainer": {"name": "pcdbn"}, "model": {"filters": 4, "components": 30}},
    "class-sums": {"trainer": {"name": "adlm"}, "data": PUBLIC},
    "relevant-pixels": {"trainer": {"name": "adlm"}, "data": PUBLIC},
    "relevant-scattering": {"trainer": {"name": "ilm"}, "model": {"features": 40}},
}


def experiment(model: str = "private-pca", *, strategy: Any = "averaging", **changes: Any) -> Experiment:
    sample_clients = MODELS[model]
    tables = {
        "seed": 3,
        "rounds": 4,
        "clients": {"count": 4},
        "data": sample_clients.get("data", {}),
        "model": {"name": model, **sample_clients.get("model", {})},
        "trainer": sample_clients["trainer"],
        "strategy": {"name": strategy} if isinstance(strategy, str) else strategy,
        "privacy": {"budget_epsilon": 4.0, "delta": 1e-5},
    }
    return build({**tables, **changes})


def ready(given: Experiment) -> tuple[StatisticsTrainer, Vector, Callable[..., ClientData]]:
    members = make_federation(given)
    trainer, _ = make_trainer(given, members.dataset)
    assert isinstance(trainer, StatisticsTrainer)
    start = starting_weights(given, members)

    def site(client: int = 0, turn: int = 1) -> ClientData:
        return ClientData(*members.client(client), client, turn, given.seed)

    return trainer, start, site


@pytest.mark.parametrize("model", MODELS)
def test_every_stage_is_noised_by_what_was_agreed_for_it(model: str) -> None:
    given = experiment(model)
    agreed = release_plan(given, client=0, size=1)
    assert agreed is not None
    assert len(agreed.stages) == (given.model.stages - 1) + 1
    trainer, weights, site = ready(given)
    for stage, expected in enumerate(agreed.stages, 1):
        assert isinstance(expected, Gaussian)
        spy = Spy()
        trainer.release(weights, site(), stage, spy)
        [(_, scale)] = spy.calls
        wanted = expected.noise_multiplier * trainer._statistic(stage).l2
        assert wanted < scale < wanted * (1 + 2 * ROUNDING)


@pytest.mark.parametrize("model", MODELS)
def test_what_follows_a_release_needs_no_record(model: str) -> None:
    trainer, weights, site = ready(experiment(model))
    assert isinstance(trainer, StagedTrainer)
    last = trainer.stage(99)
    for stage in range(1, last + 1):
        released = trainer.release(weights, site(), stage, SimulationNoise(np.random.default_rng(stage)))
        fit = trainer.follow(weights, released, stage, records=len(site().y))
        assert fit.change.dtype == np.float32
        assert fit.change.shape == weights.shape
        assert np.isfinite(fit.change).all()
        touched = np.flatnonzero(fit.change)
        assert touched.min() >= trainer.frozen(weights, stage).size  # what is frozen stays
        weights = weights + fit.change
    assert not fit.metrics


def test_the_same_noise_gives_the_same_bytes_and_another_place_another_noise() -> None:
    trainer, weights, site = ready(experiment())
    one, same, other = (
        trainer.release(weights, site(), 1, SimulationNoise(np.random.default_rng(k))).tobytes()
        for k in (1, 1, 2)
    )
    assert one == same != other


def test_no_number_in_a_record_is_an_error_that_tells_of_it() -> None:
    trainer, weights, site = ready(experiment())
    broken = site()
    broken.x[0] = np.nan
    for stage in (1, 2):
        released = trainer.release(weights, broken, stage, SimulationNoise(np.random.default_rng(0)))
        assert np.isfinite(released).all()


def test_pure_epsilon_takes_laplace_noise_in_shares_that_add_up() -> None:
    given = experiment(privacy={"budget_epsilon": 4.0})
    agreed = release_plan(given, client=0, size=1)
    assert agreed is not None
    assert [type(stage) for stage in agreed.stages] == [Laplace, Laplace]
    assert sum(stage.pure for stage in agreed.stages) == pytest.approx(4.0)  # type: ignore[misc]
    trainer, weights, site = ready(given)
    spy = Spy()
    trainer.release(weights, site(), 2, spy)
    [(_, scale)] = spy.calls
    wanted = trainer._statistic(2).l1 / (0.95 * 4.0)
    assert wanted < scale < wanted * (1 + 2 * ROUNDING)


@pytest.mark.parametrize("model", MODELS)
def test_what_is_computed_of_a_record_does_not_depend_on_the_others(model: str) -> None:
    trainer, _, site = ready(experiment(model, clients={"count": 1}))
    whole = site()
    fewer = replace(whole, x=whole.x[1:], y=whole.y[1:])
    for stage in range(1, trainer.stage(99) + 1):
        all_of_them, rest = (
            np.concatenate([rows for rows, _ in trainer._batches(records, stage)])
            for records in (whole, fewer)
        )
        assert all_of_them[1:].tobytes() == rest.tobytes()


def test_descent_on_what_was_released_ends_at_its_minimiser() -> None:
    given = experiment("random-features", trainer={"name": "dpa", "local_steps": 4000, "ridge": 2.0})
    trainer, weights, site = ready(given)
    released = trainer.release(weights, site(), 1, SimulationNoise(np.random.default_rng(0)))
    once = weights + trainer.follow(weights, released, 1, records=len(site().y)).change
    again = trainer.follow(once, released, 1, records=len(site().y)).change
    assert np.abs(again).max() < 1e-3 * np.abs(once).max()


# ------------------------------------------------------------------------------- a real site


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "site.ledger", site="ward 7", budget=Budget(4.0, 1e-5))


def secure(model: str = "random-features", **changes: Any) -> Experiment:
    privacy = {"budget_epsilon": 4.0, "delta": 1e-5, "noise_source": "secure"}
    return experiment(model, privacy=privacy, **changes)


def sent(reply: Message) -> bytes:
    return reply.content.array_records[names.ARRAYS][names.CHANGE].data


def told(reply: Message) -> Any:
    return reply.content.config_records[names.CONFIG]


@pytest.mark.parametrize("strategy", ["averaging", "statistics"])
def test_a_deployed_site_releases_once_and_trains_on_it_ever_after(strategy: str, ledger: Ledger) -> None:
    given = secure(strategy=strategy)
    replies = [Deployed(given, ledger.path).answer(turn) for turn in (1, 2, 3)]  # restarted each time
    account, entries = ledger.read()
    assert account.number == 1
    assert account.spent == pytest.approx(4.0)
    [event] = [entry.event for entry in entries]
    assert event.noise_source == "secure"
    for reply in replies:
        assert from_json(told(reply)[names.EVENTS]) == (event,)
        assert told(reply)[names.LEDGER_HEAD] == account.ledger_head
    assert sent(replies[0]) == sent(replies[1]) == sent(replies[2])  # the same weights were asked about


def test_a_site_whose_answer_was_lost_sends_what_it_released_before(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = secure(strategy="statistics")
    first = Deployed(given, ledger.path).answer(1)
    monkeypatch.setattr(SecureNoise, "gaussian", lambda *_, **__: 1 / 0)  # nothing may be drawn again
    again = Deployed(given, ledger.path).answer(2, known=ledger.read()[0].ledger_head)
    assert sent(again) == sent(first)
    assert [event.round for event in from_json(told(again)[names.EVENTS])] == [1]
    trainer, _, _ = ready(given)
    size = trainer._statistic(1).size
    assert len(decode(sent(again), size=size, most=size)) == size


def test_every_stage_is_kept_whichever_comes_after(ledger: Ledger) -> None:
    given = secure("private-pca", strategy="statistics")
    replies = {turn: Deployed(given, ledger.path).answer(turn) for turn in (1, 2, 3)}
    assert [event.round for event in from_json(told(replies[3])[names.EVENTS])] == [1, 2]
    mark = ledger.read()[0].ledger_head
    for turn in (1, 2):  # asked again, after a restart: nothing new is drawn or charged
        assert sent(Deployed(given, ledger.path).answer(turn, known=mark)) == sent(replies[turn])
    assert ledger.read()[0].number == 2


def test_noise_too_fine_to_be_secure_is_refused_whatever_the_records_are(ledger: Ledger) -> None:
    privacy = {"budget_epsilon": 1e9, "noise_source": "secure"}
    given = experiment("unit-linear", privacy=privacy)
    trainer, weights, site = ready(given)
    for scale in (1.0, 0.0):
        records = replace(site(), x=site().x * np.float32(scale))
        with pytest.raises(PrivacyError, match=r"noise of scale .* is too small for values up to"):
            trainer.release(weights, records, 1, SecureNoise())


def test_another_encoder_is_another_release_and_the_budget_does_not_pay_twice(ledger: Ledger) -> None:
    site = Deployed(secure("private-pca"), ledger.path)
    site.answer(1)
    site.answer(2)
    assert ledger.read()[0].number == 2
    with pytest.raises(BudgetExceeded, match="nothing was sent"):
        site.answer(3, fill=0.25)  # the server has changed the moments that the encoder is made of
    assert ledger.read()[0].number == 2


def test_a_site_that_fails_after_the_charge_has_paid_and_does_not_pay_again(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = secure()
    with monkeypatch.context() as broken:
        broken.setattr("fed_dp.clients.functional.statistics.release", lambda *_, **__: 1 / 0)
        with pytest.raises(PrivacyError, match=r"training failed \(ZeroDivisionError\); nothing was sent"):
            Deployed(given, ledger.path).answer(1)
    assert ledger.read()[0].number == 1
    with pytest.raises(BudgetExceeded):
        Deployed(given, ledger.path).answer(1)


def test_what_is_only_claimed_or_not_noised_is_refused_where_there_is_a_ledger(ledger: Ledger) -> None:
    claimed = build(
        {
            "model": {"name": "auto-encoder", "hidden": 5},
            "trainer": {"name": "dpa"},
            "clients": {"count": 4},
            "privacy": {"budget_epsilon": 4.0, "variant": "paper"},
        }
    )
    with pytest.raises(PrivacyError, match="seeded"):
        Deployed(claimed, ledger.path).answer()
    plain = experiment(trainer={"name": "dpa", "perturb": False}, privacy={})
    with pytest.raises(PrivacyError, match="adds no noise: this site takes part in private experiments"):
        Deployed(plain, ledger.path).answer()
    assert ledger.read()[0].number == 0
