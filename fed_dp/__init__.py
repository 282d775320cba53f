"""fed_dp: private federated learning on Flower, where every number about privacy can be checked.

>>> import fed_dp
>>> run = fed_dp.simulate(
...     data="digits",
...     model="linear",
...     trainer=fed_dp.Psgd(sample_rate=0.25, learning_rate=2.0),
...     strategy=fed_dp.Averaging(),
...     privacy=fed_dp.Budget(epsilon=8, delta=1e-5),
...     clients=5,
...     rounds=3,
...     engine="in-process",
... )
>>> run.epsilon <= 8
True

Names are imported when they are first used: `import fed_dp` takes no longer than NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fed_dp.lazy import exports
from fed_dp.version import __version__

if TYPE_CHECKING:
    from fed_dp.accounting import Budget, Guarantee, Statement
    from fed_dp.api import Comparison, Run, compare, load_model, simulate
    from fed_dp.clients.adlm import Adlm, Ilm
    from fed_dp.clients.dpa import Dpa
    from fed_dp.clients.pcdbn import Pcdbn
    from fed_dp.clients.psgd import Psgd
    from fed_dp.clients.sgd import Sgd
    from fed_dp.clients.svm import Svm
    from fed_dp.data.sets.arrays import Arrays as Data
    from fed_dp.experiment.components import StrategyOptions, TrainerOptions
    from fed_dp.experiment.schema import Clients, Experiment, Privacy
    from fed_dp.models.network import Network
    from fed_dp.strategies.averaging import Averaging
    from fed_dp.strategies.baselines import Centralised, Public, Standalone
    from fed_dp.strategies.dssgd import Dssgd
    from fed_dp.strategies.statistics import Statistics
    from fed_dp.tasks import Binary, Classification, Metric, MultiLabel, Regression, Task

__all__ = [
    "Adlm",
    "Averaging",
    "Binary",
    "Budget",
    "Centralised",
    "Classification",
    "Clients",
    "Comparison",
    "Data",
    "Dpa",
    "Dssgd",
    "Experiment",
    "Guarantee",
    "Ilm",
    "Metric",
    "MultiLabel",
    "Network",
    "Pcdbn",
    "Privacy",
    "Psgd",
    "Public",
    "Regression",
    "Run",
    "Sgd",
    "Standalone",
    "Statement",
    "Statistics",
    "StrategyOptions",
    "Svm",
    "Task",
    "TrainerOptions",
    "__version__",
    "compare",
    "load_model",
    "simulate",
]
_HOMES = {
    "accounting": ("Budget", "Guarantee", "Statement"),
    "api": ("Comparison", "Run", "compare", "load_model", "simulate"),
    "clients.adlm": ("Adlm", "Ilm"),
    "clients.dpa": ("Dpa",),
    "clients.pcdbn": ("Pcdbn",),
    "clients.psgd": ("Psgd",),
    "clients.sgd": ("Sgd",),
    "clients.svm": ("Svm",),
    "data.sets.arrays:Arrays": ("Data",),
    "experiment.components": ("StrategyOptions", "TrainerOptions"),
    "experiment.schema": ("Clients", "Experiment", "Privacy"),
    "models.network": ("Network",),
    "strategies.averaging": ("Averaging",),
    "strategies.baselines": ("Centralised", "Public", "Standalone"),
    "strategies.dssgd": ("Dssgd",),
    "strategies.statistics": ("Statistics",),
    "tasks": ("Binary", "Classification", "Metric", "MultiLabel", "Regression", "Task"),
}
_HOMES_BY_NAME = {name: module for module, listed in _HOMES.items() for name in listed}
_exported = exports(__name__, _HOMES_BY_NAME)


def __getattr__(name: str) -> object:
    """Import a name, or the package `flower`, when it is first used."""
    return import_module("fed_dp.flower") if name == "flower" else _exported(name)
