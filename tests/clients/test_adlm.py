"""AdLM and ILM as printed: which noise goes where, once; and what of it is the released program's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fed_dp.clients.adlm.trainer import RELEVANCE, AdlmTrainer
from fed_dp.clients.building import make_trainer
from fed_dp.clients.trainer import ClientData
from fed_dp.experiment import build
from fed_dp.experiment.federation import make_federation
from fed_dp.experiment.start import starting_weights
from fed_dp.mechanisms.functional import first_layer_sensitivity, head_sensitivity, relevance_sensitivity
from fed_dp.models import Vector
from fed_dp.models.paper import AdlmCnn, to_unit_interval
from tests.networks import network

EPOCHS: dict[str, dict[str, int]] = {"adlm": {"relevance_epochs": 1}, "ilm": {}}


def ready(trainer: str = "adlm", variant: str = "paper") -> tuple[AdlmTrainer, Vector, ClientData]:
    given = build(
        {
            "clients": {"count": 4},
            "model": {"name": "adlm-cnn", "filters": 2},
            "trainer": {"name": trainer, **EPOCHS[trainer], "batch_size": 50},
            "privacy": {"budget_epsilon": 3.0, "variant": variant},
        }
    )
    members = make_federation(given)
    made, _ = make_trainer(given, members.dataset)
    assert isinstance(made, AdlmTrainer)
    return made, starting_weights(given, members), ClientData(*members.client(0), 0, 1, given.seed)


def noisy(
    trainer: AdlmTrainer, site: ClientData, beta: np.ndarray | None = None
) -> tuple[float, np.ndarray, np.ndarray]:
    """The noise of the bias, of the inputs, and of the labels' coefficients."""
    inputs = to_unit_interval(torch.from_numpy(site.x))
    kept = {} if beta is None else {RELEVANCE: beta.tolist()}
    bias, moved, linear, _ = trainer._noisy(site, inputs, kept)
    target = torch.nn.functional.one_hot(torch.from_numpy(site.y), 10).float()
    return bias - 1, (moved - inputs).flatten(1).double().numpy(), (linear - 0.5 + target).double().numpy()


def test_the_papers_networks_and_numbers() -> None:
    mnist, cifar = network("adlm-cnn", (1, 28, 28), 10).build(), network("adlm-cnn", (3, 32, 32), 10).build()
    assert isinstance(mnist, AdlmCnn)
    assert isinstance(cifar, AdlmCnn)
    shapes = [
        [tuple(p.shape) for p in each.parameters() if p.dim() > 1] for each in (mnist, cifar)
    ]  # the weights
    assert shapes[0] == [(32, 1, 5, 5), (64, 32, 5, 5), (25, 64 * 49), (10, 25)]
    assert shapes[1] == [(128, 3, 3, 3), (128, 128, 5, 5), (256, 128, 5, 5), (30, 256 * 16), (10, 30)]
    assert mnist.first == 32 * 28 * 28
    assert first_layer_sensitivity(mnist.first, 784) / (1800 * 0.3) == pytest.approx(72_848, rel=1e-4)
    assert head_sensitivity(25, 10) == 10 * (25 + 25**2 / 4)
    # A changed label moves two of a record's coefficients by 1 each: what that costs, of ε3.
    assert 2 * 1800 / head_sensitivity(25, 10) == pytest.approx(1.99, abs=0.005)
    assert 2 * 7200 / head_sensitivity(30, 10) == pytest.approx(5.65, abs=0.005)
    assert relevance_sensitivity(784, 60_000) == pytest.approx(2 * 784 / 60_000)
    with torch.no_grad():
        hidden = mnist.encoder(torch.rand(4, 1, 28, 28) * 50)
    assert 0 <= float(hidden.min()) <= float(hidden.max()) <= 1  # normalised


def test_inputs_get_noise_by_their_share_of_epsilon() -> None:
    trainer, _, site = ready()
    beta = np.ones(64)
    beta[:32], beta[32:] = 1.5, 0.5
    _, moved, labels = noisy(trainer, site, beta)
    layer = first_layer_sensitivity(2 * 64, 64)
    for part, share in ((moved[:, :32], 1.5), (moved[:, 32:], 0.5)):
        assert part.std() == pytest.approx(np.sqrt(2) * layer / (50 * share * 1.0), rel=0.05)
    assert labels.std() == pytest.approx(np.sqrt(2) * head_sensitivity(25, 10) / (50 * 1.0), rel=0.05)
    equal, _, site = ready("ilm")  # ε2 = ε3 = half of the budget
    _, moved, _ = noisy(equal, site)
    assert moved.std() == pytest.approx(np.sqrt(2) * layer / (50 * 1.5), rel=0.05)


def test_noise_is_drawn_once_for_a_site() -> None:
    trainer, _, site = ready()
    first = noisy(trainer, site)[1]
    assert np.array_equal(first, noisy(trainer, replace(site, server_round=7))[1])
    assert not np.array_equal(first, noisy(trainer, replace(site, client=1))[1])
    assert len(np.unique(first[:, 0])) == len(first)  # of every record its own


def test_as_released_the_difference_of_two_records_is_exact() -> None:
    trainer, _, site = ready(variant="paper_as_released")
    _, moved, _ = noisy(trainer, site)
    assert np.ptp(moved, axis=0).max() < 1e-6 * np.abs(moved).max()  # but for the rounding of float32


def test_relevance_is_kept_at_the_site_and_never_sent() -> None:
    trainer, weights, site = ready()
    fit = trainer.fit(weights, site, {})
    assert not fit.metrics
    beta = np.asarray(fit.state[RELEVANCE])
    assert beta.shape == (64,)
    assert beta.mean() == pytest.approx(1)
    assert (beta > 0).all()
    again = trainer.fit(weights, replace(site, server_round=2), fit.state)
    assert again.state[RELEVANCE] == fit.state[RELEVANCE]
    assert RELEVANCE not in ready("ilm")[0].fit(weights, site, {}).state
