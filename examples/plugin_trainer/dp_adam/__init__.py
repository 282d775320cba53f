"""DP-Adam as a trainer for fed_dp: Adam's steps on noisy sums of clipped gradients.

Everything that fed_dp must know about it stands here: options, guarantee, what a round releases, how it is
built, and the smallest experiment that audits it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from fed_dp import seeds
from fed_dp.accounting import Guarantee, SampledGaussian, noise_multiplier
from fed_dp.clients.trainer import ClientData, Fit
from fed_dp.experiment import Experiment
from fed_dp.experiment.components import AuditSetup, TrainerOptions
from fed_dp.experiment.plan import ReleasePlan, budget_of
from fed_dp.models import FlatNetwork
from fed_dp.models.client_batches import per_record_gradients
from fed_dp.models.independence import check_independent
from fed_dp.options import Count, Fraction, Positive

CLAIMED = Guarantee(
    "dp_adam",
    "claimed",
    "record",
    "zero-out one",
    "subsampled Gaussian mechanism, as its author says; Adam's steps are post-processing",
)


class DpAdam(TrainerOptions):
    """DP-Adam: Poisson samples, clipped gradients, Gaussian noise, Adam's steps."""

    name: Literal["dp-adam"] = "dp-adam"
    learning_rate: Positive = 0.01
    sample_rate: Fraction = 0.25  # chance of each record to be in a step's batch
    steps: Count = 4  # of a round
    clip: Positive = 1.0  # L2 bound of each record's gradient

    guarantees = (CLAIMED,)
    divides_by_records = True
    takes_loss = True
    takes_targets = ("class", "labels", "numbers")

    @property
    def private(self) -> bool:
        """It always adds noise."""
        return True

    @property
    def requires_delta(self) -> bool:
        """Its noise is Gaussian."""
        return True

    def check_privacy(self, privacy: Any) -> None:
        """Refuse secure noise, which it does not draw."""
        super().check_privacy(privacy)
        if privacy.noise_source != "simulation":
            raise ValueError(
                f"privacy.noise_source = {privacy.noise_source!r}: 'dp-adam' has 'simulation' alone"
            )

    def guarantee(self, experiment: Experiment) -> Guarantee:
        """Claimed, until somebody has proved the code."""
        return CLAIMED

    def release_plan(self, experiment: Experiment, *, client: int, size: int) -> ReleasePlan:
        """Plan the noise such that all rounds together cost the budget."""
        budget = budget_of(experiment)
        assert budget is not None
        sigma = noise_multiplier(
            epsilon=budget.epsilon,
            delta=budget.delta,
            sample_rate=self.sample_rate,
            steps=experiment.rounds * self.steps,
        )
        release = SampledGaussian(sigma, self.sample_rate, self.steps)
        return ReleasePlan(release, CLAIMED.name, experiment.privacy.noise_source)

    def build(self, experiment: Experiment, net: FlatNetwork, plan: ReleasePlan | None) -> DpAdamTrainer:
        """Return the trainer."""
        assert plan is not None
        assert isinstance(plan.release, SampledGaussian)
        return DpAdamTrainer(self, net, plan.release)

    def without_noise(self, experiment: Experiment, net: FlatNetwork) -> DpAdamTrainer:
        """Return it with all records and next to no noise: what an audit holds releases against."""
        everybody = self.model_copy(update={"sample_rate": 1.0})
        return DpAdamTrainer(everybody, net, SampledGaussian(1e-3, 1.0, self.steps))

    @classmethod
    def audits(cls) -> Mapping[str, Mapping[str, AuditSetup]]:
        """Return the smallest experiment: one record, a linear network, one step."""
        trainer = {"name": "dp-adam", "steps": 1, "sample_rate": 1.0}
        return {"dp-adam": {"proved": AuditSetup(records=1, model={"name": "linear"}, trainer=trainer)}}


class DpAdamTrainer:
    """One round: `steps` noisy steps from the weights that the server sent."""

    is_private = True

    def __init__(self, config: DpAdam, net: FlatNetwork, release: SampledGaussian) -> None:
        check_independent(net.network, net.shape, name=net.name)
        self._config, self._net, self._release = config, net, release

    def fit(self, weights: np.ndarray, data: ClientData, state: Mapping[str, list[float]]) -> Fit:
        """Train on the site's records; only noisy sums leave this function."""
        config, net = self._config, self._net
        net.load(weights)
        optimizer = torch.optim.Adam(net.parameters, config.learning_rate)
        gradients = per_record_gradients(net)
        x, y = net.inputs(data.x), net.targets(data.y)
        rng = seeds.generator(data.seed, "dp-adam", data.server_round, data.client)
        scale = self._release.noise_multiplier * config.clip
        for _ in range(config.steps):
            rows = torch.from_numpy(np.flatnonzero(rng.random(len(y)) < config.sample_rate))
            each = gradients(x[rows], y[rows])
            norms = torch.stack([part.flatten(1).norm(dim=1) for part in each]).norm(dim=0)
            factors = (config.clip / norms.clamp_min(1e-12)).clamp(max=1.0)
            for parameter, part in zip(net.parameters, each, strict=True):
                total = torch.einsum("i,i...->...", factors, part)
                noise = torch.from_numpy(rng.normal(size=tuple(parameter.shape)) * scale).to(total)
                parameter.grad = (total + noise) / (config.sample_rate * data.expected_records)
            optimizer.step()
        return Fit(net.weights() - weights)
