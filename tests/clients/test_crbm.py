"""CRBM and SctRBM: the machine that the papers define, what it is given, and that training helps."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from fed_dp.clients.building import make_trainer
from fed_dp.clients.crbm.trainer import ContrastiveTrainer
from fed_dp.clients.trainer import ClientData, Fit
from fed_dp.experiment import Experiment, build
from fed_dp.experiment.federation import make_federation
from fed_dp.experiment.start import starting_weights
from fed_dp.models import Evaluator
from fed_dp.models.rbm import ConditionalRbm

SHAPE = (1, 5, 3)  # three time points before, now, and friends


def machine(*, social: bool) -> ConditionalRbm:
    torch.manual_seed(1)
    network = ConditionalRbm(SHAPE, 2, 4, social=social)
    for parameter in network.parameters():
        parameter.data.normal_()
    return network


def energy(network: ConditionalRbm, v: torch.Tensor, h: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Taylor et al.'s E(v, h | u), written out."""
    apart = v - network.visible - given @ network.to_visible
    bias = network.bias + given @ network.to_hidden
    return apart @ apart / 2 - h @ bias - v @ network.weights @ h


@pytest.mark.parametrize("social", [False, True])
def test_free_energy_and_hidden_units_are_those_of_the_energy(social: bool) -> None:
    network = machine(social=social)
    v, given = (each[0] for each in network.units(torch.randn(1, *SHAPE)))
    states = [torch.tensor(bits, dtype=torch.float32) for bits in product((0, 1), repeat=4)]
    weights = torch.stack([-energy(network, v, h, given) for h in states])
    free = network.free_energy(v[None], given[None])[0]
    assert torch.allclose(free, -weights.logsumexp(0), rtol=1e-4)
    chances = (weights.softmax(0)[:, None] * torch.stack(states)).sum(0)
    assert torch.allclose(torch.sigmoid(network.total(v[None], given[None]))[0], chances, atol=1e-5)
    h = states[5]  # the mean of v given h is where the energy is least
    mean = network.reconstruction(h[None], given[None])[0].detach().requires_grad_()
    energy(network, mean, h, given).backward()
    assert mean.grad is not None
    assert mean.grad.abs().max() < 1e-5


def test_only_sctrbm_sees_friends_and_both_see_the_past() -> None:
    x = torch.rand(6, *SHAPE)
    other, earlier = x.clone(), x.clone()
    other[:, 0, -1, 0] = 1 - other[:, 0, -1, 0]
    earlier[:, 0, 0] += 0.5
    for social in (False, True):
        network = machine(social=social)
        assert torch.equal(network(other), network(x)) != social
        assert not torch.allclose(network(earlier), network(x))


def behaviour(name: str = "sctrbm-behaviour", **trainer: Any) -> Experiment:
    return build(
        {
            "data": {"name": "health-weekly", "points": 12},
            "clients": {"count": 1},
            "model": {"name": name, "hidden": 40},
            "trainer": {"name": "crbm", "learning_rate": 0.01, "local_epochs": 3, **trainer},
        }
    )


def test_training_learns_the_machine_and_the_status() -> None:
    given = behaviour()
    members = make_federation(given)
    trainer, net = make_trainer(given, members.dataset)
    assert isinstance(trainer, ContrastiveTrainer)
    start = starting_weights(given, members)
    x, y = members.client(0)

    def fit(server_round: int, weights: np.ndarray) -> Fit:
        return trainer.fit(weights, ClientData(x, y, 0, server_round, 3), {})

    def misfit(weights: np.ndarray | None = None) -> float:
        """How far reconstructions by the mean of hidden units are from the records."""
        if weights is not None:
            net.load(weights)
        network = net.network
        assert isinstance(network, ConditionalRbm)
        with torch.no_grad():
            v, beside = network.units(torch.from_numpy(x))
            again = network.reconstruction(torch.sigmoid(network.total(v, beside)), beside)
            return float((again - v).square().mean())

    before = misfit(start)
    trainer._pretrain(ClientData(x, y, 0, 1, 3), torch.Generator().manual_seed(1))
    assert misfit() < 0.5 * before
    first = fit(1, start).change
    second = fit(2, start + first).change
    data = members.dataset
    evaluator = Evaluator(given.network(data.shape, 2), data.inputs(data.test), data.test.y)
    assert evaluator.scores(start + first + second)["accuracy"] > 0.6
    assert fit(2, start).change.tobytes() != first.tobytes()  # without contrastive divergence


def test_more_gibbs_steps_are_another_training() -> None:
    changes = set()
    for steps in (1, 3):
        given = behaviour("crbm-behaviour", gibbs_steps=steps, local_epochs=1)
        members = make_federation(given)
        trainer, _ = make_trainer(given, members.dataset)
        site = ClientData(*members.client(0), 0, 1, 3)
        changes.add(trainer.fit(starting_weights(given, members), site, {}).change.tobytes())
    assert len(changes) == 2
