"""The Laplace mechanism on bounded values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fed_dp.errors import PrivacyError
from fed_dp.mechanisms.noise import Noise, Reals


def laplace(
    values: Reals, *, bound: float, epsilon: float, noise: Noise, count: int | None = None
) -> NDArray[np.float64]:
    """Release up to `count` values, each clipped to [−bound, bound], with noise Lap(2·bound·count/ε).

    Guarantee: pure ε-DP for all of them together; proved.
    Neighbours: any two inputs; every value may change at once, by at most 2·bound each.
    `count` is how many there may be (by default as many as there are); it must not depend on the
    records where their number does.

    Reference: Dwork, McSherry, Nissim, Smith, TCC 2006, Proposition 1.
    """
    check(bound=bound, epsilon=epsilon)
    values = finite(values)
    most = values.size if count is None else count
    if values.size > most:
        raise PrivacyError(f"{values.size} values: at most {most} were agreed; nothing was sent")
    exact = values.astype(np.float64)  # in float32 the bound itself would be rounded, up
    return noise.laplace(np.clip(exact, -bound, bound), scale=2 * bound * max(most, 1) / epsilon)


def check(**positive: float) -> None:
    """Refuse a parameter that is not a positive number."""
    for name, value in positive.items():
        if not 0 < value < np.inf:
            raise PrivacyError(f"{name} = {value!r}: expected a number above 0")


def finite(values: Reals) -> Reals:
    """Return the values with 0 for what is no number.

    A refusal would tell something about the records; any fixed value within the bounds does not.
    Infinities are left to the clip.
    """
    return np.where(np.isnan(values), 0, values) if np.isnan(np.sum(values)) else values
