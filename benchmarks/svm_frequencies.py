"""What fitting frequencies to public records is good for, against drawing them: on Adult, draw by draw.

For so many features and private records, every draw has its own public records, frequencies and noise (gamma,
ε = 1, C by rule); drawn and fitted frequencies begin at the same place and get the same noise. Printed are
means (standard deviations) over draws: how far off the kernel is on 500 other records, AUC without and with
noise. Needs Adult (`fed-dp data fetch adult-numbers`); a minute of one core:
python benchmarks/svm_frequencies.py
"""

from __future__ import annotations

import math

import numpy as np
from sklearn.metrics import roc_auc_score
from threadpoolctl import threadpool_limits

from fed_dp import data
from fed_dp.mechanisms import SimulationNoise
from fed_dp.mechanisms.noise import Reals
from fed_dp.mechanisms.support_vector import default_cost, perturbed, score_noise, solve
from fed_dp.models.fitted import fitted_frequencies

DRAWS, NOISES, EPSILON = 12, 4, 1.0
PUBLIC = (0, 20, 200)  # public records that ρ is fitted to; 0: drawn


def features(x: Reals, rho: Reals) -> Reals:
    """Return ẑ."""
    angles = x @ rho
    return np.concatenate([np.cos(angles), np.sin(angles)], 1) / math.sqrt(rho.shape[1])


def kernel(x: Reals, width: float) -> Reals:
    """Return exp(−‖x − y‖²/σ²) of all pairs."""
    squares = (x**2).sum(1)
    return np.asarray(np.exp(-np.maximum(squares[:, None] + squares - 2 * x @ x.T, 0) / width**2))


def main() -> None:
    """Measure."""
    census = data.read("adult-numbers")
    x, y = census.inputs(census.train).astype(float), np.where(census.train.y, 1.0, -1.0)
    x_test, y_test = census.inputs(census.test)[:6000].astype(float), census.test.y[:6000]
    inputs, width = x.shape[1], 2 * math.sqrt(x.shape[1])
    for count, records in ((20, 2_600), (100, 2_600), (20, 26_000), (100, 26_000)):
        one = score_noise(kind="gamma", noise_value=EPSILON, records=records, problems=1, features=count)
        cost = default_cost(records=records, score_noise=one)
        found: dict[int, list[tuple[float, ...]]] = {public: [] for public in PUBLIC}
        for draw in range(DRAWS):
            rng = np.random.default_rng(draw)
            order = rng.permutation(len(y))
            train, other = order[1000 : 1000 + records], x[order[-500:]]
            start = rng.normal(size=(inputs, count // 2)) * math.sqrt(2) / width
            for public in PUBLIC:
                rho = fitted_frequencies(x[order[:public]], start, width) if public else start
                near = features(other, rho)
                off = math.sqrt(((near @ near.T - kernel(other, width)) ** 2).mean())
                w = solve(features(x[train], rho), y[train, None], cost=cost, expected=records)
                noise, seen = SimulationNoise(np.random.default_rng([draw, 1])), features(x_test, rho)
                released = (
                    perturbed(
                        w,
                        cost=cost,
                        records=records,
                        problems=1,
                        kind="gamma",
                        noise_value=EPSILON,
                        noise=noise,
                    )
                    for _ in range(NOISES)
                )
                private = np.mean([roc_auc_score(y_test, seen @ each[0]) for each in released])
                found[public].append((off, roc_auc_score(y_test, seen @ w[0]), float(private)))
        for public, rows in found.items():
            cells = zip(np.mean(rows, 0), np.std(rows, 0, ddof=1), strict=True)
            told = "   ".join(f"{mean:.4f} ({deviation:.4f})" for mean, deviation in cells)
            name = f"fitted to {public}" if public else "drawn"
            print(
                f"{count:3d} features, n = {records:6,d}, C = {cost:5.0f}, ρ {name:13s}  {told}", flush=True
            )


if __name__ == "__main__":
    with threadpool_limits(1):
        main()
