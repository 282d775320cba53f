"""The papers' loops, written out one coordinate at a time, with noise drawn where the paper draws it."""

from __future__ import annotations

from collections.abc import Sequence

from fed_dp.seeds import Generator


def bound(value: float, gamma: float) -> float:
    return max(-gamma, min(gamma, value))


def figure_12(
    values: Sequence[float],
    *,
    gamma: float,
    tau: float,
    count: int,
    epsilon: float,
    rng: Generator,
    as_printed: bool = False,
) -> dict[int, float]:
    """Fig. 12 of Shokri and Shmatikov; the released value clipped before noise unless `as_printed`."""
    first, second = 8 / 9 * epsilon, 2 / 9 * epsilon

    def sigma(part: float) -> float:
        return 2 * count * (2 * gamma) / part

    uploaded: dict[int, float] = {}
    r_tau = rng.laplace(scale=sigma(first))
    for j in rng.permutation(len(values)):
        r_w = rng.laplace(scale=2 * sigma(first))
        if abs(bound(values[j], gamma)) + r_w >= tau + r_tau:
            value = values[j] if as_printed else bound(values[j], gamma)
            uploaded[int(j)] = bound(value + rng.laplace(scale=sigma(second)), gamma)
            if len(uploaded) == count:
                break
            r_tau = rng.laplace(scale=sigma(first))
    return uploaded


def algorithm_1(
    values: Sequence[float],
    *,
    gamma: float,
    tau: float,
    count: int,
    eps_threshold: float,
    eps_search: float,
    rng: Generator,
) -> list[int]:
    """Algorithm 1 of Lyu, Su and Li on magnitudes, in random order, with sensitivity γ."""
    found: list[int] = []
    rho = rng.laplace(scale=gamma / eps_threshold)
    for j in rng.permutation(len(values)):
        nu = rng.laplace(scale=2 * count * gamma / eps_search)
        if abs(bound(values[j], gamma)) + nu >= tau + rho:
            found.append(int(j))
            if len(found) == count:
                break
    return sorted(found)


def crossings(noisy: Sequence[float], limits: Sequence[float]) -> list[int]:
    """One by one: the next limit counts after each crossing."""
    found: list[int] = []
    for position, value in enumerate(noisy):
        if len(found) < len(limits) and value >= limits[len(found)]:
            found.append(position)
    return found
