"""What every trainer must do. A new trainer is added to TRAINERS and passes all of it."""

from __future__ import annotations

from typing import Any

import pytest

from fed_dp import plugins
from fed_dp.audit.conformance import CHECKS, Bench, Check, conformance, words
from fed_dp.experiment import Experiment
from fed_dp.models import Evaluator
from tests.conftest import small, some

BUDGET = {"budget_epsilon": 4.0, "delta": 1e-5}


def paper(name: str, model: dict[str, Any], **options: Any) -> Experiment:
    """A paper's form without its noise. It takes many rounds to learn: whole runs show that it does."""
    return small(model=model, trainer={"name": name, "perturb": False, **options})


def as_claimed(name: str, model: dict[str, Any], variant: str = "paper") -> Experiment:
    """A paper's form with its noise."""
    return small(model=model, trainer={"name": name}, privacy={"budget_epsilon": 4.0, "variant": variant})


def proved(name: str, model: dict[str, Any], **changes: Any) -> Experiment:
    """What is released once, by stages, and followed without records."""
    return small(**{"model": model, "trainer": {"name": name}, "privacy": BUDGET, "rounds": 4, **changes})


def synthetic(name: str, **options: Any) -> Experiment:
    """What is trained on a noisy histogram, by Laplace noise."""
    return proved(
        name, {"name": "logistic"}, trainer={"name": name, **options}, privacy={"budget_epsilon": 4.0}
    )


BEHAVIOUR: dict[str, Any] = {"data": {"name": "health-weekly"}}
PUBLIC = {"data": {"public_records": 200}}
AUTO_ENCODER, CDBN = {"name": "auto-encoder", "hidden": 12}, {"name": "cdbn", "filters": 2, "hidden": 8}
ADLM_CNN = {"name": "adlm-cnn", "filters": 2, "hidden": 6}
TRAINERS = {
    "sgd": small("sgd"),
    "sgd, selective": small(trainer={"name": "sgd", "learning_rate": 0.2, "update_fraction": 0.1}),
    "psgd": small("psgd"),
    "psgd, ghost": small("psgd", trainer={"name": "psgd", "gradients": "ghost", "sample_rate": 0.25}),
    "psgd on scattering": small("psgd", model={"name": "scattering-linear"}),
    "sgd on scattering": small("sgd", model={"name": "scattering-linear"}),
    "psgd, patch cnn": small("psgd", model={"name": "patch-cnn", "filters": 4}),
    "dpa, exact": paper("dpa", AUTO_ENCODER, truncate=False),
    "dpa, truncated": paper("dpa", AUTO_ENCODER),
    "adlm": paper("adlm", ADLM_CNN),
    "ilm, exact": paper("ilm", ADLM_CNN, truncate=False),
    "pcdbn, truncated": paper("pcdbn", CDBN),
    "dpa, claimed": as_claimed("dpa", AUTO_ENCODER),
    "dpa, as printed": as_claimed("dpa", AUTO_ENCODER, "paper_as_printed"),
    "pcdbn, claimed": as_claimed("pcdbn", CDBN),
    "adlm, claimed": as_claimed("adlm", ADLM_CNN),
    "ilm, as released": as_claimed("ilm", ADLM_CNN, "paper_as_released"),
    "dpa, statistics": proved("dpa", {"name": "random-features", "features": 40}),
    "dpa, learnt": proved("dpa", {"name": "private-pca", "features": 40, "components": 12}),
    "dpa, pure": proved("dpa", {"name": "unit-linear"}, privacy={"budget_epsilon": 4.0}),
    "pcdbn, statistics": proved("pcdbn", {"name": "patch-filters", "filters": 4, "components": 30}),
    "adlm, class sums": proved("adlm", {"name": "class-sums"}, **PUBLIC),
    "ilm, statistics": proved("ilm", {"name": "relevant-scattering", "features": 40}),
    "svm, hybrid": proved("svm", {"name": "rbf", "features": 40}, **PUBLIC),
    "svm, pure": proved("svm", {"name": "rbf", "features": 40}, privacy={"budget_epsilon": 4.0}, **PUBLIC),
    "dpme": synthetic("dpme", attributes=[20, 43]),
    "filter-priority": synthetic("filter-priority", attributes=[20, 43]),
    "filter-priority, sparse": synthetic("filter-priority", attributes=list(range(18, 36))),
    "crbm": small(**BEHAVIOUR, model={"name": "crbm-behaviour", "hidden": 12}, trainer={"name": "crbm"}),
    "sctrbm": small(**BEHAVIOUR, model={"name": "sctrbm-behaviour", "hidden": 12}, trainer={"name": "crbm"}),
}
QUICK = [name for name, experiment in TRAINERS.items() if experiment.trainer.name in ("sgd", "psgd")]


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("check", CHECKS, ids=words)
def test_every_trainer_does_what_all_must(check: Check, name: str) -> None:
    check(Bench(TRAINERS[name]))


@pytest.mark.parametrize("name", QUICK)
def test_training_helps(name: str) -> None:
    bench = Bench(TRAINERS[name])
    x = bench.data.inputs(bench.data.test)
    evaluator = Evaluator(bench.network, x, bench.data.test.y)
    fit = bench.fit(bench.trainer())
    assert evaluator.scores(bench.start + fit.change)["loss"] < evaluator.scores(bench.start)["loss"]


def test_every_trainer_and_each_of_its_forms_is_here() -> None:
    known = plugins.components("trainer")
    here = {(e.trainer.name, e.privacy.variant if e.private else "none") for e in TRAINERS.values()}
    assert {name for name, _ in here} == set(known)
    private = {name for name, trainer in known.items() if trainer.guarantees}
    assert {name for name, variant in here if variant == "proved"} == private
    in_paper = {name for name, trainer in known.items() if trainer.paper_needs is not None}
    assert {name for name, variant in here if variant.startswith("paper")} == in_paper


@pytest.mark.parametrize("name", some(plugins.names("trainer"), ("sgd", "psgd", "svm")))
def test_the_command_finds_nothing_wrong_with_a_built_in_trainer(name: str) -> None:
    results = list(conformance(name))
    assert len(results) >= len(CHECKS)
    assert [result for result in results if result.why] == []
