"""dPA and pCDBN as printed: what their objectives are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fed_dp import seeds
from fed_dp.clients.building import make_trainer
from fed_dp.clients.functional.perturbed import PerturbedTrainer, balanced_batches
from fed_dp.clients.trainer import ClientData
from fed_dp.experiment import build
from fed_dp.experiment.federation import make_federation
from fed_dp.experiment.start import starting_weights
from fed_dp.mechanisms import SimulationNoise
from fed_dp.models import Vector
from fed_dp.models.paper import Cdbn, Crbm


def ready(**privacy: Any) -> tuple[PerturbedTrainer, Cdbn, Vector, ClientData]:
    """pCDBN on behaviour: trainer, network, weights and a site."""
    given = build(
        {
            "clients": {"count": 4},
            "data": {"name": "health-weekly"},
            "model": {"name": "cdbn-behaviour", "filters": 2},
            "trainer": {"name": "pcdbn", "learning_rate": 0.01, **({} if privacy else {"perturb": False})},
            "privacy": privacy,
        }
    )
    members = make_federation(given)
    trainer, net = make_trainer(given, members.dataset)
    assert isinstance(trainer, PerturbedTrainer)
    assert isinstance(net.network, Cdbn)
    site = ClientData(*members.client(0), 0, 1, given.seed)
    return trainer, net.network, starting_weights(given, members), site


def first_layer(network: Cdbn) -> Crbm:
    layer = network.layers[0]
    assert isinstance(layer, Crbm)
    return layer


def test_the_visible_units_dynamic_bias_is_learnt_from_the_energy() -> None:
    """Eq. 26: the energy holds −ĉ Σ v with ĉ = c + A x + η s, so its slope by A and η is −x Σ v, −s Σ v."""
    trainer, network, weights, site = ready()
    trainer._net.load(weights)
    crbm, x = first_layer(network), torch.from_numpy(site.x[:50])
    assert crbm.dynamic is not None
    with torch.no_grad():
        crbm.dynamic.uniform_(-0.1, 0.1)
    _, objective = trainer._energy(network, 0)
    [slope] = torch.autograd.grad(objective(x, torch.zeros(50)), [crbm.dynamic])
    v, beside = network.given(x)
    assert beside is not None
    with torch.no_grad():
        h = crbm.probability(crbm.total(v, beside), network.polynomial)
        less = v.sum((1, 2, 3)) - crbm.reconstruction(h, beside).sum((1, 2, 3))
        expected = -(beside * less[:, None]).mean(0) / v[0].numel()
    assert slope[:, -1] == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_after_a_round_both_dynamic_biases_have_moved() -> None:
    trainer, network, weights, site = ready()
    change = trainer.fit(weights, site, {}).change
    trainer._net.load(weights + change)
    dynamic = first_layer(network).dynamic
    assert dynamic is not None
    assert (dynamic.detach().abs().amax(0) > 1e-3).all()  # B and η_k of every group; A and η


def test_the_energys_noise_is_on_the_coefficients_of_degree_1_alone() -> None:
    """Of W, b and c: what it adds is linear in them, the same for all groups, and without dynamic biases."""
    noisy, plain = ready(budget_epsilon=4.0, variant="paper"), ready()

    def added(step: float) -> list[torch.Tensor]:
        slopes = []
        for trainer, network, weights, site in (noisy, plain):
            trainer._net.load(weights)
            seeded = SimulationNoise(seeds.generator(site.seed, "coefficient noise", site.client, 0))
            trainer._records, trainer._noise_of = len(site.y), lambda _, noise=seeded: noise
            crbm = first_layer(network)
            with torch.no_grad():
                for part in crbm.parameters():
                    part.add_(step)
            _, objective = trainer._energy(network, 0)
            value = objective(torch.from_numpy(site.x[:50]), torch.zeros(50))
            slopes.append(torch.autograd.grad(value, list(crbm.parameters())))
        return [a - b for a, b in zip(*slopes, strict=True)]

    slope, elsewhere = added(0.0), added(0.05)
    names = [name for name, _ in first_layer(noisy[1]).named_parameters()]
    for name, here, there in zip(names, slope, elsewhere, strict=True):
        assert there == pytest.approx(here, rel=1e-3, abs=1e-5)  # linear
        assert bool(here.any()) == (name != "dynamic")
    filters = slope[names.index("filters")]
    assert filters[1] == pytest.approx(filters[0], rel=1e-4, abs=1e-6)  # one copy for all groups


def test_balanced_batches_have_as_many_of_each_class_and_an_epochs_number_of_batches() -> None:
    y = torch.tensor([0] * 95 + [1] * 5)
    batches = list(balanced_batches(y, 20, torch.Generator().manual_seed(1)))
    assert len(batches) == 5
    for rows in batches:
        assert torch.bincount(y[rows]).tolist() == [10, 10]
    seen = torch.cat(batches)
    assert len(torch.unique(seen[y[seen] == 1])) > 1  # not always the same
    again = list(balanced_batches(y, 20, torch.Generator().manual_seed(1)))
    assert all(torch.equal(one, other) for one, other in zip(batches, again, strict=True))
    [alone] = balanced_batches(torch.zeros(7, dtype=torch.int64), 20, torch.Generator())
    assert len(alone) == 20
