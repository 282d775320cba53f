"""Repeats over seeds and folds, public records set aside, and what of them is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fed_dp.errors import ConfigError, PartitionError
from fed_dp.experiment import Experiment, build, group_of, override, variants
from fed_dp.experiment.federation import make_federation

SVM = {"model": {"name": "rbf"}, "trainer": {"name": "svm", "perturb": False}}


def with_data(**data: Any) -> Experiment:
    return build({"clients": {"count": 3}, "data": data, **(SVM if data.get("public_records") else {})})


def test_every_variant_comes_once_for_each_seed_and_fold() -> None:
    tables = {
        "name": "x",
        "repeats": {"seeds": [4, 7], "folds": 3},
        "variants": {"a": {"rounds": 2}, "b": {}},
    }
    found = variants(tables)
    assert len(found) == 12
    one = build(found["a~s7~f2"])
    assert (one.seed, one.data.folds, one.data.fold, one.rounds, one.name) == (7, 3, 2, 2, "x-a_s7_f2")
    assert {group_of(name) for name in found} == {"a", "b"}
    assert group_of("noise_s1") == "noise_s1"  # a variant's own name
    assert list(variants({"name": "x", "repeats": {"seeds": 2}})) == ["x~s1", "x~s2"]
    assert list(variants({"name": "x", "repeats": {}})) == ["x"]


@pytest.mark.parametrize(
    ("repeats", "told"),
    [
        (3, "expected a table"),
        ({"sedes": 2}, "unknown key repeats.sedes"),
        ({"seeds": 0}, "repeats.seeds = 0"),
        ({"seeds": [1, 1]}, "seeds that differ"),
        ({"seeds": ["a"]}, "repeats.seeds"),
        ({"folds": 0}, "repeats.folds = 0"),
        ({"folds": True}, "repeats.folds = True"),
    ],
)
def test_wrong_repeats_are_told(repeats: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        variants({"name": "x", "repeats": repeats})


def test_folds_part_the_training_records_and_each_is_tested_once() -> None:
    found = [make_federation(with_data(folds=4, fold=k)) for k in range(4)]
    tested = [members.dataset.test for members in found]
    whole = found[0].dataset.train
    assert sum(map(len, tested)) == len(whole)
    seen = np.concatenate([records.x.reshape(len(records), -1) for records in tested])
    assert len(np.unique(seen, axis=0)) == len(np.unique(whole.x.reshape(len(whole), -1), axis=0))
    for members in found:
        rows = np.concatenate(members.parts)
        assert len(rows) + len(members.dataset.test) == len(whole)
        assert len(np.unique(rows)) == len(rows)


def test_public_records_are_nobodys_and_nothing_else_changes() -> None:
    members = make_federation(with_data(public_records=40))
    assert members.public is not None
    assert members.public[0].shape == (40, 1, 8, 8)
    rows = np.concatenate(members.parts)
    assert len(np.unique(rows)) == len(members.dataset.train) - 40
    assert any("40 training records are set aside" in note for note in members.notes)
    whole = members.dataset.inputs(members.dataset.train)
    left = {x.tobytes() for x in whole[rows]}
    assert sum(x.tobytes() in left for x in members.public[0]) < 5  # equal images apart
    alone = make_federation(
        build(
            {"data": {"public_records": 40}, **SVM, "strategy": {"name": "public"}, "clients": {"count": 3}}
        )
    )
    assert [len(part) for part in alone.parts] == [40]


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(PartitionError, match="public_records = 5000"):
        make_federation(with_data(public_records=5000))
    with pytest.raises(PartitionError, match="folds = 9000"):
        make_federation(with_data(folds=9000))


ADLM = ["trainer.name=adlm", "model.name=class-sums"]
SETTINGS = ["model.name=rbf", "trainer.name=svm"]


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["trainer.name=svm"], ["model.name = 'small-mlp'", "not 'svm'", "'svm' fits rbf"]),
        (["model.name=rbf"], ["model.name = 'rbf'", "'svm', not 'sgd'"]),
        ([*SETTINGS, "privacy.budget_epsilon=1"], ["needs public records", "data.public_records"]),
        ([*SETTINGS, "trainer.frequencies=random"], ["privacy.budget_epsilon is missing"]),
        ([*ADLM, "privacy.budget_epsilon=1"], ["trainer.name = 'adlm' needs public records"]),
        (
            ["data.name=mnist", "data.public_data=digits"],
            ["data.public_data = 'digits'", "is not fitted to public records"],
        ),
        (["data.public_data=digits"], ["data.public_data = 'digits'", "are no images of digits", "mnist"]),
        (["data.public_data=digits", "data.public_records=3"], ["expected one of them"]),
        (
            [*SETTINGS, "data.public_records=9", "strategy.name=dssgd", "strategy.download_fraction=0.5"],
            ["strategy.download_fraction = 0.5", "allowed: 1.0"],
        ),
        ([*ADLM, "data.public_records=9", "trainer.ridge=2.0"], ["trainer.ridge is set", "does not use it"]),
        (
            ["trainer.name=ilm", "model.name=adlm-cnn", "trainer.relevance_epochs=3"],
            ["trainer.relevance_epochs is set", "does not use it"],
        ),
        (
            [*SETTINGS, "data.public_records=9", "trainer.perturb=false", "trainer.noise=gamma"],
            ["trainer.noise = 'gamma'", "adds no noise"],
        ),
        (["data.fold=2"], ["data.fold = 2", "data.folds"]),
        (["data.attributes=5"], ["data.attributes = 5", "adult-numbers"]),
        (["strategy.name=public"], ["strategy.name = 'public'", "expected data.public_records"]),
        (
            ["strategy.name=statistics", *SETTINGS, "trainer.frequencies=random", "privacy.budget_epsilon=1"],
            ["strategy.name = 'statistics'", "svm", "has no statistics"],
        ),
        (
            [*SETTINGS, "trainer.frequencies=random", "privacy.budget_epsilon=1", "trainer.noise=gaussian"],
            ["trainer.noise = 'gaussian'", "with privacy.delta"],
        ),
        (
            [
                *SETTINGS,
                "trainer.frequencies=random",
                "privacy.budget_epsilon=1",
                "trainer.noise=gamma",
                "privacy.noise_source=secure",
            ],
            ["trainer.noise = 'gamma'", "allowed: laplace, gaussian"],
        ),
        (
            [
                *SETTINGS,
                "trainer.frequencies=random",
                "privacy.budget_epsilon=1",
                "privacy.delta=1e-5",
                "privacy.variant=paper",
            ],
            ["privacy.variant = 'paper'", "without trainer.noise and privacy.delta"],
        ),
        (
            ["trainer.name=adlm", "model.name=adlm-cnn", "privacy.budget_epsilon=1"],
            ["privacy.variant = 'proved'", "'paper', which is only claimed"],
        ),
        (
            [
                "trainer.name=adlm",
                "model.name=adlm-cnn",
                "privacy.budget_epsilon=1",
                "privacy.variant=paper",
                "trainer.relevance_share=0.6",
                "trainer.label_share=0.5",
            ],
            ["trainer.relevance_share + trainer.label_share = 1.1", "below 1"],
        ),
        (
            ["trainer.name=ilm", "model.name=adlm-cnn", "trainer.relevance_share=0.2"],
            ["trainer.relevance_share = 0.2"],
        ),
        (
            ["trainer.name=psgd", "privacy.budget_epsilon=1", "privacy.delta=1e-5", "privacy.variant=paper"],
            ["privacy.variant = 'paper'", "has only 'proved'"],
        ),
    ],
)
def test_what_cannot_be_is_told_in_a_line(settings: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        build(override({"name": "x"}, settings))
    text = str(error.value)
    assert all(part in text for part in parts), text
    assert "\n" not in text
