"""Layer-wise relevance propagation: it is divided and handed down, and nothing is lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fed_dp.errors import ModelError
from fed_dp.models.adlm import AdlmCnn
from fed_dp.models.relevance import relevance
from tests import networks


def network(*, bias: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=bias),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, bias=bias),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(6, 5, bias=bias),
        nn.Tanh(),
        nn.Linear(5, 3, bias=bias),
        nn.LogSoftmax(dim=1),
    )


def records(count: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, 1, 8, 8, generator=generator), torch.arange(count) % 3


def test_relevance_is_conserved_from_output_to_input() -> None:
    x, y = records()
    found = relevance(network(bias=False), x, y)
    assert found.inputs.shape == x.shape
    assert found.inputs.flatten(1).sum(1) == pytest.approx(found.outcome, rel=1e-3, abs=1e-5)
    assert float(found.outcome.abs().max()) > 0.01


def test_what_biases_take_is_told() -> None:
    x, y = records()
    found = relevance(network(bias=True), x, y)
    assert (found.inputs.flatten(1).sum(1) + found.biases) == pytest.approx(found.outcome, rel=1e-4)
    assert float(found.biases.abs().max()) > 1e-3  # and they do take some


def test_of_a_linear_network_it_is_each_inputs_part_of_the_logit() -> None:
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 3, bias=False))
    x, y = records()
    found = relevance(layers, x, y)
    weights = layers[1].weight.detach()
    assert found.inputs.flatten(1) == pytest.approx(x.flatten(1) * weights[y], rel=1e-3, abs=1e-6)


def test_a_maximum_hands_it_to_the_input_it_took() -> None:
    layers = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1, 2, bias=False))
    x = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    found = relevance(layers, x, torch.tensor([0])).inputs[0, 0]
    assert found[1, 1] == pytest.approx(layers(x)[0, 0].item(), rel=1e-4)
    assert float(found.abs().sum()) == pytest.approx(abs(float(found[1, 1])))


def test_the_papers_network_and_ours_have_relevances() -> None:
    x, y = records()
    for name in ("small-mlp", "linear", "small-cnn"):
        layers = networks.network(name, (1, 8, 8), 3).build()
        assert isinstance(layers, nn.Sequential)
        assert torch.isfinite(relevance(layers, x, y).inputs).all()
    paper = networks.network("adlm-cnn", (1, 8, 8), 3, filters=2).build()
    assert isinstance(paper, AdlmCnn)
    assert torch.isfinite(relevance(paper.layers, x, y).inputs).all()


def test_a_layer_that_mixes_units_is_refused() -> None:
    layers = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (8, 8)), nn.Flatten())
    x, y = records()
    with pytest.raises(ModelError, match="cannot pass a layer of kind Unflatten"):
        relevance(layers, x, y)
    with pytest.raises(ModelError, match="ends in logits"):
        relevance(nn.Sequential(nn.ReLU()), x, y)
