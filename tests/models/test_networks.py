from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fed_dp import plugins
from fed_dp.errors import ModelError
from fed_dp.models import Evaluator, FlatNetwork, initial_weights
from fed_dp.models.layers import L2Pooling, SubtractiveNormalisation
from tests.networks import network, options_of


@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [
        ("dssgd-mlp", (1, 32, 32), 140_106),
        ("dssgd-mlp", (3, 32, 32), 402_250),
        ("dssgd-cnn-mnist", (1, 32, 32), 105_506),
        ("dssgd-cnn-svhn", (3, 32, 32), 313_546),
    ],
)
def test_the_papers_networks_have_the_papers_parameter_counts(
    name: str, shape: tuple[int, ...], count: int
) -> None:
    assert FlatNetwork(network(name, shape, 10)).size == count


@pytest.mark.parametrize("name", plugins.names("model"))
def test_every_network_gives_log_probabilities(name: str, tmp_path: Path) -> None:
    shape = (3, 32, 32) if "svhn" in name else (1, 32, 32)
    output = network(name, shape, 10, **options_of(name, tmp_path)).build()(torch.randn(4, *shape))
    assert output.shape == (4, 10)
    assert torch.allclose(output.exp().sum(1), torch.ones(4))


def test_pooling_before_tanh_is_figure_6() -> None:
    net = network("dssgd-cnn-mnist", (1, 32, 32), 10).build()
    x = torch.randn(4, 1, 32, 32)
    layers = {type(layer).__name__: layer for layer in net}
    assert list(layers) == ["ChannelsLast", "Conv2d", "MaxPool2d", "Tanh", "Flatten", "Linear", "LogSoftmax"]
    as_printed = torch.nn.Sequential(
        net[1], torch.nn.Tanh(), net[2], net[4], torch.nn.Tanh(), net[5], *net[7:]
    )
    gradients = []
    for each in (net, as_printed):
        output = each(x)
        gradients.append(torch.autograd.grad(output[:, 0].sum(), list(net.parameters())))
        assert torch.allclose(output, net(x), atol=1e-6)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))


def test_a_network_that_does_not_fit_the_data_is_explained() -> None:
    with pytest.raises(ModelError, match=r"dssgd-cnn-mnist.*\(1, 32, 32\).*\(1, 28, 28\)"):
        network("dssgd-cnn-mnist", (1, 28, 28), 10).build()
    with pytest.raises(ModelError, match=r"small-cnn.*needs images"):
        network("small-cnn", (31,), 2).build()


def test_subtractive_normalisation_removes_a_constant_even_at_the_border() -> None:
    out = SubtractiveNormalisation(4)(torch.full((2, 4, 9, 9), 3.0))
    assert out.abs().max() < 1e-5
    x = torch.randn(2, 4, 9, 9)
    alone = torch.cat([SubtractiveNormalisation(4)(x[i : i + 1]) for i in range(2)])
    assert torch.allclose(SubtractiveNormalisation(4)(x), alone, atol=1e-6)  # records do not mix


def test_l2_pooling_is_the_root_mean_square_with_a_finite_slope_at_zero() -> None:
    x = torch.tensor([[[[3.0, 4.0], [0.0, 0.0]]]])
    assert L2Pooling()(x).item() == pytest.approx(2.5, abs=1e-4)
    zero = torch.zeros(1, 1, 2, 2, requires_grad=True)
    L2Pooling()(zero).sum().backward()
    assert zero.grad is not None
    assert torch.isfinite(zero.grad).all()


def test_flat_weights_are_the_networks_weights() -> None:
    net = FlatNetwork(network("small-mlp", (1, 8, 8), 10))
    weights = np.arange(net.size, dtype=np.float32)
    net.load(weights)
    assert torch.cat([p.reshape(-1) for p in net.parameters]).tolist() == weights.tolist()
    with torch.no_grad():
        net.parameters[0].add_(1)
    assert net.weights()[0] == 1
    assert net.weights()[-1] == net.size - 1


def test_initial_weights_depend_on_the_seed_alone() -> None:
    spec = network("small-mlp", (1, 8, 8), 10)
    torch.manual_seed(5)
    one = initial_weights(spec, seed=1)
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.rand(1) == after  # torch's own generator was left alone
    assert np.array_equal(one, initial_weights(spec, seed=1))
    assert not np.array_equal(one, initial_weights(spec, seed=2))


def test_scores_of_known_weights() -> None:
    x = np.array([[1.0], [-1.0], [2.0], [-2.0]], np.float32)
    evaluator = Evaluator(network("linear", (1,), 2), x, np.array([1, 1, 0, 0]))
    scores = evaluator.scores(np.array([-1.0, 1.0, 0.0, 0.0], np.float32))  # says 1 when x > 0
    assert scores["accuracy"] == 0.5
    assert scores["auc"] == pytest.approx(0.5)
