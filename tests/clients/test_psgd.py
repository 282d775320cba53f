"""pSGD's noise, clipping and sampling, measured; each check fails on a weakened trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fed_dp.accounting import SampledGaussian, composition, noise_multiplier
from fed_dp.clients.psgd import Psgd
from fed_dp.clients.psgd import batch as psgd_batch
from fed_dp.clients.psgd import trainer as psgd
from fed_dp.clients.psgd.trainer import PsgdTrainer
from fed_dp.clients.trainer import ClientData
from fed_dp.errors import ModelError, PrivacyError
from fed_dp.experiment import Experiment, plan
from fed_dp.experiment.schema import Privacy
from fed_dp.models import FlatNetwork, initial_weights
from fed_dp.models.perceptrons import square_norms
from tests.networks import network

BUDGET, DELTA, ROUNDS = 4.0, 1e-5, 3
RECORDS = 40
Patch = Callable[[pytest.MonkeyPatch], None]


def config(**changes: Any) -> Psgd:
    return Psgd(**{"name": "psgd", "learning_rate": 1.0, "sample_rate": 0.25, "clip": 0.5, **changes})


def site(turn: int = 1, *, x: np.ndarray | None = None, seed: int = 0) -> ClientData:
    rng = np.random.default_rng(5)
    inputs = rng.normal(size=(RECORDS, 64)).astype(np.float32) if x is None else x
    return ClientData(inputs, rng.integers(0, 10, len(inputs)), 0, turn, seed)


def trainer(settings: Psgd, model: str = "small-mlp") -> PsgdTrainer:
    return PsgdTrainer(settings, FlatNetwork(network(model, (64,), 10)), release=agreed(settings))


def agreed(settings: Psgd) -> SampledGaussian:
    privacy = Privacy(budget_epsilon=BUDGET, delta=DELTA)
    experiment = Experiment(rounds=ROUNDS, trainer=settings, privacy=privacy)
    found = plan.release_plan(experiment, client=0, size=1)
    assert found is not None
    assert isinstance(found.release, SampledGaussian)
    return found.release


def sigma(settings: Psgd) -> float:
    steps = ROUNDS * settings.steps_per_round
    return noise_multiplier(epsilon=BUDGET, delta=DELTA, sample_rate=settings.sample_rate, steps=steps)


# ------------------------------------------------------------------------------- the noise


def check_noise(gradients: str) -> None:
    """With gradients that vanish, the change is the sum of the steps' noise, N(0, (lr σC/(qn))²) each."""
    settings = config(gradients=gradients, learning_rate=1e-6)
    one = trainer(settings)
    weights = np.zeros(one._net.size, np.float32)
    draws = [
        one.fit(weights, site(1, x=np.zeros((RECORDS, 64), np.float32), seed=s), {}).change for s in range(20)
    ]
    first_layer = np.concatenate([draw[:2048] for draw in draws])  # zero inputs: no gradient there
    expected = (
        settings.learning_rate * sigma(settings) * settings.clip / (settings.sample_rate * RECORDS)
    ) * np.sqrt(settings.steps_per_round)
    assert first_layer.std() == pytest.approx(expected, rel=0.02)
    assert abs(first_layer.mean()) < 4 * expected / np.sqrt(first_layer.size)


def halve_the_noise(patch: pytest.MonkeyPatch) -> None:
    original = noise_multiplier
    patch.setattr(composition, "noise_multiplier", lambda **arguments: original(**arguments) / 2)


