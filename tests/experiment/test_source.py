from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fed_dp.errors import ConfigError
from fed_dp.experiment import (
    Experiment,
    build,
    from_run_config,
    load_experiment,
    override,
    profile,
    read_tables,
    shipped,
    to_run_config,
    variants,
)

DSSGD = ["strategy.name=dssgd"]
FOLDER = ["data.name=folder", "data.path=x"]
PRIVATE = ["trainer.name=psgd", "privacy.budget_epsilon=2", "privacy.delta=1e-5"]


SPARSE = [*DSSGD, "strategy.selection=sparse_vector", "privacy.budget_epsilon=1"]
MASK = [*DSSGD, "strategy.selection=random_mask"]
BUDGET = ["privacy.budget_epsilon=1", "privacy.delta=1e-5"]
DPA = ["trainer.name=dpa", "model.name=scattering"]
PCDBN = ["trainer.name=pcdbn", "model.name=patch-filters"]
PAPER = ["trainer.name=dpa", "model.name=auto-encoder", "privacy.budget_epsilon=1"]


def made(*settings: str) -> Experiment:
    return build(override({"name": "x"}, settings))


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["clients.count=0"], ["clients.count = 0", "greater than or equal to 1"]),
        (
            ["clients.cont=3"],
            ["unknown key clients.cont = 3", "did you mean 'count'", "fraction, quorum, cpus, gpus"],
        ),
        (["clients.gpus=1.5"], ["clients.gpus = 1.5", "whole number"]),
        (["surprise=1"], ["unknown key surprise = 1", "allowed: name", "rounds"]),
        (["rounds=2.5"], ["rounds = 2.5", "integer"]),
        (["rounds=many"], ["rounds = 'many'", "integer"]),
        (["seed=-1"], ["seed = -1"]),
        (["trainer.name=magic"], ["trainer.name = 'magic'", "'psgd', 'sgd'"]),
        (["trainer.lr=1"], ["unknown key trainer.lr = 1", "learning_rate"]),
        (["trainer=3"], ["trainer = 3", "a table"]),
        (["data.name=imagenet"], ["data.name = 'imagenet'", "'digits'", "'folder'"]),
        (["model.name=gpt"], ["model.name = 'gpt'", "'small-mlp'"]),
        (["data.partition=random"], ["data.partition.name = 'random'", "'iid'", "'dirichlet'"]),
        (["data.partition=dirichlet", "data.partition.beta=1"], ["unknown key data.partition.beta", "alpha"]),
        (["data.partition=dirichlet", "data.partition.alpha=nan"], ["data.partition.alpha = nan"]),
        (["data.label=y"], ["data.label", "folder"]),
        (["data.name=folder"], ["data.path is missing"]),
        (["data.name=folder", "data.path=x", "data.classes=2"], ["data.bounds is missing"]),
        (["trainer.name=psgd"], ["privacy.budget_epsilon is missing", "'psgd'"]),
        (["privacy.budget_epsilon=1"], ["privacy.budget_epsilon = 1", "'sgd' adds no noise"]),
        (["privacy.delta=1e-5"], ["privacy.delta = 1e-05", "'sgd' adds no noise"]),
        (["privacy.variant=paper"], ["privacy.variant = 'paper'", "'sgd' adds no noise"]),
        (["privacy.noise_source=secure"], ["privacy.noise_source = 'secure'", "'sgd' adds no noise"]),
        (["data.path=/tmp"], ["data.path = '/tmp'", "embedded"]),
        ([*FOLDER, "data.classes=2", "data.bounds=[0, inf]"], ["every input = [0.0, inf]", "within ±1e+30"]),
        ([*FOLDER, "data.classes=2", "data.bounds={a=[2, 1]}"], ["bounds of a = [2.0, 1.0]", "low < high"]),
        ([*FOLDER, "data.bounds=[0, 1]", 'data.classes=["a", "a"]'], ["data.classes = ['a', 'a']", "differ"]),
        ([*PRIVATE, "privacy.budget_epsilon=inf"], ["privacy.budget_epsilon = inf", "less than or equal"]),
        (
            [*PRIVATE, "privacy.delta=1e-12"],
            ["privacy.delta = 1e-12", "greater than or equal to 0.0000000001"],
        ),
        ([*PRIVATE, "privacy.delta=1"], ["privacy.delta = 1", "less than 1"]),
        ([*PRIVATE, "privacy.variant=paper"], ["privacy.variant = 'paper'", "only 'proved'"]),
        (
            [*PRIVATE, "privacy.noise_source=secure", "trainer.gradients=ghost"],
            ["trainer.gradients = 'ghost'", "cannot be made exact"],
        ),
        (["clients.count=3", "clients.quorum=4"], ["clients.quorum = 4", "asks 3 clients"]),
        (["strategy.upload_fraction=0.1"], ["strategy.upload_fraction = 0.1", "only 'dssgd' has it"]),
        (["trainer.clip=1"], ["unknown key trainer.clip = 1", "only 'psgd' has it"]),
        ([*DSSGD, "strategy.exchange=chaos"], ["strategy.exchange = 'chaos'", "'round_robin'"]),
        ([*DSSGD, "strategy.upload_fraction=0"], ["strategy.upload_fraction = 0", "greater than 0"]),
        ([*DSSGD, "strategy.upload_fraction=[0.1, 2]", "clients.count=2"], ["strategy.upload_fraction", "2"]),
        ([*DSSGD, "strategy.download_fraction=[0.1, 0.2]"], ["has 2 numbers", "each of 30 clients"]),
        ([*DSSGD, "strategy.bound=0"], ["strategy.bound = 0", "greater than"]),
        ([*DSSGD, "strategy.bound=nan"], ["strategy.bound = nan"]),
        ([*DSSGD, "strategy.bound=1e-5", "strategy.precision=float16"], ["float16", "0.0001"]),
        (
            [*DSSGD, "strategy.selection=random_with_threshold", "strategy.threshold=1e6"],
            ["strategy.threshold = 1e+06", "1000"],
        ),
        ([*DSSGD, "strategy.threshold=0.1"], ["strategy.threshold is set", "'random_with_threshold'"]),
        ([*DSSGD, "strategy.clip=0.1"], ["strategy.clip is set", "'random_mask'"]),
        ([*DSSGD, "strategy.split=equal"], ["strategy.split is set", "'sparse_vector'"]),
        ([*DSSGD, "strategy.selection=magic"], ["strategy.selection = 'magic'", "'sparse_vector'"]),
        ([*SPARSE], ["strategy.bound is missing", "'sparse_vector' derives its noise from it"]),
        ([*SPARSE, "strategy.bound=1e-5"], ["strategy.threshold = 0.0001", "within ±1e-05"]),
        (
            [*DSSGD, "strategy.selection=sparse_vector"],
            ["privacy.budget_epsilon is missing", "'sparse_vector'"],
        ),
        ([*MASK, "privacy.budget_epsilon=1"], ["privacy.delta is missing", "'random_mask'"]),
        ([*MASK, *BUDGET], ["strategy.clip is missing"]),
        ([*MASK, *BUDGET, "privacy.variant=paper"], ["privacy.variant = 'paper'", "only 'proved'"]),
        ([*MASK, *BUDGET, "privacy.variant=best"], ["privacy.variant = 'best'", "'paper_as_printed'"]),
        (
            [*MASK, *PRIVATE],
            ["strategy.selection = 'random_mask'", "'psgd' adds noise of its own", "costs nothing"],
        ),
        ([*SPARSE, "privacy.variant=paper", "strategy.split=equal"], ["strategy.split = 'equal'", "its own"]),
        ([*DSSGD, "strategy.outdated=0.9"], ["strategy.outdated is set", "'asynchronous'"]),
        (
            [*DSSGD, "strategy.selection=random_with_threshold", "strategy.bound=1e-5"],
            ["strategy.threshold = 0.0001", "within ±1e-05"],
        ),
        (
            [*DSSGD, "strategy.exchange=free_running", "clients.fraction=0.5"],
            ["clients.fraction = 0.5", "1.0"],
        ),
        (["trainer.update_fraction=0"], ["trainer.update_fraction = 0"]),
        (["strategy.name=centralised", "clients.fraction=0.5"], ["clients.fraction = 0.5", "1.0"]),
        (["model.gamma=2"], ["unknown key model.gamma = 2", "only 'private-pca', 'random-features' have it"]),
        (
            ["model.name=scattering", "model.filters=2"],
            ["unknown key model.filters = 2", "'patch-filters' have it", "components, whitening"],
        ),
        (
            ["model.name=scattering"],
            ["model.name = 'scattering'", "'dpa' or 'psgd', not 'sgd'", "scattering-linear"],
        ),
        (["model.name=cdbn"], ["model.name = 'cdbn'", "'pcdbn' or 'psgd', not 'sgd'"]),
        (["strategy.name=statistics"], ["'statistics'", "'sgd' has no statistics", "dpa, ilm, pcdbn"]),
        ([*DPA, "model.name=small-mlp"], ["model.name = 'small-mlp'", "unit-linear", "auto-encoder"]),
        ([*DPA, "model.name=patch-filters"], ["model.name = 'patch-filters'", "'dpa' fits"]),
        ([*DPA], ["privacy.budget_epsilon is missing", "'dpa'"]),
        ([*DPA, *BUDGET, "rounds=1"], ["rounds = 1", "2 stages"]),
        ([*DPA, *BUDGET, "trainer.truncate=false"], ["trainer.truncate is set", "auto-encoder"]),
        ([*DPA, *BUDGET, "trainer.encoder_share=0.5"], ["trainer.encoder_share = 0.5", "less than 0.3"]),
        ([*DPA, *BUDGET, "privacy.variant=paper"], ["privacy.variant = 'paper'", "'scattering'", "'proved'"]),
        ([*DPA, *BUDGET, "trainer.perturb=false"], ["trainer.perturb = false", "no privacy key"]),
        (
            [*DPA, *BUDGET, *DSSGD, "strategy.exchange=free_running"],
            ["strategy.exchange = 'free_running'", "'scattering' learns its encoder", "allowed: parallel, "],
        ),
        (
            [*DPA, *BUDGET, *DSSGD, "strategy.download_fraction=0.5"],
            ["strategy.download_fraction = 0.5", "'scattering' learns its encoder", "allowed: 1.0"],
        ),
        (
            [*PCDBN, *BUDGET, "model.layers=3", "trainer.encoder_share=0.25"],
            ["trainer.encoder_share = 0.25", "4 learnt layers", "below 0.25"],
        ),
        (
            ["trainer.name=pcdbn", "model.name=cdbn", "trainer.approximation=printed", "trainer.degree=3"],
            ["trainer.degree = 3", "'printed' has its own"],
        ),
        (["trainer.name=dpa", "model.name=dpah"], ["data.name = 'digits'", "behaviour", "health-daily"]),
        (
            [*DPA, "model.name=unit-linear", *MASK, *BUDGET],
            ["'random_mask'", "'dpa' adds noise of its own", "trainer.perturb = false"],
        ),
        ([*DPA, "model.components=200000"], ["model.components = 200000", "less than or equal to 10000"]),
        ([*DPA, "trainer.cross=1e200"], ["trainer.cross = 1e+200", "less than or equal to 1000"]),
        ([*DPA, "trainer.approximation=taylor"], ["trainer.approximation", "only 'pcdbn' has it"]),
        ([*PAPER], ["privacy.variant = 'proved'", "only claimed"]),
        ([*PAPER, "privacy.variant=paper", "privacy.delta=1e-5"], ["privacy.delta", "Laplace"]),
        ([*PAPER, "privacy.variant=paper", "trainer.ridge=2"], ["trainer.ridge is set", "scattering"]),
        ([*PAPER, "privacy.variant=paper", "trainer.truncate=false"], ["no finite number of coefficients"]),
        (
            [*PAPER, "privacy.variant=paper_as_printed", "privacy.noise_source=secure"],
            ["is refuted, and for simulation alone"],
        ),
        ([*PAPER, "privacy.variant=paper", "strategy.name=statistics"], ["'auto-encoder' has none"]),
        (
            ["data.influence=false"],
            ["unknown key data.influence", "only 'folder', 'health-daily', 'health-weekly' have it"],
        ),
        (["data.name=health-daily", "data.path=x"], ["data.path", "'health-daily' is embedded"]),
    ],
)
def test_a_mistake_is_one_line_naming_key_value_and_what_is_allowed(
    settings: list[str], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        made(*settings)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_the_model_is_frozen() -> None:
    with pytest.raises(ValidationError):
        made().rounds = 3  # type: ignore[misc]


def test_overrides_read_toml_values_and_fall_back_to_text() -> None:
    experiment = made(
        "rounds=7", "clients.fraction=0.5", "data.partition=shards", "data.partition.per_client=3"
    )
    assert (experiment.rounds, experiment.clients.fraction) == (7, 0.5)
    assert experiment.data.partition.model_dump() == {"name": "shards", "per_client": 3}
    for wrong in ("rounds", "=3", "a..b=1"):
        with pytest.raises(ConfigError, match="KEY=VALUE"):
            override({}, [wrong])


def test_another_trainer_drops_the_old_ones_own_keys() -> None:
    base = {"name": "x", "trainer": {"name": "sgd", "batch_size": 8}}
    assert build(override(base, PRIVATE)).trainer.name == "psgd"


def test_the_digest_names_what_decides_the_result() -> None:
    same = made().digest
    assert made("name=other", "description=words", "clients.cpus=2", "ray.address=auto").digest == same
    different = [
        "seed=1",
        "rounds=3",
        "clients.count=5",
        "trainer.learning_rate=0.3",
        "data.partition=shards",
    ]
    digests = {made(setting).digest for setting in different}
    assert len(digests | {same}) == len(different) + 1


def test_an_experiment_survives_flowers_run_config_and_toml(tmp_path: Path) -> None:
    import tomli_w

    experiment = made(*PRIVATE, "data.partition=dirichlet")
    assert from_run_config(to_run_config(experiment)) == experiment
    path = tmp_path / "my own again.toml"
    path.write_text(tomli_w.dumps(experiment.tables()))
    assert load_experiment(path) == experiment
    path.write_text(path.read_text().replace('name = "x"', "", 1))
    assert load_experiment(path).name == "my-own-again"
    config = {"experiment": str(path), "set": "rounds=3 seed=9", "experiment-json": ""}
    assert from_run_config(config).rounds == 3


@pytest.mark.parametrize("name", list(shipped()))
def test_every_shipped_experiment_is_valid(name: str) -> None:
    whole = read_tables(name)
    for wanted in whole.get("profiles", [None]):
        for variant, tables in variants(profile(whole, wanted)).items():
            assert build(tables, where=variant).description


def test_variants_are_laid_over_the_base() -> None:
    tables: dict[str, Any] = {"name": "x", "rounds": 2, "variants": {"a": {}, "b": {"rounds": 5}}}
    found = {name: build(t) for name, t in variants(tables).items()}
    assert {name: (e.name, e.rounds) for name, e in found.items()} == {"a": ("x-a", 2), "b": ("x-b", 5)}
    with pytest.raises(ConfigError, match="expected tables"):
        variants({"name": "x", "variants": {"a": 3}})


def test_unknown_files_names_and_variants_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"shipped: .*digits"):
        load_experiment("no-such-thing")
    with pytest.raises(ConfigError, match="has variants"):
        load_experiment("digits")
    with pytest.raises(ConfigError, match="no variant 'x'; has: centralised"):
        load_experiment("digits:x")
    broken = tmp_path / "broken.toml"
    broken.write_text("rounds = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_experiment(broken)


def test_a_profile_is_laid_over_the_whole_file() -> None:
    tables: dict[str, Any] = {
        "name": "x",
        "rounds": 2,
        "variants": {"a": {"seed": 1}},
        "profiles": {
            "quick": {"rounds": 3},
            "full": {"rounds": 50, "variants": {"a": {"seed": 7}, "b": {"seed": 2}}},
        },
    }
    quick, full = profile(tables), profile(tables, "full")
    assert quick == profile(tables, "quick")
    assert [(e.name, e.rounds, e.seed) for e in map(build, variants(quick).values())] == [("x-quick-a", 3, 1)]
    assert [(e.name, e.rounds, e.seed) for e in map(build, variants(full).values())] == [
        ("x-full-a", 50, 7),
        ("x-full-b", 50, 2),
    ]
    with pytest.raises(ConfigError, match="'x' has no profile 'huge'; has: quick, full"):
        profile(tables, "huge")
    with pytest.raises(ConfigError, match="has no profile 'full'; has none"):
        profile({"name": "y"}, "full")
    with pytest.raises(ConfigError, match=r"as in \[profiles.NAME\]"):
        profile({"name": "y", "profiles": {"quick": 3}})
