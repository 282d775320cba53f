"""The work that overhead is measured on: DSSGD's MLP, 600 records a client, batch 32, one epoch.

The records are generated (time does not depend on what they show), so no download is needed.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

CLIENTS, RECORDS, BATCH, ROUNDS, LEARNING_RATE = 100, 600, 32, 4, 0.01


@contextmanager
def generated_data() -> Iterator[Path]:
    """Write 10,000 random 32 × 32 images; each client draws 600 of them."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        for split, count in (("train", 10_000), ("test", 1_000)):
            x = rng.integers(0, 256, (count, 32, 32), dtype=np.uint8)
            np.savez(Path(name) / f"{split}.npz", X=x, y=rng.integers(0, 10, count))
        yield Path(name)


def tables(data: Path, **changes: Any) -> dict[str, Any]:
    """Return the experiment's tables."""
    partition = {"name": "fraction", "fraction": RECORDS / 10_000}
    return {
        "name": "benchmark",
        "rounds": ROUNDS,
        "evaluate_every": ROUNDS,
        "data": {
            "name": "folder",
            "path": str(data),
            "bounds": [0, 255],
            "classes": 10,
            "partition": partition,
        },
        "model": {"name": "dssgd-mlp"},
        "clients": {"count": CLIENTS},
        "trainer": {"name": "sgd", "learning_rate": LEARNING_RATE, "batch_size": BATCH},
        **changes,
    }


def bare_loop(processes: int) -> float:
    """Return seconds per client-round of a bare torch loop, its clients split over `processes`."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes)
    with context.Pool(processes, initializer=_set_barrier, initargs=(barrier,)) as pool:
        spans = pool.map(_bare, [CLIENTS // processes] * processes, chunksize=1)
    return (max(end for _, end in spans) - min(start for start, _ in spans)) / (CLIENTS * (ROUNDS - 1))


def _set_barrier(barrier: Any) -> None:
    globals()["_barrier"] = barrier


def _bare(clients: int) -> tuple[float, float]:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Linear(1024, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
        nn.LogSoftmax(1),
    )
    start_weights = {key: value.clone() for key, value in model.state_dict().items()}
    x, y = torch.randn(clients, RECORDS, 1024), torch.randint(0, 10, (clients, RECORDS))

    def train(client: int) -> None:
        model.load_state_dict(start_weights)
        optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
        for rows in torch.randperm(RECORDS).split(BATCH):
            optimizer.zero_grad()
            nn.functional.nll_loss(model(x[client][rows]), y[client][rows]).backward()
            optimizer.step()

    for client in range(clients):  # the first round warms up, as the first round of a run does
        train(client)
    globals()["_barrier"].wait()
    start = time.time()
    for _ in range(ROUNDS - 1):
        for client in range(clients):
            train(client)
    return start, time.time()