def calibrate_for_one_round(patch: pytest.MonkeyPatch) -> None:
    original = noise_multiplier
    patch.setattr(
        composition, "noise_multiplier", lambda **a: original(**{**a, "steps": a["steps"] // ROUNDS})
    )


@pytest.mark.statistical
@pytest.mark.parametrize("gradients", ["auto", "hooks", "ghost", "vmap"])
def test_the_noise_has_the_calibrated_size(gradients: str) -> None:
    check_noise(gradients)


@pytest.mark.statistical
@pytest.mark.parametrize("weaken", [halve_the_noise, calibrate_for_one_round])
def test_the_noise_check_fails_on_weakened_trainers(weaken: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    weaken(monkeypatch)
    for gradients in ("hooks", "auto"):
        with pytest.raises(AssertionError):
            check_noise(gradients)


# ------------------------------------------------------------------------------ the clipping


def check_clipping(gradients: str, clip: float = 0.5) -> None:
    """Almost without noise, one record moves one step's sum by at most the clip; a large one by just that."""
    settings = config(gradients=gradients, sample_rate=1.0)
    big = 100 * np.ones((2, 64), np.float32)
    changes = []
    for records in (2, 1):
        one = trainer(settings)
        x = big[:records]
        labels = np.zeros(records, np.int64)
        fit = one.fit(np.full(one._net.size, 0.01, np.float32), ClientData(x, labels, 0, 1, 0), {})
        changes.append(fit.change * records)  # undo the division by the expected batch size
    moved = float(np.linalg.norm(changes[0] - changes[1]))
    assert moved <= clip * 1.15  # the noise that is left adds a little
    assert moved > clip * 0.95


def without_noise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(composition, "noise_multiplier", lambda **_: 1e-3)


@pytest.mark.parametrize("gradients", ["auto", "hooks", "ghost", "vmap"])
def test_one_record_moves_a_step_by_at_most_the_clip(gradients: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_noise(monkeypatch)
    check_clipping(gradients)


def test_the_clipping_check_fails_when_the_clip_is_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    without_noise(monkeypatch)
    original = psgd.DPOptimizer
    monkeypatch.setattr(
        psgd, "DPOptimizer", lambda *a, **k: original(*a, **{**k, "max_grad_norm": 2 * k["max_grad_norm"]})
    )
    with pytest.raises(AssertionError):
        check_clipping("hooks")


def test_the_clipping_check_fails_when_norms_are_told_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    without_noise(monkeypatch)
    monkeypatch.setattr(psgd_batch, "square_norms", lambda c, v, p: square_norms(c, v, p) / 4)
    with pytest.raises(AssertionError):
        check_clipping("auto")


def test_ghost_clipping_gives_the_same_change_as_per_record_gradients() -> None:
    fits = [trainer(config(gradients=g), "dssgd-mlp") for g in ("hooks", "ghost")]
    start = fits[0]._net.weights()
    one, other = (t.fit(start, site(), {}).change for t in fits)
    assert np.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("gradients", ["hooks", "vmap"])
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("small-cnn", (1, 8, 8)),
        ("patch-cnn", (1, 8, 8)),
        ("dssgd-mlp", (1, 8, 8)),
        ("dssgd-cnn-mnist", (1, 32, 32)),
        ("dssgd-cnn-svhn", (3, 32, 32)),
    ],
)
def test_each_records_gradient_is_its_own(
    model: str, shape: tuple[int, ...], gradients: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opacus' convolutions, given images whose memory is ordered by pixel, mix up the weights' gradients."""
    net = FlatNetwork(network(model, shape, 10))
    net.load(initial_weights(network(model, shape, 10), seed=1))
    x = np.random.default_rng(1).normal(size=(3, *shape)).astype(np.float32)
    labels = np.array([3, 0, 9])
    truth = [
        torch.autograd.grad(nn.functional.nll_loss(net.network(torch.from_numpy(x[[i]])), y), net.parameters)
        for i, y in enumerate(torch.from_numpy(labels)[:, None])
    ]
    seen: list[list[torch.Tensor]] = []
    original = psgd.DPOptimizer.clip_and_accumulate

    def spy(optimizer: Any) -> None:
        seen.append([g.clone() for g in optimizer.grad_samples])
        original(optimizer)

    monkeypatch.setattr(psgd.DPOptimizer, "clip_and_accumulate", spy)
    settings = config(gradients=gradients, sample_rate=1.0)
    PsgdTrainer(settings, net, release=agreed(settings)).fit(
        net.weights(), ClientData(x, labels, 0, 1, 0), {}
    )
    for found, expected in zip(seen[0], zip(*truth, strict=True), strict=True):
        largest = float(torch.stack(expected).abs().max())
        assert torch.allclose(found, torch.stack(expected), rtol=0, atol=1e-3 * largest)


# --------------------------------------------------------------------- sampling and odd cases


def test_batches_are_poisson_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = psgd_batch.UniformWithReplacementSampler.__iter__

    def spy(self: Any) -> Any:
        for rows in original(self):
            assert len(set(rows)) == len(rows)
            sizes.append(len(rows))
            yield rows

    monkeypatch.setattr(psgd_batch.UniformWithReplacementSampler, "__iter__", spy)
    one = trainer(config(sample_rate=0.05, local_epochs=10))
    one.fit(one._net.weights(), site(), {})
    assert len(sizes) == one._config.steps_per_round == 200
    assert np.mean(sizes) == pytest.approx(2, abs=0.4)
    assert 0 in sizes  # an empty batch is a step of noise alone
    assert len(set(sizes)) > 3


@pytest.mark.parametrize("gradients", ["auto", "hooks", "ghost", "vmap"])
def test_a_site_with_a_single_record_can_train(gradients: str) -> None:
    one = trainer(config(gradients=gradients, sample_rate=0.1))
    fit = one.fit(one._net.weights(), site(x=np.ones((1, 64), np.float32)), {})
    assert np.isfinite(fit.change).all()


def test_a_layer_that_mixes_records_is_refused_by_name() -> None:
    net = FlatNetwork(network("small-mlp", (64,), 10))
    net.network = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    with pytest.raises(ModelError, match=r"cannot be trained by 'psgd'.*BatchNorm"):
        PsgdTrainer(config(), net, release=agreed(config()))


def test_the_gradient_method_is_chosen_by_network() -> None:
    def method(model: str, shape: tuple[int, ...], together: int | None = 1) -> tuple[str, bool]:
        net = FlatNetwork(network(model, shape, 10))
        one = PsgdTrainer(config(), net, release=agreed(config()), clients_at_once=together)
        return one._gradients, one._chain is not None

    assert method("dssgd-mlp", (1, 32, 32)) == ("ghost", False)
    assert method("small-mlp", (1, 8, 8)) == ("hooks", False)
    assert method("dssgd-mlp", (1, 32, 32), None)[1]
    assert method("dssgd-cnn-mnist", (1, 32, 32), None) == ("vmap", False)
    assert method("small-cnn", (1, 8, 8), None) == ("hooks", False)
    assert method("small-cnn", (1, 28, 28), None) == ("vmap", False)
    with pytest.raises(
        ModelError, match=r"clients.together = 8.*'small-cnn' is trained alone; allowed: 'auto', 1"
    ):
        method("small-cnn", (1, 28, 28), 8)


def test_torch_s_own_generator_is_left_alone() -> None:
    one = trainer(config())
    before = torch.random.get_rng_state()
    one.fit(np.zeros(one._net.size, np.float32), site(), {})
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("gradients", ["auto", "hooks", "ghost", "vmap"])
def test_a_fit_that_took_other_steps_than_were_charged_is_not_sent(gradients: str) -> None:
    """Opacus counts them; the charge is what the ledger holds."""
    settings = config(gradients=gradients)  # four steps at q = ¼
    for charged in (SampledGaussian(1.0, 0.25, 3), SampledGaussian(1.0, 0.5, 4)):
        net = FlatNetwork(network("small-mlp", (64,), 10))
        wrong = PsgdTrainer(settings, net, release=charged)
        with pytest.raises(PrivacyError, match=r"Opacus counted .* was charged; nothing was sent"):
            wrong.fit(np.zeros(net.size, np.float32), site(), {})
