"""Audits of trainers and runs: broken forms are refuted, proved ones are not, less noise is seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fed_dp.audit.one_run import _canaries, audit_run
from fed_dp.audit.psgd import PATHS
from fed_dp.audit.trainers import audit_trainer, prepare, setups
from fed_dp.clients.psgd import Psgd
from fed_dp.clients.psgd import batch as psgd_batch
from fed_dp.clients.psgd import trainer as psgd
from fed_dp.errors import ConfigError
from fed_dp.experiment.federation import adopt, load, make_federation
from tests.conftest import private_selection, small, some
from tests.mechanisms.privacy_loss import mutant

BROKEN = [
    ("dssgd", "paper_as_printed", {"trials": 200}),
    ("adlm", "paper_as_released", {"trials": 60, "epsilon": 0.3}),
    ("ilm", "paper_as_released", {"trials": 60, "epsilon": 0.3}),
    ("dpa", "paper_as_printed", {"trials": 60, "epsilon": 0.5}),
    ("dpa", "paper_as_released", {"trials": 20, "epsilon": 0.1}),
    ("svm", "paper_as_printed", {"trials": 200}),
]


@pytest.mark.statistical
@pytest.mark.parametrize(("name", "variant", "options"), BROKEN)
def test_the_papers_broken_forms_are_refuted(name: str, variant: str, options: dict[str, float]) -> None:
    found = audit_trainer(name, variant=variant, **options)  # type: ignore[arg-type]
    assert found.guarantee.stated == "refuted"
    assert found.refuted, found.lines()


@pytest.mark.statistical
@pytest.mark.parametrize("name", setups())
def test_the_proved_forms_stay_below_what_is_stated(name: str) -> None:
    found = audit_trainer(name, trials=60)
    assert found.guarantee.stated == "proved"
    assert found.bound <= found.claim


@pytest.mark.statistical
@pytest.mark.parametrize("name", ["adlm", "ilm"])
def test_independent_noise_is_not_eliminated(name: str) -> None:
    assert not audit_trainer(name, variant="paper", trials=40).refuted


@pytest.mark.statistical
@pytest.mark.parametrize("name", setups())
def test_an_audit_sees_a_trainer_that_hardly_adds_noise(name: str) -> None:
    found = audit_trainer(name, trials=60, factor=1e-3)
    assert found.noise == 1e-3
    assert found.refuted, found.lines()


@pytest.mark.statistical
@pytest.mark.parametrize("path", some(list(PATHS), [path for path in PATHS if path != "secure"]))
def test_each_path_of_psgd_in_two_worlds_with_samples(path: str) -> None:
    stage = prepare("psgd", path=path)
    assert isinstance(stage.experiment.trainer, Psgd)
    assert stage.experiment.trainer.sample_rate < 1
    loud = audit_trainer("psgd", path=path, trials=40, factor=1e-2)
    assert loud.refuted, loud.lines()
    if path != "secure":  # whose noise takes long; `audit_path` holds its bound below the statement
        found = audit_trainer("psgd", path=path, trials=60)
        assert found.bound <= found.claim


def test_two_worlds_differ_in_what_the_guarantee_protects() -> None:
    added = prepare("psgd").worlds
    assert len(added[1][1]) == len(added[0][1]) + 1
    replaced = prepare("svm").worlds
    assert len(replaced[1][1]) == len(replaced[0][1])
    assert (replaced[0][0][1:] == replaced[1][0][1:]).all()  # all others stay where they are
    assert not (replaced[0][0][0] == replaced[1][0][0]).all()
    others = prepare("dssgd").worlds  # a participant: all records are others
    assert not (others[0][0] == others[1][0]).all(axis=(1, 2, 3)).any()


def test_wrong_names_are_one_line() -> None:
    with pytest.raises(ConfigError, match="known: adlm"):
        audit_trainer("sgd")
    with pytest.raises(ConfigError, match="has proved"):
        audit_trainer("psgd", variant="paper")
    with pytest.raises(ConfigError, match="--path = 'hoks': trainer 'psgd' has client batches, hooks"):
        audit_trainer("psgd", path="hoks")
    with pytest.raises(ConfigError, match="at least 20 trials"):
        audit_trainer("psgd", trials=5)
    with pytest.raises(ConfigError, match=r"--confidence = 1\.0"):
        audit_trainer("psgd", confidence=1.0)
    for factor in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="--noise"):
            audit_trainer("svm", factor=factor)
    with pytest.raises(ConfigError, match="draw their own noise"):
        audit_trainer("dpa", variant="paper", factor=0.5)


def test_one_run_shows_what_a_run_without_privacy_loses_and_does_not_refute_psgd() -> None:
    plain = small(rounds=40, trainer={"name": "sgd", "learning_rate": 0.3, "local_epochs": 5})
    found = audit_run(plain, canaries=200)
    assert found.bound > 1
    assert not found.refuted  # nothing is stated
    stated = {"budget_epsilon": 0.5, "delta": 1e-5}
    private = audit_run(small("psgd", rounds=5, privacy=stated), canaries=200)
    assert private.bound <= private.claim <= 0.5
    assert "one run, 200 mislabelled canaries" in private.attack


LINEAR: dict[str, Any] = {
    "clients": {"count": 2},
    "rounds": 10,
    "model": {"name": "linear"},
    "trainer": {"name": "psgd", "sample_rate": 0.25, "learning_rate": 0.5},
    "privacy": {"budget_epsilon": 8.0, "delta": 1e-5},
}


@pytest.mark.statistical
def test_random_canaries_and_cosines_bound_what_psgd_loses_in_a_federated_run() -> None:
    found = audit_run(small("psgd", **LINEAR), canaries=600, attack="gradient")
    assert 0 < found.bound <= found.claim
    assert "the cosine of each round's change" in found.attack
    assert "against the whole privacy profile of its releases" in found.attack


@pytest.mark.statistical
def test_one_run_catches_psgd_that_hardly_adds_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    weakened = mutant(psgd_batch, ("normal_(0, deviation,", "normal_(0, deviation / 50,"))
    monkeypatch.setattr(psgd, "train_batch", weakened.train_batch)
    stated = {"budget_epsilon": 1.0, "delta": 1e-5}
    found = audit_run(small("psgd", **{**LINEAR, "privacy": stated}), canaries=600, attack="gradient")
    assert found.refuted, found.lines()


def test_an_unknown_attack_is_one_line() -> None:
    with pytest.raises(ConfigError, match="--attack = 'los': expected loss or gradient"):
        audit_run(small(), attack="los")  # type: ignore[arg-type]


def test_coins_move_no_other_record() -> None:
    """Neighbours differ in one record of one site: all others stay where they were dealt out."""
    experiment = small()
    whole = load(experiment.data)
    before = make_federation(experiment).parts
    out = np.array([before[1][3], before[2][0]])
    adopt(experiment.data, whole, without=out)
    try:
        after = make_federation(experiment).parts
    finally:
        adopt(experiment.data, whole)
    for one, two in zip(before, after, strict=True):
        assert np.setdiff1d(one, out).tolist() == two.tolist()
    assert [part.tolist() for part in make_federation(experiment).parts] == [part.tolist() for part in before]


def test_one_run_keeps_to_records_that_sites_hold_and_to_the_stated_neighbours() -> None:
    private = small(data={"public_records": 900})
    found = _canaries(private, load(private.data), 100, 1, "add/remove one")
    assert found.other is None
    assert set(found.rows) <= set(np.concatenate(make_federation(private).parts))
    both = _canaries(private, load(private.data), 100, 1, "replace one")
    assert both.other is not None
    assert (both.other != both.label).all()
    assert (both.label != load(private.data).train.y[both.rows]).all()
    by_label = audit_run(private_selection("random_mask"), canaries=100)
    assert by_label.guarantee.neighbours == "replace one"
    assert by_label.bound <= by_label.claim
    overlapping = small("psgd", data={"partition": {"name": "fraction", "fraction": 0.5}})
    assert audit_run(overlapping, canaries=50).claim > 4.0  # a record at several sites pays at each


def test_one_run_refuses_what_it_cannot_audit() -> None:
    with pytest.raises(ConfigError, match="no one model"):
        audit_run(small(strategy={"name": "standalone"}))
    with pytest.raises(ConfigError, match="--canaries = 5"):
        audit_run(small(), canaries=5)
