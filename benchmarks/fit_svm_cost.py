"""The constants of `default_cost` (fed_dp/mechanisms/support_vector.py), fitted to public data alone.

scikit-learn's digits, breast cancer and diabetes records, and generated tables. Each problem is solved for
every C of a grid; noise of every size of a grid (τ: its standard deviation in a score, for C = 1) is added to
the weights. A rule is judged by how much AUC its C loses against the best C of the grid, in the mean over
all problems, numbers of records, and sizes of noise. Four minutes of one core:
python benchmarks/fit_svm_cost.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from sklearn import datasets
from sklearn.metrics import roc_auc_score
from sklearn.svm import SVC
from threadpoolctl import threadpool_limits

from fed_dp.mechanisms.support_vector import MAX_DEFAULT, NOISE_SHARE, default_cost, solve

FEATURES, SPLITS, DRAWS, TESTED = 100, 3, 12, 1500
COSTS, PER_RECORD = 2.0 ** np.arange(-3, 15), 100.0  # of the grid; no more than so much C/n
NOISES = 2.0 ** np.arange(-15, -1)  # τ
WIDTHS = 2.0 ** np.arange(-1, 4)  # σ/√inputs
SHARES, EACH = 2.0 ** np.arange(-4, 2, 0.5), 2.0 ** np.arange(0, 9)
# Attributes, informative ones, share of the larger class, labels drawn at random.
GENERATED = ((5, 3, 0.5, 0.1), (8, 5, 0.76, 0.15), (11, 6, 0.5, 0.2), (14, 6, 0.76, 0.1), (30, 10, 0.6, 0.05))


class Problem(NamedTuple):
    """Inputs in [−1, 1] with labels ±1, and numbers of training records."""

    x: np.ndarray
    y: np.ndarray
    sizes: tuple[int, ...]


def problems() -> Iterator[Problem]:
    """Yield all of them."""
    digits, cancer, diabetes = datasets.load_digits(), datasets.load_breast_cancer(), datasets.load_diabetes()
    yield Problem(digits.data / 8 - 1, signs(digits.target % 2), (200, 1200))
    yield Problem(digits.data / 8 - 1, signs(digits.target >= 5), (200, 1200))
    yield Problem(scaled(cancer.data), signs(cancer.target), (100, 380))
    yield Problem(scaled(diabetes.data), signs(diabetes.target > np.median(diabetes.target)), (100, 290))
    for inputs, informative, share, flipped in GENERATED:
        x, y = datasets.make_classification(
            5000,
            inputs,
            n_informative=informative,
            n_redundant=(inputs - informative) // 2,
            flip_y=flipped,
            weights=[share],
            random_state=inputs,
        )
        x = np.clip(x / 4, -1, 1)
        x[:, 1::2] = np.sign(x[:, 1::2])  # half of the attributes are yes or no
        yield Problem(x, signs(y), (300, 3000))
    x, y = datasets.make_gaussian_quantiles(n_samples=5000, n_features=5, n_classes=2, random_state=0)
    yield Problem(np.clip(x / 3, -1, 1), signs(y), (300, 3000))


def signs(labels: np.ndarray) -> np.ndarray:
    """Return ±1."""
    return np.where(labels, 1.0, -1.0)


def scaled(x: np.ndarray) -> np.ndarray:
    """Return columns on [−1, 1]."""
    low, high = x.min(0), x.max(0)
    return 2 * (x - low) / (high - low) - 1


def scores(problem: Problem, records: int, seed: int) -> np.ndarray:
    """Return AUC on other records: without noise, then for each τ (rows), for each C (columns)."""
    x, y = problem.x, problem.y
    rng = np.random.default_rng([seed, records])
    order, draws = rng.permutation(len(y)), rng.normal(size=(DRAWS, FEATURES))
    angles = x @ rng.normal(size=(x.shape[1], FEATURES // 2)) / math.sqrt(2 * x.shape[1])
    z = np.concatenate([np.cos(angles), np.sin(angles)], 1) / math.sqrt(FEATURES // 2)
    train, test = order[:records], order[records:][-TESTED:]
    found = np.full((1 + len(NOISES), len(COSTS)), np.nan)
    for column, cost in enumerate(COSTS[COSTS <= PER_RECORD * records]):
        w = solve(z[train], y[train, None], cost=cost, expected=records)[0]
        found[0, column] = roc_auc_score(y[test], z[test] @ w)
        for row, noise in enumerate(NOISES, 1):
            noisy = z[test] @ (w + noise * cost * draws).T
            found[row, column] = np.mean([roc_auc_score(y[test], each) for each in noisy.T])
    return found


def by_rule(problem: Problem, records: int, seed: int, width: float) -> float:
    """Return AUC with C by the rule, in the mean over no noise and three sizes of it; σ = `width` √inputs."""
    x, y = problem.x, problem.y
    rng = np.random.default_rng([seed, records])
    order, draws = rng.permutation(len(y)), rng.normal(size=(DRAWS, FEATURES))
    angles = x @ rng.normal(size=(x.shape[1], FEATURES // 2)) * math.sqrt(2 / x.shape[1]) / width
    z = np.concatenate([np.cos(angles), np.sin(angles)], 1) / math.sqrt(FEATURES // 2)
    train, test = order[:records], order[records:][-TESTED:]
    found = []
    for noise in (0.0, 2.0**-11, 2.0**-8, 2.0**-5):
        cost = default_cost(records=records, score_noise=noise)
        w = solve(z[train], y[train, None], cost=cost, expected=records)[0]
        each = [z[test] @ (w + noise * cost * draw) for draw in draws[: DRAWS if noise else 1]]
        found.append(np.mean([roc_auc_score(y[test], told) for told in each]))
    return float(np.mean(found))


def lost(found: np.ndarray, cost: float) -> float:
    """Return how far below the best C of the grid a C is."""
    there = ~np.isnan(found)
    return float(np.nanmax(found) - np.interp(math.log(cost), np.log(COSTS[there]), found[there]))


def lost_by_kernel(problem: Problem, records: int) -> np.ndarray:
    """Return the same of the exact kernel without noise, for each C/n of EACH."""
    x, y, gamma = problem.x, problem.y, 1 / (4 * problem.x.shape[1])
    found = []
    for seed in range(8):
        order = np.random.default_rng(seed).permutation(len(y))
        train, test = order[:records], order[200:][-TESTED:]
        if len(set(y[train])) == 1:  # which tell nothing
            continue
        machines = (SVC(C=each, gamma=gamma).fit(x[train], y[train]) for each in EACH)
        found.append([roc_auc_score(y[test], machine.decision_function(x[test])) for machine in machines])
    mean = np.mean(found, 0)
    return np.asarray(mean.max() - mean)


def width_of(there: list[Problem], width: float) -> float:
    """Return `by_rule` in the mean over all problems, numbers of records and splits."""
    return float(np.mean([by_rule(p, n, s, width) for p in there for n in p.sizes for s in range(SPLITS)]))


def told(constants: np.ndarray, values: list[float]) -> str:
    """Return each constant with what it loses."""
    return ", ".join(f"{c:.3g}: {value:.4f}" for c, value in zip(constants, values, strict=True))


def main() -> None:
    """Fit all; print how much AUC is lost, by constant."""
    there = list(problems())
    found = [  # of every problem and number of records
        (n, np.mean([scores(each, n, seed) for seed in range(SPLITS)], 0))
        for each in there
        for n in each.sizes
    ]
    noisy = [(n, noise, row) for n, rows in found for noise, row in zip(NOISES, rows[1:], strict=True)]

    def with_noise(rule: Callable[[float, int], float]) -> float:
        return float(np.mean([lost(row, rule(noise, n)) for n, noise, row in noisy]))

    print("COST_PER_RECORD, without noise:")
    plain = [np.mean([lost(rows[0], min(c * n, MAX_DEFAULT)) for n, rows in found]) for c in EACH]
    print("  Fourier features  ", told(EACH, plain))
    kernel = [lost_by_kernel(each, n) for each in there for n in (20, 50, 100, 200)]
    print("  the kernel itself ", told(EACH, list(np.mean(kernel, 0))))
    print("NOISE_SHARE: C = 1/(τ/share + 1/(64 n)):")
    rules = [with_noise(lambda t, n, s=s: min(1 / (t / s + 1 / (64 * n)), MAX_DEFAULT)) for s in SHARES]
    print("                    ", told(SHARES, rules))
    powers = np.array([0.5, 0.67, 0.8, 1.0, 1.2])
    grid = 2.0 ** np.arange(-6, 7, 0.5)
    best = [min(with_noise(lambda t, n, k=k, p=p: k * t**-p) for k in grid) for p in powers]
    print("other powers of τ, each with its best constant:", told(powers, best))
    fixed = [with_noise(lambda t, n, c=c: c) for c in COSTS]
    print("one C for all noise: ", told(COSTS, fixed))
    print(f"in use: NOISE_SHARE = {NOISE_SHARE}")
    print("σ/√inputs, AUC with C by the rule: ", told(WIDTHS, [width_of(there, width) for width in WIDTHS]))


if __name__ == "__main__":
    with threadpool_limits(1):
        main()
