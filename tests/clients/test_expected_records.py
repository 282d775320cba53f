"""What a site sends does not tell how many records it has where the divisor is declared; else n is public."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fed_dp.accounting import SampledGaussian, guarantees
from fed_dp.clients.building import make_trainer
from fed_dp.clients.psgd import Psgd
from fed_dp.clients.psgd.trainer import PsgdTrainer
from fed_dp.clients.trainer import ClientData, StagedTrainer
from fed_dp.errors import ConfigError
from fed_dp.experiment import Experiment, build
from fed_dp.experiment.federation import make_federation
from fed_dp.experiment.plan import guarantee_of, release_plan
from fed_dp.experiment.start import starting_weights
from fed_dp.mechanisms import SecureNoise, SimulationNoise
from fed_dp.models import FlatNetwork
from tests.conftest import small
from tests.networks import network

RECORDS, DECLARED = 48, 100
LOUD = SampledGaussian(1e5, 1.0, 1)  # beside which what records add is nothing


def psgd(records: int, *, declared: int, gradients: str, source: str) -> float:
    """How large the noise is in what a site sends that has so many records."""
    config = Psgd(name="psgd", sample_rate=1.0, clip=0.01, gradients=gradients)  # type: ignore[arg-type]
    net = FlatNetwork(network("small-mlp", (64,), 10))
    trainer = PsgdTrainer(config, net, release=LOUD, noise_source=source)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(records, 64)).astype(np.float32), rng.integers(0, 10, records)
    site = ClientData(x, y, 0, 1, 3, expected_records=declared)
    return float(np.linalg.norm(trainer.fit(np.zeros(net.size, np.float32), site, {}).change))


PATHS = [("auto", "simulation"), ("hooks", "simulation"), ("ghost", "simulation"), ("vmap", "simulation")]


@pytest.mark.parametrize(("gradients", "source"), [*PATHS, ("auto", "secure")])
def test_one_record_more_does_not_change_the_size_of_psgds_noise(
    gradients: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site's n = 48 was told from 49 with an advantage of .96 in one step, by how large the noise was."""

    def same_for_all(_: SecureNoise, whole: np.ndarray, *, scale: float) -> np.ndarray:
        return np.full(whole.shape, scale)

    monkeypatch.setattr(SecureNoise, "gaussian_on_whole", same_for_all)
    sizes = [
        psgd(records, declared=DECLARED, gradients=gradients, source=source)
        for records in (RECORDS, RECORDS + 1)
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-4)
    told = [psgd(records, declared=0, gradients=gradients, source=source) for records in (48, 49)]
    assert told[0] / told[1] == pytest.approx(49 / 48, rel=1e-4)  # where n is public, it is told


RELEASING: dict[str, dict[str, Any]] = {
    "statistics": {"model": {"name": "unit-linear"}, "trainer": {"name": "dpa"}},
    "moments": {"model": {"name": "private-pca", "components": 12}, "trainer": {"name": "dpa"}},
    "class sums": {
        "model": {"name": "class-sums"},
        "trainer": {"name": "adlm"},
        "data": {"public_records": 50},
    },
    "svm": {"model": {"name": "rbf", "features": 20}, "trainer": {"name": "svm", "frequencies": "random"}},
}


@pytest.mark.parametrize("kind", RELEASING)
def test_one_record_more_does_not_change_the_size_of_a_statistics_noise(kind: str) -> None:
    given = small(privacy={"budget_epsilon": 1e-6}, rounds=3, **RELEASING[kind])
    members = make_federation(given)
    trainer, _ = make_trainer(given, members.dataset)
    assert isinstance(trainer, StagedTrainer)
    weights = starting_weights(given, members)
    x, y = members.client(0)

    def size(records: int, declared: int) -> float:
        site = ClientData(x[:records], y[:records], 0, 1, 3, expected_records=declared)
        limit = np.inf  # what a message may hold hides how large noise of ε = 1e-6 is

        def clip(values: np.ndarray, *_: Any) -> np.ndarray:
            return np.minimum(values, limit)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"{type(trainer).__module__}.MAX_ABS_VALUE", 1e30)
            return float(
                np.linalg.norm(trainer.release(weights, site, 1, SimulationNoise(np.random.default_rng(0))))
            )

    assert size(RECORDS, DECLARED) == pytest.approx(size(RECORDS + 1, DECLARED), rel=1e-3)
    assert size(48, 0) / size(49, 0) == pytest.approx(49 / 48, rel=1e-3)


def private(**changes: Any) -> Experiment:
    return small("psgd", **changes)


def test_the_guarantee_names_what_it_protects() -> None:
    found = {}
    for name, changes in {"psgd": {}, "declared": {"data": {"expected_records": 300}}}.items():
        experiment = private(**changes)
        said, agreed = guarantee_of(experiment), release_plan(experiment, client=0, size=9)
        assert said is not None
        assert agreed is not None
        assert agreed.guarantee == said.name
        found[name] = said
    assert found["psgd"].neighbours == "zero-out one"
    assert any("number of records of each site is public" in words for words in found["psgd"].assumptions)
    assert found["declared"].neighbours == "add/remove one"
    assert not any("of each site is public" in words for words in found["declared"].assumptions)
    assert guarantees()["random_mask"].unit == "participant"
    assert not any("number of records" in words for words in guarantees()["random_mask"].assumptions)


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"data": {"expected_records": 5}}, "nothing is divided by it"),
        ({"data": {"expected_records": 0}, "trainer": {"name": "psgd"}}, "greater than or equal to 1"),
        (
            {"data": {"expected_records": [5, 6]}, "trainer": {"name": "psgd"}},
            r"\[5, 6\]: expected one number",
        ),
        (
            {
                "data": {"expected_records": 5},
                "model": {"name": "auto-encoder"},
                "trainer": {"name": "dpa"},
                "privacy": {"budget_epsilon": 1.0, "variant": "paper"},
            },
            "nothing is divided by it",
        ),
    ],
)
def test_a_number_that_means_nothing_is_refused(tables: dict[str, Any], says: str) -> None:
    privacy = {} if "trainer" not in tables else {"privacy": {"budget_epsilon": 1.0, "delta": 1e-5}}
    with pytest.raises(ConfigError, match=says):
        build({**privacy, **tables})


def test_each_client_may_have_a_number_of_its_own() -> None:
    experiment = private(data={"expected_records": [100, 200, 300, 400]})
    assert [experiment.data.expected(k) for k in range(4)] == [100, 200, 300, 400]
    assert private(data={"expected_records": 70}).data.expected(3) == 70
    assert private().data.expected(0) is None


def test_a_federation_with_declared_numbers_learns_and_tells_nobody_the_true_ones(
    run: Callable[..., dict[str, Any]],
) -> None:
    summary = run(private(data={"expected_records": 300}, rounds=3))
    cost = summary["privacy"]
    assert cost["neighbours"] == "add/remove one"
    assert cost["guarantee"] == "proved"
    assert summary["accuracy"]["best"] > 0.2


@pytest.fixture
def run(tmp_path: Any) -> Callable[..., dict[str, Any]]:
    from fed_dp.server.observers import Silent
    from fed_dp.simulations.runner import simulate

    def once(experiment: Experiment) -> dict[str, Any]:
        return simulate(experiment, observer=Silent(), engine="in-process", folder=tmp_path / "run")[1]

    return once
