"""dPA, pCDBN, AdLM and ILM in their proved form: statistics released once; training follows from them.

The encoder is fixed (random features, wavelet scattering) or learnt in earlier stages from released
moments (principal components, patch filters), or fitted to public records (relevance); then the head's
statistics are released. Every later round starts from what was released and from public weights: it needs
no record and costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from fed_dp.accounting import Release
from fed_dp.clients.functional import Functional
from fed_dp.clients.trainer import ClientData, Fit, State
from fed_dp.experiment.plan import noise_spec
from fed_dp.mechanisms import Noise
from fed_dp.mechanisms.statistics import (
    Batch,
    HeadStatistics,
    OfHead,
    Statistic,
    deviation,
    positive,
    release,
)
from fed_dp.models import Encoded, FlatNetwork, Vector, solved_head
from fed_dp.models.independence import check_independent
from fed_dp.sharing.update import MAX_ABS_VALUE

BATCH = 128  # records whose features are in memory at once; all batches have this size, see below


def features(network: nn.Module, x: Tensor) -> Tensor:
    """Return what an encoder makes of records."""
    assert isinstance(network, Encoded)
    return network.features(x)


def batches(
    data: ClientData, seen: Callable[[Tensor], Tensor], *, device: torch.device, exactly: bool = False
) -> Iterator[Batch]:
    """Yield what is seen of the records, and their labels.

    The last batch is filled up: what is computed of a record must not depend on how many others there
    are, and libraries choose their order of summation by the size of a batch. It may still depend on its
    place in the batch, in the last bits: where noise is exact, they are looked at one by one (`exactly`).
    """
    size = 1 if exactly else BATCH
    with torch.no_grad():
        for start in range(0, len(data.y), size):
            y = data.y[start : start + size]
            x = np.zeros((size, *data.x.shape[1:]), np.float32)
            x[: len(y)] = data.x[start : start + size]
            yield seen(torch.from_numpy(x).to(device))[: len(y)].cpu().numpy(), y


class EncoderStages:
    """Release the moments of each learnt layer once, with noise; what follows from them is free.

    Guarantee: that of `statistics.release`, for each stage; proved. Neighbours: zero out one record of a site
    whose number of records is public; or add or remove one, where sums are divided by a declared number.
    `stages` are what is released, or None where nothing is perturbed. `step` is how far a site moves the
    model towards what its own statistics ask for, of the whole way.
    """

    def __init__(self, net: FlatNetwork, *, stages: tuple[Release, ...] | None, step: float = 1.0) -> None:
        assert isinstance(net.network, Encoded)  # by what the model offers
        self._net, self._network, self._step = net, net.network, step
        self._unlearnt = net.weights()  # learnt layers before anything is: the same public numbers everywhere
        self._stages = net.network.stages
        self._noise_specs = [noise_spec(stage) for stage in stages] if stages else [None] * self._stages

    def stage(self, server_round: int) -> int:
        """Return the stage of a round, from 1."""
        return min(server_round, self._stages)

    def frozen(self, weights: Vector, stage: int) -> Vector:
        """Return the part of the weights that decides what a stage's statistic is taken of."""
        return weights[: self._network.segment(stage).start]

    def release(self, weights: Vector, data: ClientData, stage: int, noise: Noise | None) -> Vector:
        """Return a stage's statistic as a mean over the site's (expected) records, with noise."""
        self._net.load(weights)
        data = replace(data, y=self._net.task.unit_targets(data.y))
        statistic = self._statistic(stage)
        spec = self._noise_specs[stage - 1]
        exactly = noise is not None and noise.name == "secure"
        records = self._batches(data, stage, exactly=exactly)
        total = release(statistic, records, spec, noise, records=data.expected_records)
        return np.clip(total / data.expected_records, -MAX_ABS_VALUE, MAX_ABS_VALUE).astype(np.float32)

    def follow(self, weights: Vector, released: Vector, stage: int, *, records: int) -> Fit:
        """Return the change that a released statistic asks for; no record is needed.

        A learnt layer changes in the round of its stage alone, and every site's change starts from the same
        public moments: in whichever order sites come, changes add up to the mean of their moments.
        """
        change = np.zeros_like(weights)
        where = self._network.segment(stage)
        change[where] = self._step * (released - self._unlearnt[where])
        return Fit(change)

    def _statistic(self, stage: int) -> Statistic:
        return self._network.learnt[stage - 1].statistic

    def _batches(self, data: ClientData, stage: int, *, exactly: bool = False) -> Iterator[Batch]:
        """Yield the records as a stage's statistic takes them."""
        network = self._network
        return batches(data, lambda x: network.before(x, stage - 1), device=self._net.device, exactly=exactly)


