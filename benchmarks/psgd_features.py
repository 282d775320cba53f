"""What helps pSGD on scattering features: heads trained on several encoders, on held-out training records.

    python benchmarks/psgd_features.py fashion-mnist --epsilon 1 --sites 10

A study, not the product: samples are contiguous slices of shuffled records, a stage's budget is taken off
ε as if all were one Gaussian, and noise is that of 60,000 records though 50,000 are trained on. 10,000
training records are held out; test records are not looked at. Settings of one data set are chosen on
another's numbers.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fed_dp.accounting import Budget, noise_multiplier
from fed_dp.data import read
from fed_dp.experiment.plan import one_multiplier
from fed_dp.mechanisms.statistics import MapMoments
from fed_dp.models import use_one_thread
from fed_dp.models.encoders import Compression, Scattered

DELTA, RECORDS, RATE, PASSES, MOMENTUM, CLIP, NORM = 1e-5, 60_000, 1 / 8, 30, 0.9, 0.1, 60.0
MEAN_SHARE, MOMENTS_SHARE = 0.03, 0.05
Pair = tuple[Tensor, Tensor]  # features of the training and of the held-out records


class Study:
    """One data set, one ε, noise of so many sites."""

    def __init__(self, name: str, epsilon: float, sites: int) -> None:
        data = read(name)
        rows = np.random.default_rng(0).permutation(len(data.train))
        self.cut = len(rows) - len(rows) // 6
        self.labels = torch.from_numpy(data.train.y[rows])
        self.epsilon, self.sites, self.rng = epsilon, sites, np.random.default_rng(1)
        scattered = Scattered((data.shape[0], data.shape[1], data.shape[2]), groups=27)
        self.sides = scattered.channels, scattered.positions
        with torch.no_grad():
            parts = [
                scattered(torch.from_numpy(data.inputs(data.train, part))).flatten(1)
                for part in np.array_split(rows, 60)
            ]
        self.features = torch.cat(parts) / math.sqrt(math.prod(self.sides))  # of norm 1 at most

    def noise(self, size: int, share: float) -> np.ndarray:
        """Return the noise of a release of sensitivity 1, of all sites."""
        multiplier = one_multiplier(Budget(self.epsilon, DELTA), share)
        return self.rng.normal(size=size) * multiplier * math.sqrt(self.sites)

    def encoders(self) -> Iterator[tuple[str, Pair, float]]:
        """Yield each encoder's name, features, and what it costs of the budget."""
        train, held = self.features[: self.cut], self.features[self.cut :]
        yield "features as they are", (train * NORM, held * NORM), 0.0
        mean = train.mean(0) + torch.from_numpy(self.noise(train.shape[1], MEAN_SHARE) / RECORDS).float()
        yield "less their mean", ((train - mean) * NORM, (held - mean) * NORM), MEAN_SHARE
        statistic = MapMoments(*self.sides)
        sums = sum(statistic.sums((part.numpy(), np.zeros(0))) for part in torch.split(train, 1000))
        noise = statistic.l2 * self.noise(statistic.size, MOMENTS_SHARE) / statistic.weights("gaussian")
        moments = np.asarray(sums) / self.cut + noise / RECORDS
        for count, whitening in ((400, 0.5), (1000, 0.3), (1000, 0.5), (1000, 0.7), (2000, 0.5)):
            derived = Compression(*self.sides, count, whitening, unit=False).derived(moments)
            centre, axes = (torch.from_numpy(part).float() for part in derived)
            found = [(part - centre) @ axes for part in (train, held)]
            yield (
                f"{count} components, whitening {whitening}",
                (found[0] * NORM, found[1] * NORM),
                MOMENTS_SHARE,
            )

    def accuracy(self, features: Pair, share: float, rate: float) -> float:
        """Train a head with DP-SGD; return its accuracy on the held-out records."""
        x, held = features
        steps = round(PASSES / RATE)
        sigma = noise_multiplier(
            epsilon=self.epsilon * math.sqrt(1 - share), delta=DELTA, sample_rate=RATE, steps=steps
        ) * math.sqrt(self.sites)
        source = torch.Generator().manual_seed(0)
        weights, velocity = torch.zeros(10, x.shape[1]), torch.zeros(10, x.shape[1])
        norms, size = x.square().sum(1).sqrt(), int(len(x) * RATE)
        for _ in range(steps):
            start = int(torch.randint(0, len(x) - size + 1, (1,), generator=source))
            rows = slice(start, start + size)
            pull = torch.softmax(x[rows] @ weights.T, 1) - functional.one_hot(self.labels[rows], 10)
            pull *= (CLIP / (pull.norm(dim=1) * norms[rows] + 1e-6)).clamp(max=1)[:, None]
            total = (pull.T @ x[rows]) * (RECORDS / len(x))
            total += sigma * CLIP * torch.randn(total.shape, generator=source)
            velocity = MOMENTUM * velocity + total / (RATE * RECORDS)
            weights -= rate * velocity
        return float(((held @ weights.T).argmax(1) == self.labels[self.cut :]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="?", default="mnist", choices=("mnist", "fashion-mnist"))
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--sites", type=int, default=1)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0])
    given = parser.parse_args()
    use_one_thread()
    study = Study(given.data, given.epsilon, given.sites)
    for name, features, share in study.encoders():
        found = {rate: study.accuracy(features, share, rate) for rate in given.rates}
        print(name, " ".join(f"{rate:g}: {score:.4f}" for rate, score in found.items()), flush=True)


if __name__ == "__main__":
    main()
