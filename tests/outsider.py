"""A package of somebody else's, in one module: a data set, a network, a trainer that adds noise, a strategy.

The tests install it under the name `outsider` and run an experiment with all four of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from fed_dp import seeds
from fed_dp.accounting import Gaussian, Guarantee
from fed_dp.clients.trainer import ClientData, Fit, Trainer
from fed_dp.data.dataset import DataSet, Records, divided, every_nth
from fed_dp.data.options import Embedded
from fed_dp.experiment import Experiment
from fed_dp.experiment.components import AuditSetup, StrategyOptions, StrategySetting, TrainerOptions
from fed_dp.experiment.plan import ReleasePlan, budget_of
from fed_dp.mechanisms import gaussian_multiplier
from fed_dp.models import FlatNetwork, Network
from fed_dp.options import Positive
from fed_dp.sharing.message import Upload
from fed_dp.strategies.site_strategy import PendingRequest, SiteStrategy


class Moons(Embedded):
    """Two half moons."""

    name: Literal["moons"] = "moons"
    about = "two half moons"
    width: Positive = 0.1  # of a moon

    def read(self) -> DataSet:
        from sklearn.datasets import make_moons

        x, y = make_moons(300, noise=self.width, random_state=0)
        records = Records(x.astype(np.float32), y.astype(np.int64))
        return divided("moons", records, every_nth(300, 3), classes=2)


class Wide(Network):
    """One layer of units."""

    name: Literal["wide"] = "wide"
    units: int = 16

    def build(self, shape: tuple[int, ...], classes: int, **decided: Any) -> nn.Module:
        return nn.Sequential(
            nn.Linear(shape[0], self.units), nn.Tanh(), nn.Linear(self.units, classes), nn.LogSoftmax(dim=1)
        )


CLAIMED = Guarantee(
    "one_noisy_gradient", "claimed", "record", "zero-out one", "its author says so; nobody has checked it"
)


class OneStep(TrainerOptions):
    """One gradient of all records in a round, clipped as a whole, with Gaussian noise."""

    name: Literal["one-step"] = "one-step"
    learning_rate: Positive = 1.0
    guarantees = (CLAIMED,)

    @property
    def private(self) -> bool:
        return True

    @property
    def requires_delta(self) -> bool:
        return True

    def guarantee(self, experiment: Experiment) -> Guarantee:
        return CLAIMED

    def release_plan(self, experiment: Experiment, *, client: int, size: int) -> ReleasePlan:
        budget = budget_of(experiment)
        assert budget is not None
        sigma = gaussian_multiplier(epsilon=budget.epsilon, delta=budget.delta, releases=experiment.rounds)
        return ReleasePlan(Gaussian(sigma), CLAIMED.name, experiment.privacy.noise_source)

    def build(self, experiment: Experiment, net: FlatNetwork, plan: ReleasePlan | None) -> Trainer:
        assert plan is not None
        assert isinstance(plan.release, Gaussian)
        return OneStepTrainer(net, self.learning_rate, plan.release.noise_multiplier)

    @classmethod
    def audits(cls) -> Mapping[str, Mapping[str, AuditSetup]]:
        return {}


class OneStepTrainer:
    is_private = True

    def __init__(self, net: FlatNetwork, rate: float, sigma: float) -> None:
        self._net, self._rate, self._sigma = net, rate, sigma

    def fit(self, weights: np.ndarray, data: ClientData, state: Mapping[str, list[float]]) -> Fit:
        self._net.load(weights)
        loss = nn.functional.nll_loss(self._net.network(torch.from_numpy(data.x)), torch.from_numpy(data.y))
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, self._net.parameters)]).numpy()
        gradient = gradient / max(1.0, float(np.linalg.norm(gradient)))
        rng = seeds.generator(data.seed, "one step", data.server_round, data.client)
        noise = rng.normal(size=gradient.size) * self._sigma / len(data.y)
        return Fit((-self._rate * (gradient + noise)).astype(np.float32))


class Median(StrategyOptions):
    """The median of all changes."""

    name: Literal["median"] = "median"

    def build(self, setting: StrategySetting) -> SiteStrategy:
        return MedianStrategy(setting.weights, setting.sites, **setting.common)


class MedianStrategy(SiteStrategy):
    def combine(self, uploads: Sequence[tuple[PendingRequest, Upload]]) -> None:
        if uploads:
            changes = np.stack([upload.update.values for _, upload in uploads])
            self.weights = (self.weights + np.median(changes, axis=0)).astype(np.float32)
