"""The hybrid SVM's frequencies, fitted to 200 public records of 14 numbers, 200 of them.

Baseline: as many evaluations of the same objective and slope over all pairs, as Eq. 6 has it (vectorised).
One thread each.
"""

from __future__ import annotations

import time

import entries
import numpy as np
from threadpoolctl import threadpool_limits

from fed_dp.models import fitted

RECORDS, INPUTS, COUNT, WIDTH = 200, 14, 200, 7.5
LIMIT = 0.1


def main() -> None:
    """Measure."""
    rng = np.random.default_rng(1)
    records, start = rng.uniform(-1, 1, (RECORDS, INPUTS)), rng.normal(size=(INPUTS, COUNT)) * 2**0.5 / WIDTH
    calls = 0
    real = fitted.minimize

    def counting(objective, *rest, **options):  # type: ignore[no-untyped-def]
        def counted(flat):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            return objective(flat)

        return real(counted, *rest, **options)

    fitted.minimize = counting
    apart = (records[:, None] - records[None]).reshape(-1, INPUTS)
    kernel = np.exp(-(apart**2).sum(1) / WIDTH**2)

    def by_pairs() -> None:
        angles = apart @ start
        error = np.cos(angles).mean(1) - kernel
        apart.T @ (np.sin(angles) * (-2 / COUNT * error)[:, None])

    with threadpool_limits(1):
        began = time.perf_counter()
        fitted.fitted_frequencies(records, start, WIDTH)
        value = time.perf_counter() - began
        [one] = entries.medians(by_pairs, repeats=4, dropped=1)
    baseline = calls * one
    entries.add(
        "svm/frequencies", value=value, unit="s", baseline=baseline, ratio=value / baseline, limit=LIMIT
    )


if __name__ == "__main__":
    main()