class StatisticsTrainer(EncoderStages):
    """Release the statistic of each stage once, the head's last; then descend on the objective that it gives.

    Guarantee and neighbours: those of EncoderStages. `sites` is how many share a model: the noise in it is
    that of all of them. With `sends_statistics` the upload is the statistic itself.
    """

    is_private = True

    def __init__(
        self,
        config: Functional,
        net: FlatNetwork,
        *,
        stages: tuple[Release, ...] | None,
        sites: int,
        sends_statistics: bool,
        step: float = 1.0,
    ) -> None:
        super().__init__(net, stages=stages, step=step)
        self._config, self._sites, self._sends_statistics = config, sites, sends_statistics
        check_independent(net.network, net.shape, name=net.name, seen=features)
        self.is_private = stages is not None

    def follow(self, weights: Vector, released: Vector, stage: int, *, records: int) -> Fit:
        """Return the change that a released statistic asks for; no record is needed."""
        if self._sends_statistics:
            return Fit(released)
        if stage < self._stages:
            return super().follow(weights, released, stage, records=records)
        change = np.zeros_like(weights)
        where = self._network.segment(stage)
        self._net.load(weights)
        change[where] = self._towards(weights[where], released, records)
        return Fit(change)

    def fit(self, weights: Vector, data: ClientData, state: State) -> Fit:
        """Release without noise, and follow: for what is not private."""
        stage = self.stage(data.server_round)
        released = self.release(weights, data, stage, None)
        return self.follow(weights, released, stage, records=data.expected_records)

    def _statistic(self, stage: int) -> Statistic:
        return super()._statistic(stage) if stage < self._stages else self._head()

    def _head(self) -> OfHead:
        return self._network.head_statistics(self._config.cross)

    def _batches(self, data: ClientData, stage: int, *, exactly: bool = False) -> Iterator[Batch]:
        if stage < self._stages:
            return super()._batches(data, stage, exactly=exactly)
        return batches(data, self._network.features, device=self._net.device, exactly=exactly)

    def _towards(self, weights: Vector, released: Vector, records: int) -> Vector:
        """Return the head's way to what its statistic asks for: a step of it, or some steps of descent."""
        statistic, spec = self._head(), self._noise_specs[-1]
        if isinstance(statistic, HeadStatistics):
            return self._descend(statistic, weights, released, records)
        wanted = solved_head(statistic, released, noise_spec=spec, ridge=self._config.ridge, records=records)
        way: Vector = (self._step * (wanted - weights)).astype(np.float32)
        return way.clip(-MAX_ABS_VALUE, MAX_ABS_VALUE)

    def _descend(self, statistic: HeadStatistics, weights: Vector, released: Vector, records: int) -> Vector:
        """Take accelerated gradient steps on ½ tr Wᵀ (G₊ + ridge) W − tr Wᵀ C from the given weights."""
        gram, cross = statistic.unpack(released)
        noise = deviation(statistic, self._noise_specs[-1]) / (records * math.sqrt(self._sites))
        gram = positive(gram) + statistic.ridge(self._config.ridge, noise) * np.eye(len(gram))
        step = 1 / float(np.linalg.eigvalsh(gram)[-1])
        start = weights.reshape(statistic.classes, statistic.features).T.astype(np.float64)
        here = ahead = start
        for taken in range(self._config.local_steps):
            before, here = here, ahead - step * (gram @ ahead - cross)
            ahead = here + taken / (taken + 3) * (here - before)
        way = self._step * (here - start)
        return np.clip(way.T.ravel(), -MAX_ABS_VALUE, MAX_ABS_VALUE).astype(np.float32)
