"""Figures 3 and 4, written out: slow, literal, one coordinate at a time. Nothing here is clever.

Every random choice is an argument: `keys` holds one number per coordinate, and a random order is the
order of those numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Parameters = list[np.float32]
Selected = list[tuple[int, np.float32]]


def at_most(theta: float, size: int) -> int:
    """θ × |w|, and at least one."""
    return max(1, int(theta * size + 1e-9))


def bound(value: np.float32, gamma: float | None) -> np.float32:
    """Truncate a value to [−γ, γ]."""
    if gamma is None:
        return value
    return max(np.float32(-gamma), min(np.float32(gamma), value))


def largest_values(change: Sequence[np.float32], theta: float, gamma: float | None = None) -> Selected:
    """Sort gradients and upload a θ_u fraction of them, starting from the biggest."""
    by_size = sorted(range(len(change)), key=lambda j: (-abs(change[j]), j))
    chosen = by_size[: at_most(theta, len(change))]
    return [(j, bound(change[j], gamma)) for j in sorted(chosen)]


def random_with_threshold(
    change: Sequence[np.float32], theta: float, tau: float, keys: Sequence[float], gamma: float | None = None
) -> Selected:
    """Truncate, go through them in random order, and upload if |Δw_j| ≥ τ, at most θ_u of them."""
    truncated = [bound(value, gamma) for value in change]
    chosen: list[int] = []
    for j in sorted(range(len(change)), key=lambda j: keys[j]):
        if len(chosen) == at_most(theta, len(change)):
            break
        if abs(truncated[j]) >= np.float32(tau):
            chosen.append(j)
    return [(j, truncated[j]) for j in sorted(chosen)]


class Server:
    """Figure 4."""

    def __init__(self, initial: Sequence[np.float32]) -> None:
        self.w: Parameters = list(initial)
        self.stat = [np.float32(0) for _ in initial]

    def upload(self, gradients: Selected) -> None:
        """EVENT: a participant uploads gradients Δw_S."""
        for j, value in gradients:
            self.w[j] = self.w[j] + value
            self.stat[j] = self.stat[j] + np.float32(1)

    def download(self, theta: float, keys: Sequence[float]) -> Selected:
        """EVENT: a participant downloads θ parameters: those of largest stat, equal ones at random."""
        by_stat = sorted(range(len(self.w)), key=lambda j: (-self.stat[j], keys[j]))
        return [(j, self.w[j]) for j in sorted(by_stat[: at_most(theta, len(self.w))])]

    def decay(self, beta: float) -> None:
        """Multiply the counters by β."""
        for j in range(len(self.stat)):
            self.stat[j] = self.stat[j] * np.float32(beta)


class Participant:
    """Figure 3, steps 1 to 3; what is uploaded is one of the two selections above."""

    def __init__(self, initial: Sequence[np.float32]) -> None:
        self.w: Parameters = list(initial)

    def replace(self, downloaded: Selected) -> None:
        """Step 1: replace the corresponding local parameters."""
        for j, value in downloaded:
            self.w[j] = value

    def move(self, change: Sequence[np.float32]) -> None:
        """Step 2: SGD has changed all local parameters."""
        for j in range(len(self.w)):
            self.w[j] = self.w[j] + change[j]
