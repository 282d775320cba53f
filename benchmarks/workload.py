"""The work that overhead is measured on: 600 records a client, batch 32, one epoch; DSSGD's MLP or its CNN.

The records are generated (time does not depend on what they show), so no download is needed.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

CLIENTS, RECORDS, BATCH, ROUNDS, LEARNING_RATE = 100, 600, 32, 4, 0.01
SAMPLE_RATE = BATCH / RECORDS
MODELS = {"mlp": "dssgd-mlp", "cnn": "dssgd-cnn-mnist"}
Kind = Literal["mlp", "cnn", "psgd"]


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


def bare_loop(processes: int, kind: Kind = "mlp", clients: int = CLIENTS, rounds: int = ROUNDS) -> float:
    """Return seconds per client-round of a bare torch loop, its clients split over `processes`.

    `psgd` is Opacus' usual loop of the MLP: PrivacyEngine.make_private and its Poisson DataLoader.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes)
    with context.Pool(processes, initializer=_set_barrier, initargs=(barrier,)) as pool:
        spans = pool.starmap(_bare, [(clients // processes, kind, rounds)] * processes, chunksize=1)
    return (max(end for _, end in spans) - min(start for start, _ in spans)) / (clients * (rounds - 1))


def _set_barrier(barrier: Any) -> None:
    globals()["_barrier"] = barrier


def _bare(clients: int, kind: Kind, rounds: int) -> tuple[float, float]:
    import torch

    torch.set_num_threads(1)
    x = torch.randn(clients, RECORDS, 1, 32, 32)
    y = torch.randint(0, 10, (clients, RECORDS))
    train = _private(x, y) if kind == "psgd" else _plain(x, y, kind)
    for client in range(clients):  # the first round warms up, as the first round of a run does
        train(client)
    globals()["_barrier"].wait()
    start = time.time()
    for _ in range(rounds - 1):
        for client in range(clients):
            train(client)
    return start, time.time()


def _network(kind: Kind) -> Any:
    from fed_dp.models import build

    return build(MODELS["cnn" if kind == "cnn" else "mlp"], (1, 32, 32), 10)


def _plain(x: Any, y: Any, kind: Kind) -> Callable[[int], None]:
    import torch
    from torch import nn

    model = _network(kind)
    if kind == "cnn":  # the order in which convolutions are fastest, for the baseline too
        model = model.to(memory_format=torch.channels_last)
        x = x.flatten(0, 1).to(memory_format=torch.channels_last).unflatten(0, x.shape[:2])
    start_weights = {key: value.clone() for key, value in model.state_dict().items()}

    def train(client: int) -> None:
        model.load_state_dict(start_weights)
        optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
        for rows in torch.randperm(RECORDS).split(BATCH):
            optimizer.zero_grad()
            nn.functional.nll_loss(model(x[client][rows]), y[client][rows]).backward()
            optimizer.step()

    return train


def _private(x: Any, y: Any) -> Callable[[int], None]:
    import warnings

    import torch
    from opacus import PrivacyEngine
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    warnings.simplefilter("ignore")

    def train(client: int) -> None:
        model = _network("psgd")
        private, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), LEARNING_RATE),
            data_loader=DataLoader(TensorDataset(x[client], y[client]), batch_size=BATCH),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.nll_loss(private(inputs), labels).backward()
            optimizer.step()

    return train
