"""AdLM and ILM as printed: which noise goes where, once; and what of it is the released program's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fed_dp.clients.adlm.perturbed import INPUT_LIMIT, ReleasedRecords
from fed_dp.clients.adlm.trainer import RELEVANCE, AdlmTrainer
from fed_dp.clients.building import make_trainer
from fed_dp.clients.trainer import ClientData
from fed_dp.experiment import build
from fed_dp.experiment.federation import make_federation
from fed_dp.experiment.start import starting_weights
from fed_dp.mechanisms import SimulationNoise
from fed_dp.mechanisms.functional import (
    first_layer_sensitivity,
    head_sensitivity,
    released_first_layer_sensitivity,
    relevance_sensitivity,
)
from fed_dp.models import Vector
from fed_dp.models.adlm import AdlmCnn, BatchNormalisation, MeanVariance, MinMax
from fed_dp.models.paper import to_unit_interval
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
    found = trainer._records(site, inputs, kept, trainer._seeded(site)["once"])
    moved = found.batch(torch.arange(len(inputs))) - inputs
    target = torch.nn.functional.one_hot(torch.from_numpy(site.y), 10).float()
    labels = (found.linear - 0.5 + target).double().numpy()
    return found.bias - 1, moved.flatten(1).double().numpy(), labels


def released(site: ClientData, trainer: AdlmTrainer, beta: np.ndarray | None = None) -> ReleasedRecords:
    """What the released program sees of a site."""
    kept = {} if beta is None else {RELEVANCE: beta.tolist()}
    found = trainer._records(
        site, to_unit_interval(torch.from_numpy(site.x)), kept, trainer._seeded(site)["once"]
    )
    assert isinstance(found, ReleasedRecords)
    return found


def test_the_papers_networks_and_numbers() -> None:
    mnist, cifar = network("adlm-cnn", (1, 28, 28), 10).build(), network("adlm-cnn", (3, 32, 32), 10).build()
    assert isinstance(mnist, AdlmCnn)
    assert isinstance(cifar, AdlmCnn)
    shapes = [
        [tuple(p.shape) for p in each.parameters() if p.dim() > 1 and p.requires_grad]
        for each in (mnist, cifar)
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
        maps = mnist.encoder[:3](torch.rand(4, 1, 28, 28) * 50)  # Eq. 22
        hidden = mnist.encoder(torch.rand(4, 1, 28, 28) * 50)
    assert 0 <= float(maps.min()) < float(maps.max()) <= 1
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
    assert np.array_equal(first, noisy(trainer, site)[1])
    assert not np.array_equal(first, noisy(trainer, replace(site, client=1))[1])
    assert len(np.unique(first[:, 0])) == len(first)  # of every record its own


def test_as_released_one_image_is_shared_by_a_step_and_another_is_drawn_for_the_next() -> None:
    trainer, _, site = ready(variant="paper_as_released")
    given, rows = released(site, trainer), torch.arange(len(site.y))
    first, second = ((given.batch(rows) - given.inputs).flatten(1) for _ in range(2))
    for moved in (first, second):
        whole = (moved + given.inputs.flatten(1)).abs().amax(0) < INPUT_LIMIT
        assert 0 < int(whole.sum()) < 64  # the rest was cut off
        assert (
            float((moved.amax(0) - moved.amin(0))[whole].max()) < 1e-5
        )  # the difference of records is exact
    assert not torch.equal(first, second)
    again = released(replace(site, server_round=2), trainer)
    assert not torch.equal(again.batch(rows), given.inputs + first.reshape(given.inputs.shape))
    assert again.on_head is not None
    assert torch.equal(again.on_head, given.on_head)  # drawn once
    assert given.bias == 1.0


def test_as_released_noise_has_the_programs_sizes() -> None:
    assert released_first_layer_sensitivity(1, 28, 28, side=5) == 2 * 14 * 14 * 25
    assert released_first_layer_sensitivity(3, 20, 20, side=3) == 3 * 2 * 10 * 10 * 9
    trainer, _, site = ready(variant="paper_as_released")
    beta = np.ones(64)
    beta[:32], beta[32:] = 1.5, 0.5
    given = released(site, trainer, beta)  # ε = 3 in three equal parts, |L| = 50
    assert given.scale == pytest.approx(2 * 4 * 4 * 25 / (50 * 1.0 * beta))
    assert given.on_head is not None
    assert given.on_head.abs().mean() == pytest.approx(head_sensitivity(25, 10) / 50, rel=0.15)
    zero = torch.zeros(len(site.y), 10)
    added = given.loss(zero, torch.arange(len(site.y)), torch.ones(10, 25))
    assert float(added) == pytest.approx(-10 * float(given.on_head.sum()), rel=1e-5)  # per output


def test_a_fully_connected_layer_is_normalised_by_the_batchs_own_bounds() -> None:
    """AdLM, before Eq. 22: every unit reaches 0 and 1 in a batch, so that records depend on one another."""
    torch.manual_seed(0)
    layer, x = MinMax(3), torch.randn(20, 3) * 100
    found = layer(x)
    assert torch.equal(found.amin(0), torch.zeros(3))
    assert found.amax(0) == pytest.approx(torch.ones(3))
    spread = x.amax(0) - x.amin(0)
    assert found * spread + x.amin(0) == pytest.approx(x, abs=1e-3)
    assert torch.equal(layer(torch.ones(4, 3)), torch.zeros(4, 3))  # all alike
    moved = x.clone()
    moved[0] = 1e4
    assert float((layer(moved)[1:] - found[1:]).abs().max()) > 0.5  # one record moves all the others
    layer.keep(x)
    layer.eval()
    assert layer(x) == pytest.approx(found)
    assert torch.equal(layer(moved)[1:], layer(x)[1:])
    assert float(layer(moved).max()) <= 1


def test_the_released_network_has_batch_normalisation_and_a_learnt_intercept() -> None:
    net = network("adlm-cnn", (1, 28, 28), 10, {"released": True}).build()
    assert isinstance(net, AdlmCnn)
    kinds = [type(part).__name__ for part in net.encoder]
    assert kinds == [
        *["Conv2d", "ReLU", "MaxPool2d"] * 2,
        "Flatten",
        "Linear",
        "MeanVariance",
        "ReLU",
        "Hardtanh",
    ]
    assert net.head.bias is not None
    torch.manual_seed(0)
    layer, x = MeanVariance(2), torch.randn(100, 2) * 5 + 3
    expected = torch.nn.functional.batch_norm(x, None, None, training=True, eps=1e-3)
    assert layer(x).detach() == pytest.approx(expected, abs=1e-5)


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


def test_as_released_relevance_is_a_mean_to_the_fourth_power_and_floored() -> None:
    trainer, weights, site = ready(variant="paper_as_released")
    beta = np.asarray(trainer.fit(weights, site, {}).state[RELEVANCE])
    assert beta.shape == (64,)
    assert beta.mean() == pytest.approx(1, abs=1e-3)
    assert beta.min() == pytest.approx(1e-5, rel=10)  # an input whose noisy relevance is negative
    inputs = to_unit_interval(torch.from_numpy(site.x))
    rows = torch.arange(len(site.y))
    trainer._train_without_noise(weights, site, inputs)
    mean = trainer._relevances(site, inputs, rows).double().mean(0).numpy()
    wanted = ((mean - mean.min()) / np.ptp(mean)) ** 4
    drawn = trainer._released_shares(site, inputs, SimulationNoise(np.random.default_rng(0)), 1e9)
    assert drawn == pytest.approx(
        np.maximum(wanted, 1e-5) / np.maximum(wanted, 1e-5).mean(), rel=1e-3, abs=1e-4
    )


@pytest.mark.parametrize("variant", ["paper", "paper_as_released"])
def test_a_model_ships_with_numbers_of_noisy_inputs_and_as_released_of_the_records(variant: str) -> None:
    trainer, weights, site = ready(variant=variant)
    fit = trainer.fit(weights, site, {})
    net, inputs = trainer._network, to_unit_interval(torch.from_numpy(site.x))
    given = trainer._records(site, inputs, fit.state, trainer._seeded(site)["once"])
    assert torch.equal(given.inputs, inputs) == (variant == "paper_as_released")
    trainer._net.load(weights + fit.change)
    [place] = [i for i, part in enumerate(net.encoder) if isinstance(part, BatchNormalisation)]
    layer = net.encoder[place]
    assert isinstance(layer, BatchNormalisation)
    with torch.no_grad():
        of = layer.of(net.encoder[1:place](net._first(given.inputs, given.bias)))
    assert layer.kept.detach() == pytest.approx(torch.stack(of), rel=1e-3, abs=1e-4)
