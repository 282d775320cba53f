"""overhead/one-step: rounds of one step of pSGD, ten sites, against a bare loop of the same steps.

The bare loop: one process, one thread, the sites' features in memory; for each site a Poisson sample, the
clipped gradients of a linear head in closed form, noise, the mean of the sites, momentum. No accounting, no
ledger, no messages, no files. Compared is the time of a round after the first ones, in which features are
computed.
"""

from __future__ import annotations

import io
import tempfile
import time
from pathlib import Path
from typing import Any

import entries
import numpy as np
import torch

import fed_dp
from fed_dp.experiment import build
from fed_dp.models import use_one_thread
from fed_dp.runs.folder import RunFolder
from fed_dp.server.app import PlainLines
from fed_dp.simulations.runner import simulate

SITES, RECORDS, FEATURES, RATE, ROUNDS, LIMIT = 10, 6000, 1000, 0.125, 60, 1.3
DROPPED = 10  # rounds


def ours(x: np.ndarray, y: np.ndarray) -> float:
    """Return the seconds of a round in a simulation."""
    data = fed_dp.Data.from_arrays(x, y, test=(x[:100], y[:100]))
    experiment = build(
        {
            "rounds": ROUNDS,
            "evaluate_every": ROUNDS,
            "data": data.model_dump(mode="json", exclude_none=True),
            "model": {"name": "linear"},
            "clients": {"count": SITES},
            "trainer": {
                "name": "psgd", "local_steps": 1, "sample_rate": RATE,
                "clipping": "automatic", "learning_rate": 0.1,
            },
            "strategy": {"name": "averaging", "momentum": 0.9},
            "privacy": {"budget_epsilon": 1.0, "delta": 1e-5},
        }
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as root:
        began: list[float] = []

        class Clock(PlainLines):
            def round_done(self, line: dict[str, Any]) -> None:
                began.append(time.perf_counter())

        simulate(experiment, observer=Clock(io.StringIO()), engine="in-process", folder=Path(root) / "run")
        assert RunFolder(Path(root) / "run").finished
    return float(np.median(np.diff(began)[DROPPED:]))


@torch.no_grad()
def bare(x: np.ndarray, y: np.ndarray) -> float:
    """Return the seconds of a round in a bare loop."""
    parts = [
        (torch.from_numpy(x[k::SITES].copy()), torch.from_numpy(y[k::SITES].copy())) for k in range(SITES)
    ]
    weights, velocity = torch.zeros(10, FEATURES), torch.zeros(10, FEATURES)
    bias, push = torch.zeros(10), torch.zeros(10)
    source, times = torch.Generator().manual_seed(0), []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        mean, shift = torch.zeros_like(weights), torch.zeros_like(bias)
        for records, labels in parts:
            rows = (torch.rand(len(labels), generator=source) < RATE).nonzero()[:, 0]
            inputs = records[rows]
            pull = torch.softmax(inputs @ weights.T + bias, 1)
            pull[torch.arange(len(rows)), labels[rows]] -= 1
            norms = pull.norm(dim=1) * (inputs.square().sum(1) + 1).sqrt()
            pull /= (norms + 0.01)[:, None]
            expected = RATE * len(labels)
            mean -= (pull.T @ inputs + torch.empty_like(weights).normal_(generator=source)) / expected
            shift -= (pull.sum(0) + torch.empty_like(bias).normal_(generator=source)) / expected
        velocity.mul_(0.9).add_(mean)
        push.mul_(0.9).add_(shift)
        weights += 0.1 * velocity / SITES
        bias += 0.1 * push / SITES
        times.append(time.perf_counter() - began)
    return float(np.median(times[DROPPED:]))


def main() -> None:
    use_one_thread()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SITES * RECORDS, FEATURES)).astype(np.float32) / np.sqrt(FEATURES, dtype=np.float32)
    y = rng.integers(0, 10, len(x))
    found = [(bare(x, y), ours(x, y)) for _ in range(3)]
    baseline, value = (float(np.median(each)) for each in zip(*found, strict=True))
    entries.add_times("overhead/one-step", value / SITES, baseline=baseline / SITES, limit=LIMIT)


if __name__ == "__main__":
    main()
