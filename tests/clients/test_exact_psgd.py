"""pSGD with noise from the operating system: exact sums, the noise that was charged, unseeded samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fed_dp.accounting import SampledGaussian
from fed_dp.clients.building import make_trainer
from fed_dp.clients.psgd import Psgd
from fed_dp.clients.psgd import trainer as psgd
from fed_dp.clients.psgd.trainer import ExactOptimizer, PsgdTrainer, drawn
from fed_dp.clients.trainer import ClientData
from fed_dp.data.dataset import DataSet, Records, identity
from fed_dp.experiment.federation import make_federation
from fed_dp.experiment.start import starting_weights
from fed_dp.mechanisms import SecureNoise
from fed_dp.mechanisms.noise import grid
from fed_dp.models import FlatNetwork, NetworkSpec
from tests.conftest import small, some

CLIP = 1.0


def secure(
    inputs: int = 0, classes: int = 2, records: int = 300, **trainer: Any
) -> tuple[PsgdTrainer, ClientData, np.ndarray]:
    """A trainer on digits, or, with a number of inputs, on random records."""
    experiment = small(
        "psgd",
        model={"name": "linear"},
        trainer={"name": "psgd", "sample_rate": 0.25, "clip": CLIP, "learning_rate": 1.0, **trainer},
        privacy={"budget_epsilon": 4.0, "delta": 1e-5, "noise_source": "secure"},
    )
    members = make_federation(experiment)
    if inputs:
        rng = np.random.default_rng(inputs)
        x, y = rng.normal(size=(records, inputs)).astype(np.float32), rng.integers(0, classes, records)
        part = Records(x, y)
        made, _ = make_trainer(experiment, DataSet("random", part, part, classes, *identity()))
        assert isinstance(made, PsgdTrainer)
        return made, ClientData(x, y, 0, 1, experiment.seed), np.zeros(made._net.size, np.float32)
    made, _ = make_trainer(experiment, members.dataset)
    assert isinstance(made, PsgdTrainer)
    x, y = members.client(0)
    return made, ClientData(x, y, 0, 1, experiment.seed), starting_weights(experiment, members)


def sums(made: PsgdTrainer, site: ClientData, rows: np.ndarray) -> np.ndarray:
    """The exact sum, in whole multiples, of the gradients of the sampled records."""
    seen: list[np.ndarray] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psgd, "drawn", lambda records, rate: rows)
        original = SecureNoise.gaussian_on_whole

        def spy(self: SecureNoise, whole: np.ndarray, *, scale: float) -> np.ndarray:
            seen.append(whole.copy())
            return original(self, whole, scale=scale)

        patch.setattr(SecureNoise, "gaussian_on_whole", spy)
        made.fit(np.zeros(made._net.size, np.float32), site, {})
    return seen[0]


def most_moved() -> float:
    """How far one record moves the sum, of many tries, in units of what was charged for: at most 1."""
    worst = 0.0
    for inputs, classes in ((0, 10), (13, 2), (101, 3)):  # in batches, the last two round by place
        made, site, _ = secure(inputs, classes)
        site = ClientData(30 * site.x, site.y, 0, 1, site.seed)  # gradients far beyond the clip
        step = grid(made._release.noise_multiplier * CLIP)
        rows = np.arange(200)
        whole = sums(made, site, rows)
        for gone in (0, 63, 64, 199):
            apart = whole - sums(made, site, np.delete(rows, gone))
            exact = sum(int(v) ** 2 for v in apart)  # without rounding
            worst = max(worst, exact**0.5 * step / CLIP)
    return worst


def test_one_record_moves_the_sum_by_no_more_than_the_clip() -> None:
    assert 0.99 < most_moved() <= 1.0


@pytest.mark.parametrize("factor", some([1.01, 1e6], [1.01]))
def test_it_fails_where_gradients_are_clipped_less(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ExactOptimizer.add

    def add(self: ExactOptimizer) -> None:
        self.max_grad_norm = factor * CLIP
        original(self)

    monkeypatch.setattr(ExactOptimizer, "add", add)
    assert most_moved() > 1.0


def noise_over_charged() -> float:
    """The noise in a step without any record, over what was charged: 1."""
    made, site, weights = secure(sample_rate=1e-9 + 0.25)
    changes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psgd, "drawn", lambda records, rate: np.arange(0))
        for _ in range(20):
            changes.append(made.fit(weights, site, {}).change)
    steps, expected = made._release.steps, made._release.sample_rate * len(site.y)
    deviation = np.std(np.concatenate(changes)) * expected / np.sqrt(steps)
    return float(deviation / (made._release.noise_multiplier * CLIP))


def test_the_noise_is_what_was_charged_and_halving_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert noise_over_charged() == pytest.approx(1, abs=0.03)  # 13,000 draws: 4.8 deviations
    original = SecureNoise.gaussian_on_whole
    monkeypatch.setattr(
        SecureNoise, "gaussian_on_whole", lambda self, whole, *, scale: original(self, whole, scale=scale / 2)
    )
    assert noise_over_charged() != pytest.approx(1, abs=0.03)


def test_what_is_computed_of_a_record_does_not_depend_on_the_others() -> None:
    made, site, _ = secure()
    alone = [sums(made, site, np.array([row])) for row in range(3)]
    together = sums(made, site, np.arange(3))
    assert (np.sum(alone, axis=0) == together).all()
    many = np.arange(69)
    parts = sums(made, site, many[:64]) + sums(made, site, many[64:])
    assert (parts == sums(made, site, many)).all()


def test_the_sum_is_the_one_that_opacus_makes() -> None:
    made, site, _ = secure()
    rows = np.arange(40)
    scale = made._release.noise_multiplier * CLIP
    ours = sums(made, site, rows) * grid(scale)
    network = made._net.network
    made._net.load(np.zeros(made._net.size, np.float32))
    total = torch.zeros(made._net.size)
    for row in rows:  # slowly: each record's gradient by torch alone
        loss = nn.NLLLoss()(network(torch.from_numpy(site.x[[row]])), torch.from_numpy(site.y[[row]]))
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(network.parameters()))])
        total += gradient * min(1.0, CLIP / float(gradient.norm()))
    np.testing.assert_allclose(ours, total.numpy(), rtol=1e-4, atol=1e-5)


def test_samples_come_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [len(drawn(1000, 0.25)) for _ in range(200)]
    assert np.mean(sizes) == pytest.approx(250, abs=5)  # 5 deviations of the mean
    assert np.std(sizes) == pytest.approx((1000 * 0.25 * 0.75) ** 0.5, rel=0.25)
    assert len(drawn(100, 1.0)) == 100
    monkeypatch.setattr(psgd.os, "urandom", lambda count: b"\xff" * count)
    assert len(drawn(1000, 0.999)) == 0
    monkeypatch.setattr(psgd.os, "urandom", lambda count: b"\0" * count)
    assert len(drawn(1000, 1e-9)) == 1000


def test_the_seed_decides_nothing() -> None:
    made, site, weights = secure()
    first, second = (made.fit(weights, site, {}).change for _ in range(2))
    assert not np.array_equal(first, second)


def test_a_record_whose_gradient_is_not_finite_counts_as_nothing() -> None:
    made, site, _ = secure()
    x = site.x.copy()
    x[0] = np.inf
    bad = ClientData(x, site.y, 0, 1, site.seed)
    assert (sums(made, bad, np.array([0])) == 0).all()


# ------------------------------------------------------------------------------------ dropout


def sum_of(trainer: PsgdTrainer, rows: np.ndarray, *, expected: int) -> np.ndarray:
    """What one exact step of a network with dropout releases, as a sum."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(expected, 1, 8, 8)).astype(np.float32)
    y = rng.integers(0, 10, expected)
    weights = rng.normal(size=trainer._net.size).astype(np.float32)
    fit = trainer.fit(weights, ClientData(x[rows], y[rows], 0, 1, 7, expected), {})
    return -fit.change.astype(np.float64) * expected


def with_dropout() -> PsgdTrainer:
    net = FlatNetwork(NetworkSpec.named("cdbn", (1, 8, 8), 10, {}, filters=4, hidden=16))
    config = Psgd(sample_rate=1.0, local_steps=1, learning_rate=1.0, clip=1.0)
    release = SampledGaussian(1e-3, 1.0, 1)
    return PsgdTrainer(config, net, release=release, noise_source="secure", clients_at_once=1)


def test_a_record_that_is_missing_changes_no_other_records_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.urandom", lambda count: b"\1" * count)  # the same masks for every record
    trainer, everybody = with_dropout(), np.arange(30)
    whole = sum_of(trainer, everybody, expected=30)
    for missing in (0, 29):
        rest = sum_of(trainer, np.delete(everybody, missing), expected=30)
        assert np.linalg.norm(whole - rest) <= 1.1  # C, and noise that hides nothing


def test_dropout_at_a_real_site_does_not_follow_from_the_experiments_seed() -> None:
    trainer, everybody = with_dropout(), np.arange(30)
    one, other = (sum_of(trainer, everybody, expected=30) for _ in range(2))
    assert np.linalg.norm(one - other) > 1.1
