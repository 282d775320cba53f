"""Exact audits: close to the statement where it is proved, above it where not; half the noise is seen."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import laplace as laplace_distribution

from fed_dp.accounting import Event, from_json, guarantees, spent
from fed_dp.audit import exact
from fed_dp.audit.exact import loss
from fed_dp.audit.finding import NOT_REFUTED, NOTHING_STATED, REFUTED, Finding, StatedGuarantee, row_text
from fed_dp.audit.mechanisms import MECHANISMS, audit_mechanism
from fed_dp.audit.releases import EXACT, audit_releases
from fed_dp.errors import ConfigError, PrivacyError
from fed_dp.experiment import Experiment, build
from fed_dp.experiment.federation import load
from fed_dp.experiment.plan import release_plan
from fed_dp.mechanisms import Noise
from fed_dp.runs.folder import RunFolder
from fed_dp.server.observers import Silent
from fed_dp.simulations.runner import simulate
from tests.conftest import private_selection, small

REFUTABLE = ("sparse_vector_as_printed", "svm_as_printed")
COMPUTED = [name for name in MECHANISMS if name != "psgd"]  # which is measured: test_caught.py
GENEROUS = ("sparse_vector_paper", "svm_paper")  # their papers add more noise than it takes


@pytest.mark.parametrize("epsilon", [0.3, 4.0])
@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_proved_is_not_refuted_and_what_is_not_is(name: str, epsilon: float) -> None:
    for found in audit_mechanism(name, epsilon=epsilon):
        assert found.refuted == (name in REFUTABLE)
        assert found.confidence == 1
        if name not in REFUTABLE:
            assert found.guarantee.stated == "proved"
            assert found.bound > (0.45 if name in GENEROUS else 0.95) * epsilon  # no generous audit
        else:
            assert found.guarantee.stated == "refuted"
            assert found.bound > 2 * epsilon


@pytest.mark.parametrize("name", [name for name in COMPUTED if name not in (*REFUTABLE, *GENEROUS)])
def test_half_of_the_noise_is_caught(name: str) -> None:
    assert all(found.refuted for found in audit_mechanism(name, epsilon=1.0, factor=0.5))
    assert not any(found.refuted for found in audit_mechanism(name, epsilon=1.0, factor=2.0))


def test_noise_that_depends_on_the_records_is_no_protection() -> None:
    def worlds(noise: Noise, world: bool) -> object:
        return noise.laplace(np.zeros(1), scale=2.0 if world else 1.0)

    assert loss(worlds) == math.inf


def test_a_gaussian_has_no_loss_without_delta() -> None:
    with pytest.raises(PrivacyError, match="δ = 0"):
        loss(lambda noise, world: noise.gaussian(np.full(1, float(world)), scale=1.0))


def test_wrong_names_and_numbers_are_one_line() -> None:
    with pytest.raises(ConfigError, match="known: laplace"):
        audit_mechanism("lapalce")
    for wrong in ({"epsilon": -1.0}, {"delta": 2.0}, {"factor": math.nan}):
        with pytest.raises(ConfigError, match="expected above 0"):
            audit_mechanism("laplace", **wrong)


def test_a_finding_never_says_verified() -> None:
    said = StatedGuarantee("proved", "record", "replace one")
    good = Finding("x", said, claim=1.0, delta=0.0, bound=0.2, confidence=0.95, attack="a", trials=10, seed=1)
    bad = Finding("x", said, claim=1.0, delta=0.0, bound=1.2, confidence=1.0, attack="a")
    none = Finding("x", said, claim=math.inf, delta=0.0, bound=1.2, confidence=1.0, attack="a")
    assert (good.verdict, bad.verdict, none.verdict) == (NOT_REFUTED, REFUTED, NOTHING_STATED)
    for found in (good, bad, none):
        text = "\n".join(found.lines()) + json.dumps(found.tables(), allow_nan=False)
        assert "verified" not in text
        assert text.index("stated ε") < text.index("at least ε")
    assert "95.0% confidence, 10 trials, seed 1" in good.lines()[1]
    endless = Finding("x", said, claim=1.0, delta=0.0, bound=math.inf, confidence=1.0, attack="a")
    assert endless.tables()["bound"] is None
    assert "ε = ∞" in endless.lines()[1]


def released_once(**more: Any) -> Experiment:
    return build(
        {
            "rounds": 2,
            "model": {"name": "scattering", "components": 20},
            "trainer": {"name": "dpa"},
            "strategy": {"name": "statistics"},
            "privacy": {"budget_epsilon": 4.0, "delta": 1e-5},
            **more,
        }
    )


DECLARED = {"expected_records": 60}
LEARNT: dict[str, Any] = {"model": {"name": "scattering", "components": 20, "groups": 27, "unit": False}}
EXPERIMENTS: dict[str, Any] = {
    "psgd": lambda: small("psgd"),
    "psgd_add_remove": lambda: small("psgd", data=DECLARED),
    "psgd_learnt": lambda: small("psgd", rounds=4, **LEARNT),
    "psgd_learnt_add_remove": lambda: small("psgd", rounds=4, data=DECLARED, **LEARNT),
    "statistics_add_remove": lambda: released_once(data=DECLARED),
    "sparse_vector": lambda: private_selection("sparse_vector", privacy={"budget_epsilon": 4.0}),
    "sparse_vector_paper": lambda: private_selection("sparse_vector", variant="paper"),
    "sparse_vector_as_printed": lambda: private_selection("sparse_vector", variant="paper_as_printed"),
    "random_mask": lambda: private_selection("random_mask"),
    "statistics": released_once,
    **{
        name: lambda variant=variant: build(
            {
                "rounds": 1,
                "model": {"name": "rbf"},
                "trainer": {"name": "svm", "frequencies": "random"},
                "privacy": {"budget_epsilon": 4.0, "variant": variant},
            }
        )
        for name, variant in (
            ("svm", "proved"),
            ("svm_paper", "paper"),
            ("svm_as_printed", "paper_as_printed"),
        )
    },
    **{
        f"{trainer.replace('-', '_')}{ending}": lambda trainer=trainer, data=data: build(
            {
                "rounds": 2,
                "data": data,
                "model": {"name": "logistic"},
                "trainer": {"name": trainer, "attributes": [20, 43], "local_steps": 3},
                "privacy": {"budget_epsilon": 4.0},
            }
        )
        for trainer in ("dpme", "filter-priority")
        for ending, data in (("", {}), ("_add_remove", DECLARED))
    },
}


def ran(experiment: Experiment, tmp_path: Path) -> tuple[dict[str, Any], list[Event]]:
    """What a run states, and all that it released."""
    folder, summary = simulate(experiment, observer=Silent(), engine="in-process", root=tmp_path)
    lines = RunFolder(folder).lines()
    return summary["privacy"], [event for line in lines for event in from_json(line["events"])]


@pytest.mark.parametrize("name", EXACT)
def test_the_releases_of_a_run_are_audited_together(name: str, tmp_path: Path) -> None:
    assert name in guarantees()
    experiment = EXPERIMENTS[name]()
    cost, events = ran(experiment, tmp_path)
    found = audit_releases(experiment, cost, events, size=650, data=load(small().data))
    assert found is not None
    assert found.refuted == name.endswith("as_printed")
    if not found.refuted:
        assert found.bound > (0.45 if name in GENEROUS else 0.95) * found.claim
    # The same releases, stated to cost a third.
    third = {**cost, **{key: cost[key] and cost[key] / 3 for key in ("epsilon_total", "epsilon_pure")}}
    less = audit_releases(experiment, third, events, size=650, data=load(small().data))
    assert less is not None
    assert less.refuted


@pytest.mark.parametrize("name", ["psgd", "psgd_learnt", "statistics", "sparse_vector", "random_mask"])
def test_a_total_that_forgets_a_round_or_a_stage_is_refuted(name: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name]()
    cost, events = ran(experiment, tmp_path)
    own = [event for event in events if event.client == 0]
    assert len(own) > 1
    for forgotten in (own[:-1], own[1:]):
        less = spent(forgotten, delta=cost["delta"])
        pure = None if cost["epsilon_pure"] is None else less
        told = {**cost, "epsilon_total": less, "epsilon_pure": pure, "sites_per_record": 1}
        found = audit_releases(experiment, told, own, size=650, data=load(small().data))
        assert found is not None
        assert found.refuted


@pytest.mark.parametrize(
    "change",
    [
        {"clients": {"count": 6, "fraction": 0.34}, "rounds": 6},  # a site pays in some rounds alone
        {"data": {"partition": {"name": "fraction", "fraction": 0.4}}},  # a record pays at several sites
    ],
)  # fmt: skip
def test_what_is_audited_is_what_the_total_composes(change: dict[str, Any], tmp_path: Path) -> None:
    experiment = small("psgd", **change)
    cost, events = ran(experiment, tmp_path)
    found = audit_releases(experiment, cost, events, size=650, data=load(small().data))
    assert found is not None
    assert not found.refuted
    assert found.bound > 0.95 * cost["epsilon_total"]


@pytest.mark.parametrize(
    ("model", "trainer", "kinds"),
    [
        ("scattering", "dpa", "MapMoments, HeadStatistics"),
        ("patch-filters", "pcdbn", "PatchMoments, MapMoments, HeadStatistics"),
        ("class-sums", "adlm", "ClassSums"),
        ("random-features", "dpa", "HeadStatistics"),
    ],
)
def test_what_is_audited_is_the_statistic_that_was_released(
    model: str, trainer: str, kinds: str, tmp_path: Path
) -> None:
    options = {"components": 20} if model in ("scattering", "patch-filters") else {}
    experiment = released_once(
        rounds=4,
        data={"public_records": 50},
        model={"name": model, **options},
        trainer={"name": trainer},
    )
    cost, events = ran(experiment, tmp_path)
    found = audit_releases(experiment, cost, events, size=650, data=load(small().data))
    assert found is not None
    assert f"({kinds})" in found.attack
    assert 0.95 * found.claim < found.bound <= found.claim


@pytest.mark.parametrize("epsilon", [1e-2, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("share", [0.1, 1.0])
@pytest.mark.parametrize("split", ["lyu", "equal"])
def test_the_loss_of_finding_never_exceeds_its_proof(split: str, share: float, epsilon: float) -> None:
    experiment = build(
        {
            "rounds": 10,
            "strategy": {
                "name": "dssgd", "selection": "sparse_vector", "bound": 0.01, "upload_fraction": share,
                "split": split,
            },
            "privacy": {"budget_epsilon": epsilon},
        }
    )  # fmt: skip
    agreed = release_plan(experiment, client=0, size=2410)
    assert agreed is not None
    events = [agreed.event(server_round=turn, client=0) for turn in range(1, 11)]
    cost = {"epsilon_total": epsilon, "epsilon_pure": epsilon, "delta": 0.0, "sites_per_record": 1}
    found = audit_releases(experiment, cost, events, size=2410, data=load(small().data))
    assert found is not None
    assert 0.1 * epsilon < found.bound <= epsilon * (1 + 1e-9)
    json.dumps(found.tables(), allow_nan=False)


def test_an_integral_of_what_is_known() -> None:
    found = exact._log_integral(lambda z: exact._log_density(z, 2.0), (0.0,), 2.0)
    assert found == pytest.approx(0.0, abs=1e-12)
    below = exact._log_below(np.array([-3.0, 0.0, 3.0, -1e6]), 1.5)
    assert below[:3] == pytest.approx(laplace_distribution.logcdf([-3.0, 0.0, 3.0], scale=1.5))
    assert below[3] == pytest.approx(-1e6 / 1.5 - math.log(2))


def test_a_bound_at_another_delta_says_what_is_stated_there() -> None:
    said = StatedGuarantee("proved", "participant", "replace one")
    found = Finding("x", said, claim=2.7, delta=0.0, bound=2.6, confidence=1.0, attack="a").tables()
    assert row_text(found, delta=1e-5) == "≥ 2.600 of 2.700 at δ = 0 (exact)"
    assert row_text(found, delta=0.0) == "≥ 2.600 (exact)"


def test_what_has_no_exact_loss_is_not_audited() -> None:
    assert (
        audit_releases(small(), {"delta": 0.0, "sites_per_record": 1}, [], size=650, data=load(small().data))
        is None
    )


def test_a_spy_adds_nothing() -> None:
    spy = exact.Spy(0.5)
    values = np.arange(3.0)
    for add in (spy.laplace, spy.gaussian, spy.spherical):
        assert add(values, scale=2.0).tolist() == values.tolist()
    assert [call.scale for call in spy.noted] == [1.0] * 3
    assert spy.shuffled(np.arange(4)).tolist() == [0, 1, 2, 3]
