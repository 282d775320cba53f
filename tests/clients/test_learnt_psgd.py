"""pSGD on networks with learnt layers: moments are released first, each once; then gradients of the head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fed_dp.accounting import Gaussian, Ledger, SampledGaussian, from_json
from fed_dp.accounting.composition import epsilon, total
from fed_dp.clients.building import make_trainer
from fed_dp.clients.psgd import LOGIT_NOISE, MAX_MOVE, Psgd
from fed_dp.clients.psgd.trainer import LearntPsgdTrainer
from fed_dp.clients.trainer import ClientData, StagedTrainer
from fed_dp.errors import ConfigError, FedDpError
from fed_dp.experiment import Experiment, build
from fed_dp.experiment.federation import make_federation
from fed_dp.experiment.plan import release_plan
from fed_dp.experiment.start import starting_weights
from fed_dp.models import FlatNetwork
from fed_dp.runs.folder import LEDGERS, RunFolder
from fed_dp.server.observers import Silent
from fed_dp.simulations.runner import simulate

ROUNDS = 6


def experiment(**changes: Any) -> Experiment:
    tables: dict[str, Any] = {
        "name": "learnt",
        "rounds": ROUNDS,
        "clients": {"count": 3},
        "model": {"name": "scattering", "groups": 27, "components": 40, "unit": False},
        "trainer": {
            "name": "psgd", "local_steps": 1, "sample_rate": 0.5, "clipping": "automatic",
            "learning_rate": "auto",
        },
        "strategy": {"name": "averaging", "momentum": 0.9},
        "privacy": {"budget_epsilon": 8.0, "delta": 1e-5},
    }  # fmt: skip
    for key, value in changes.items():
        tables[key] = {**tables[key], **value} if isinstance(tables.get(key), dict) else value
    return build(tables)


def test_a_run_charges_each_stage_once_and_every_later_round_and_costs_the_budget(tmp_path: Path) -> None:
    folder, summary = simulate(experiment(), observer=Silent(), engine="in-process", root=tmp_path)
    cost = summary["privacy"]
    assert cost["guarantee"] == "proved"
    assert 7.9 < cost["epsilon_total"] <= 8.0
    for client in range(3):
        account, entries = Ledger(folder / LEDGERS, f"client-{client:04d}").read()
        releases = [entry.event.release for entry in entries]
        assert [type(release) for release in releases] == [Gaussian, *[SampledGaussian] * (ROUNDS - 1)]
        assert account.spent == pytest.approx(cost["epsilon_total"])
    lines = RunFolder(folder).lines()
    told = [from_json(line["events"]) for line in lines]
    assert [len(events) for events in told] == [3] * ROUNDS  # stages are told again, and counted once
    assert "moments of bounded features" in cost["reason"]


def test_the_noise_is_calibrated_for_stages_and_steps_together() -> None:
    given = experiment()
    plan = release_plan(given, client=0, size=1)
    assert plan is not None
    assert plan.goes_on
    assert [plan.stage(r) for r in (1, 2, 3, ROUNDS)] == [1, 0, 0, 0]
    charges = plan.charges(ROUNDS)
    assert sorted(charges.values()) == [1, ROUNDS - 1]
    assert 7.9 < total(charges, delta=1e-5) <= 8.0
    assert isinstance(plan.release, SampledGaussian)
    alone = epsilon([SampledGaussian(plan.release.noise_multiplier, 0.5, ROUNDS - 1)], delta=1e-5)
    assert alone < 8.0  # the rest is the stage's


def bench(given: Experiment) -> tuple[LearntPsgdTrainer, np.ndarray, ClientData]:
    federation = make_federation(given)
    trainer, _ = make_trainer(given, federation.dataset)
    assert isinstance(trainer, LearntPsgdTrainer)
    assert isinstance(trainer, StagedTrainer)
    x, y = federation.client(0)
    return trainer, starting_weights(given, federation), ClientData(x, y, 0, 2, 1)


def test_gradients_move_the_head_alone() -> None:
    trainer, weights, site = bench(experiment())
    change = trainer.fit(weights, site, {}).change
    head = 40 * 10
    assert not change[:-head].any()
    assert change[-head:].any()


def test_features_are_computed_anew_where_the_moments_or_the_records_are_others() -> None:
    trainer, weights, site = bench(experiment())
    before = trainer.fit(weights, site, {}).change
    moved = weights.copy()
    released = trainer.release(weights, site, 1, None)
    moved[: len(released)] = released
    other = trainer.fit(moved, site, {}).change
    assert not np.array_equal(before, other)
    fresh, _, _ = bench(experiment())
    assert np.array_equal(fresh.fit(moved, site, {}).change, other)
    halved = ClientData(site.x[::2].copy(), site.y[::2], 0, 2, 1)
    assert np.array_equal(
        trainer.fit(moved, halved, {}).change, bench(experiment())[0].fit(moved, halved, {}).change
    )
    assert np.array_equal(trainer.fit(weights, site, {}).change, before)


@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_every_way_to_gradients_and_a_client_batch_take_the_same_steps(clipping: str) -> None:
    found = []
    for gradients, together in (("auto", "auto"), ("hooks", 1), ("ghost", 1), ("vmap", 1)):
        given = experiment(
            trainer={"clipping": clipping, "gradients": gradients, "clip": 0.2, "local_steps": 3},
            clients={"together": together},
        )
        trainer, weights, site = bench(given)
        found.append(trainer.fit(weights, site, {}).change)
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=2e-5)


@pytest.mark.parametrize("moments", [1e3, -1e3, 0.0])
def test_whatever_moments_a_server_sends_every_record_has_a_gradient(moments: float) -> None:
    trainer, weights, site = bench(experiment())
    sent = weights.copy()
    sent[:-400] = moments
    assert np.isfinite(trainer.fit(sent, site, {}).change).all()


def test_features_without_unit_norm_have_a_mean_square_of_one() -> None:
    given = experiment(model={"components": 100})
    federation = make_federation(given)
    net = FlatNetwork(given.network(federation.dataset.shape, federation.dataset.classes))
    trainer, weights, site = bench(given)
    moments = trainer.release(weights, site, 1, None)
    weights[: len(moments)] = moments
    net.load(weights)
    square = net.features(site.x).square().sum(1).mean()
    assert float(square) == pytest.approx(1.0, rel=0.5)  # moments take directions for independent


# ----------------------------------------------------------------------------- the learning rate


def rate(given: Experiment, records: int = 1000) -> float:
    plan = release_plan(given, client=0, size=1)
    assert plan is not None
    assert isinstance(given.trainer, Psgd)
    assert isinstance(plan.release, SampledGaussian)
    return given.trainer.rate_for(given, plan.release, records=records)


def test_the_rate_is_such_that_noise_moves_logits_by_a_constant() -> None:
    given = experiment(privacy={"budget_epsilon": 0.5})
    plan = release_plan(given, client=0, size=1)
    assert plan is not None
    assert isinstance(plan.release, SampledGaussian)
    eta, sites, steps = rate(given, records=200), 3, ROUNDS - 1
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(4000, sites, steps)) * plan.release.noise_multiplier / (0.5 * 200)
    weights = (eta * noise.mean(1)).sum(1) / (1 - 0.9)  # the long run: momentum multiplies by 10
    assert 10 * weights.std() == pytest.approx(LOGIT_NOISE, rel=0.05)


def test_the_rate_follows_from_public_numbers_and_is_bounded() -> None:
    assert rate(experiment(privacy={"budget_epsilon": 0.5}), 200) < rate(experiment(), 200)
    assert rate(experiment(), 10**7) == pytest.approx(MAX_MOVE * (1 - 0.9))
    assert rate(experiment(trainer={"learning_rate": 0.25})) == 0.25


def test_the_rate_that_was_decided_stands_in_the_summary(tmp_path: Path) -> None:
    given = experiment(rounds=2)
    _, summary = simulate(given, observer=Silent(), engine="in-process", root=tmp_path)
    told = summary["decided"]["trainer.learning_rate"]
    records = summary["data"]["train"] // 3
    assert told["max"] == pytest.approx(rate(given, records), rel=0.02)


# ------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rounds": 1}, ["rounds = 1", "1 learnt layer", "at least 2"]),
        ({"trainer": {"local_epochs": 2}}, ["trainer.local_steps = 1", "trainer.local_epochs = 2"]),
        ({"trainer": {"augmentations": 2}}, ["trainer.augmentations = 2", "trainer.shift", "trainer.flip"]),
        ({"trainer": {"shift": 1}}, ["trainer.shift is set", "trainer.augmentations = 1"]),
        (
            {"trainer": {"augmentations": 2, "flip": True, "gradients": "ghost"}},
            ["trainer.gradients = 'ghost'", "auto, vmap"],
        ),
        (
            {"trainer": {"augmentations": 2, "flip": True}, "privacy": {"noise_source": "secure"}},
            ["trainer.augmentations = 2", "privacy.noise_source = 'secure'"],
        ),
        ({"trainer": {"optimizer": "adam"}}, ["trainer.learning_rate = 'auto'", "scattering"]),
        ({"model": {"groups": 26}}, ["model.groups = 26", "1, 3, 9, 27, 81"]),
    ],
)
def test_a_mistake_is_one_line_naming_key_value_and_what_is_allowed(
    changes: dict[str, Any], words: list[str]
) -> None:
    def built() -> None:
        experiment(**changes).network((1, 8, 8), 10).build()

    with pytest.raises(FedDpError) as caught:
        built()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_rule_for_rates_and_the_share_of_layers_need_a_network_that_has_them() -> None:
    plain = {"name": "small-mlp"}
    tables = {"rounds": 2, "privacy": {"budget_epsilon": 1.0, "delta": 1e-5}, "model": plain}
    for key, value in (("learning_rate", "auto"), ("encoder_share", 0.1)):
        with pytest.raises(ConfigError, match=f"trainer.{key}"):
            build({**tables, "trainer": {"name": "psgd", key: value}})


@pytest.mark.parametrize("model", ["auto-encoder", "adlm-cnn", "cdbn"])
def test_the_papers_networks_are_trained_by_gradients_one_record_at_a_time(model: str) -> None:
    given = build(
        {
            "rounds": 1,
            "clients": {"count": 20},
            "model": {"name": model, "hidden": 8},
            "trainer": {"name": "psgd", "sample_rate": 0.5, "local_steps": 1, "clip": 0.1},
            "privacy": {"budget_epsilon": 8.0, "delta": 1e-5},
        }
    )
    federation = make_federation(given)
    trainer, net = make_trainer(given, federation.dataset)
    x, y = federation.client(0)
    fit = trainer.fit(starting_weights(given, federation), ClientData(x, y, 0, 1, 1), {})
    assert np.isfinite(fit.change).all()
    assert fit.change.any()
    again = trainer.fit(starting_weights(given, federation), ClientData(x, y, 0, 1, 1), {})
    assert again.change.tobytes() == fit.change.tobytes()  # dropout, too, follows from the seed
    assert isinstance(net.flat, torch.Tensor)


@pytest.mark.parametrize("clipping", ["flat", "automatic"])
@pytest.mark.parametrize("source", ["simulation", "secure"])
@pytest.mark.parametrize("model", ["auto-encoder", "adlm-cnn", "cdbn"])
def test_the_papers_networks_answer_whatever_the_sample_is(model: str, source: str, clipping: str) -> None:
    given = build(
        {
            "rounds": 1,
            "clients": {"count": 100},
            "model": {"name": model, "hidden": 8, **({} if model == "auto-encoder" else {"filters": 2})},
            "trainer": {"name": "psgd", "sample_rate": 0.1, "local_steps": 3, "clipping": clipping},
            "privacy": {"budget_epsilon": 8.0, "delta": 1e-5, "noise_source": source},
        }
    )
    trainer, _ = make_trainer(given, make_federation(given).dataset)
    weights = starting_weights(given, make_federation(given))
    x, y = make_federation(given).client(0)
    for rows in (slice(1), slice(None)):  # most samples of one record are empty
        site = ClientData(x[rows], y[rows], 0, 1, 1, expected_records=14)
        assert np.isfinite(trainer.fit(weights, site, {}).change).all()


@pytest.mark.parametrize("gradients", ["hooks", "ghost"])
@pytest.mark.parametrize("model", ["adlm-cnn", "cdbn"])
def test_hooks_are_refused_where_they_would_not_see_all_gradients(model: str, gradients: str) -> None:
    given = build(
        {
            "rounds": 1,
            "model": {"name": model, "filters": 2, "hidden": 8},
            "trainer": {"name": "psgd", "gradients": gradients},
            "privacy": {"budget_epsilon": 8.0, "delta": 1e-5},
        }
    )
    with pytest.raises(FedDpError, match=f"trainer.gradients = '{gradients}'.*allowed: auto, vmap"):
        make_trainer(given, make_federation(given).dataset)
