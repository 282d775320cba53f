"""Membership inference: who was trained on shows in the loss, where training is not private.

A federation trains on few records until it fits them. The attacker has the final model and a record, and says
"trained on" where the loss is small.

Reference: Yeom, Giacomelli, Fredrikson, Jha, "Privacy Risk in Machine Learning", CSF 2018.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score, roc_curve

from fed_dp.demonstrations.pictures import experiment_on, table, write
from fed_dp.experiment import Experiment
from fed_dp.experiment.federation import make_federation
from fed_dp.models import Evaluator
from fed_dp.runs.chart import Chart, Point, Series, to_html
from fed_dp.runs.saved_model import SavedModel
from fed_dp.server.observers import Silent
from fed_dp.simulations.runner import simulate

SITES, RECORDS = 5, 150  # that are trained on
_SGD = {"name": "sgd", "learning_rate": 0.2, "local_epochs": 5, "batch_size": 16}
RUNS: dict[str, dict[str, Any]] = {
    "no privacy": {"trainer": _SGD, "rounds": 40},
    **{
        f"pSGD, ε = {epsilon:g}": {
            "trainer": {"name": "psgd", "sample_rate": 1.0, "learning_rate": rate},
            "rounds": 40,
            "privacy": {"budget_epsilon": epsilon, "delta": 1e-5},
        }
        for epsilon, rate in ((8.0, 0.5), (1.0, 0.1))
    },
}


def membership(data: str, out: Path, *, seed: int = 1) -> list[dict[str, Any]]:
    """Train, attack by loss, write a page with the attack's curves, and return how well it did."""
    rows, series = [], []
    for name, changes in RUNS.items():
        there = len(make_federation(experiment_on(data, {"clients": {"count": 1}})).dataset.train)
        # All other records are set aside: nobody trains on them.
        tables = {"seed": seed, "clients": {"count": SITES}, "model": {"name": "small-mlp"}, **changes}
        aside = {"data": {"name": data, "public_records": there - RECORDS}}
        federation, others, summary = _losses(experiment_on(data, tables | aside))
        cost = summary["privacy"]
        labels = np.concatenate([np.ones(len(federation)), np.zeros(len(others))])
        scores = -np.concatenate([federation, others])
        false, true, _ = roc_curve(labels, scores)
        rows.append(
            {
                "training": name,
                "guarantee": "none"
                if cost is None
                else f"{cost['guarantee']}, total ε = {cost['epsilon_total']:.3f}",
                "attack's AUC": float(roc_auc_score(labels, scores)),
                "found at 1 % false alarms": float(np.interp(0.01, false, true)),
                "loss, trained on": float(federation.mean()),
                "loss, others": float(others.mean()),
                "test accuracy": float(summary["accuracy"]["final"]),
            }
        )
        at = np.linspace(0, 1, 41)
        curve = np.interp(at, false, true)
        series.append(Series(name, tuple(Point(float(a), float(b)) for a, b in zip(at, curve, strict=True))))
    series.append(Series("a coin", (Point(0.0, 0.0), Point(1.0, 1.0))))
    chart = Chart(
        "membership", "The attack: records found, against false alarms", "false alarms", "records found",
        tuple(series), share=True,
    )  # fmt: skip
    body = f"""<h1>Who was trained on</h1>
<p>{SITES} sites train on {RECORDS} records of {data} together. The attacker has the final model and a
record, and says "trained on" where the loss is small. ε is the total of the whole run, per record, δ = 1e-5,
proved.</p>
{table(rows)}
{to_html(chart)}
<p class="soft">Seed {seed}. This attack is a weak one: that it fails shows nothing; fed-dp audit has better
ones.</p>"""
    write(out, "Membership inference", body)
    return rows


def _losses(experiment: Experiment) -> tuple[NDArray[np.float64], NDArray[np.float64], dict[str, Any]]:
    """Return the final model's losses of what it was trained on and of other records, and the summary."""
    federation = make_federation(experiment)
    with tempfile.TemporaryDirectory() as folder:
        path, summary = simulate(
            experiment, observer=Silent(), engine="in-process", folder=Path(folder) / "run"
        )
        model = SavedModel.load(path)
    inside = np.unique(np.concatenate(federation.parts))
    outside = np.setdiff1d(np.arange(len(federation.dataset.train)), inside)[:5000]
    found = []
    for rows in (inside, outside):
        data = federation.dataset
        x, y = data.inputs(data.train, rows), data.train.y[rows]
        evaluator = Evaluator(experiment.network(data.shape, data.classes), x, y)
        found.append(evaluator.losses(model.weights))
    return found[0], found[1], summary
