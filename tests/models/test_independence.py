"""A network in which records depend on each other is refused by name before anything is called proved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from opacus.validators import ModuleValidator
from torch import Tensor, nn

from fed_dp.accounting import SampledGaussian
from fed_dp.clients.psgd import Psgd
from fed_dp.clients.psgd.trainer import PsgdTrainer
from fed_dp.errors import ModelError
from fed_dp.models import FlatNetwork, NetworkSpec
from fed_dp.models.independence import check_independent
from fed_dp.models.networks.small import Linear


class Centred(nn.Module):
    """Subtracts the mean over the batch. Opacus' validator finds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class OnlyInTraining(nn.Module):
    """… in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.std(0, correction=0) if self.training else x


class OnlyBackwards(nn.Module):
    """The outputs are each record's own, the gradients are not."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0)
        return x + mean - mean.detach()


class Remembers(nn.Module):
    """Keeps a running mean, and does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


class Shuffled(nn.Module):
    """Every record gets the output of its neighbour."""

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, 0)


MIXING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mean": (Centred, "output"),
    "training": (OnlyInTraining, "output"),
    "gradient": (OnlyBackwards, "gradient"),
    "buffer": (Remembers, "buffer"),
    "order": (Shuffled, "output"),
}
APART = [nn.Identity, lambda: nn.Dropout(0.5), lambda: nn.GroupNorm(2, 10), lambda: nn.LayerNorm(10), nn.Tanh]


def network(middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), middle, nn.Linear(10, 10), nn.LogSoftmax(1))


@pytest.mark.parametrize("kind", MIXING)
def test_what_passes_opacus_validator_and_mixes_records_is_refused(kind: str) -> None:
    make, what = MIXING[kind]
    mixing = network(make())
    assert not ModuleValidator.validate(mixing, strict=False)
    with pytest.raises(ModelError, match=rf"model\.name = 'mine'.*{what}"):
        check_independent(mixing, (64,), name="mine")


@pytest.mark.parametrize("make", APART)
def test_layers_that_treat_each_record_by_itself_pass(make: Callable[[], nn.Module]) -> None:
    check_independent(network(make()), (64,), name="mine")


def test_features_are_looked_at_where_they_are_what_counts() -> None:
    mixing = network(Centred())
    with pytest.raises(ModelError, match="features of a record"):
        check_independent(mixing, (64,), name="mine", seen=lambda network, x: network(x))


def test_psgd_is_not_built_on_such_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fed_dp.models.networks.small.Linear.build", lambda *_, **__: network(Centred()))
    net = FlatNetwork(NetworkSpec(Linear(), (64,), 10))
    with pytest.raises(ModelError, match="no guarantee for one record holds"):
        PsgdTrainer(Psgd(name="psgd"), net, release=SampledGaussian(1.0, 0.1, 10))
