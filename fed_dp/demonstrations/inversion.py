"""Gradient inversion: what one DSSGD upload shows of the record it was computed from.

A participant trains one step on one record and uploads its largest changes. Those of the first layer's
weights are an outer product, δ xᵀ: every row that is uploaded is the record, up to a factor. The attacker
takes the leading singular vector of what was uploaded, zeros elsewhere. It knows the network, nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fed_dp import seeds
from fed_dp.clients.building import make_trainer
from fed_dp.clients.trainer import ClientData
from fed_dp.clients.update_exchange import UpdateExchange
from fed_dp.data.dataset import Floats, Integers
from fed_dp.demonstrations.pictures import experiment_on, grid, table, write
from fed_dp.experiment import Experiment
from fed_dp.experiment.federation import make_federation
from fed_dp.experiment.plan import guarantee_of, release_plan
from fed_dp.experiment.start import starting_weights
from fed_dp.mechanisms import SimulationNoise
from fed_dp.models import use_one_thread
from fed_dp.sharing.codec import decode

SHOWN, MEASURED = 6, 40  # records
_PSGD = {"name": "psgd", "sample_rate": 1.0, "learning_rate": 0.1}
UPLOADS: dict[str, dict[str, Any]] = {
    "all changes": {"strategy": {"name": "dssgd", "upload_fraction": 1.0}},
    "largest 10 %": {"strategy": {"name": "dssgd", "upload_fraction": 0.1}},
    "largest 1 %": {"strategy": {"name": "dssgd", "upload_fraction": 0.01}},
    "largest 10 %, truncated to γ = 0.001, no noise": {
        "strategy": {"name": "dssgd", "upload_fraction": 0.1, "bound": 0.001}
    },
    "largest 10 %, each record clipped and noised (pSGD), ε = 8": {
        "strategy": {"name": "dssgd", "upload_fraction": 0.1},
        "trainer": _PSGD,
        "privacy": {"budget_epsilon": 8.0, "delta": 1e-5},
    },
    "sparse vector, γ = 0.001, ε = 8 for the whole upload": {
        "strategy": {"name": "dssgd", "selection": "sparse_vector", "upload_fraction": 0.1, "bound": 0.001},
        "privacy": {"budget_epsilon": 8.0},
    },
}


def inversion(data: str, out: Path, *, seed: int = 1) -> list[dict[str, Any]]:
    """Attack every kind of upload; write a page of pictures, and return how near the attacker came."""
    use_one_thread()
    pictures: dict[str, list[NDArray[np.float64]]] = {}
    rows: list[dict[str, Any]] = []
    for name, changes in UPLOADS.items():
        tables = {"rounds": 1, "seed": seed, "clients": {"count": 1}, "model": {"name": "small-mlp"}}
        tables |= {"trainer": {"name": "sgd", "learning_rate": 0.1}, **changes}
        experiment = experiment_on(data, tables)
        x, found = _attacked(experiment, seed)
        near = [abs(float(np.corrcoef(a.ravel(), b.ravel())[0, 1])) for a, b in zip(x, found, strict=True)]
        pictures.setdefault("the record", [image.squeeze() for image in x[:SHOWN]])
        pictures[name] = [image.squeeze() for image in found[:SHOWN]]
        guarantee = guarantee_of(experiment)
        rows.append(
            {
                "upload": name,
                "|correlation|, median": float(np.median(near)),
                "worst record": float(np.max(near)),
                "guarantee": "none"
                if guarantee is None
                else f"{guarantee.status}, ε = {_epsilon(experiment)}",
            }
        )
    short = {name.replace(", ", ",\n", 1): images for name, images in pictures.items()}
    alt = "; ".join(f"{row['upload']}: median correlation {row['|correlation|, median']:.2f}" for row in rows)
    body = f"""<h1>What one upload shows of a record</h1>
<p>A participant trains one step on one record of {data} and uploads its largest changes. The server takes the
leading singular vector of what came for the first layer. Selection is not privacy: a tenth of the changes
shows nearly as much as all of them, and truncation alone leaves the outline. Noise hides it.</p>
{table(rows)}
{grid(short, alt=f"Records and what was reconstructed. {alt}")}
<p class="soft">{MEASURED} records, seed {seed}. One record and one step are the worst case: with more of
both, uploads mix, and the picture fades without becoming private.</p>"""
    write(out, "Gradient inversion", body)
    return rows


def _attacked(experiment: Experiment, seed: int) -> tuple[Floats, list[NDArray[np.float64]]]:
    """Return records, and what an attacker makes of the upload of each."""
    federation = make_federation(experiment)
    trainer, net = make_trainer(experiment, federation.dataset)
    weights = starting_weights(experiment, federation)
    agreed = release_plan(experiment, client=0, size=net.size)
    participant = UpdateExchange.of(experiment, 0, net.size, None if agreed is None else agreed.release)
    x, y = federation.client(0)
    x, y = x[:MEASURED], y[:MEASURED]
    shape = tuple(net.parameters[0].shape)
    found = []
    for record in range(len(y)):
        site = _site(x, y, record, seed)
        change = trainer.fit(weights, site, {}).change
        noise = SimulationNoise(seeds.generator(seed, "demo noise", record))
        data = participant.upload(change, seed=seed, server_round=1, client=record, noise=noise)
        upload = np.zeros(net.size, np.float32)
        decode(data, size=net.size, most=net.size).overwrite(upload)
        found.append(_reconstructed(upload[: shape[0] * shape[1]].reshape(shape)).reshape(x.shape[1:]))
    return x, found


def _epsilon(experiment: Experiment) -> str:
    return f"{experiment.privacy.budget_epsilon:g} for the whole upload"


def _site(x: Floats, y: Integers, record: int, seed: int) -> ClientData:
    return ClientData(
        x[record : record + 1], y[record : record + 1], client=record, server_round=1, seed=seed
    )


def _reconstructed(changes: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the leading right singular vector; its sign such that the corner is dark."""
    _, _, right = np.linalg.svd(changes.astype(np.float64), full_matrices=False)
    return np.asarray(-right[0] if right[0][0] > np.median(right[0]) else right[0])
