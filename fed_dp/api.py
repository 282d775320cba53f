"""fed_dp from Python: simulate, compare, and what a run came to."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fed_dp import plugins
from fed_dp.accounting import Budget, Statement
from fed_dp.data.options import Data
from fed_dp.errors import ConfigError
from fed_dp.experiment import Experiment, load_experiment, override
from fed_dp.experiment.components import StrategyOptions, TrainerOptions
from fed_dp.experiment.schema import Clients, Privacy
from fed_dp.experiment.source import build
from fed_dp.options import Section
from fed_dp.runs.folder import REPORT, RunFolder
from fed_dp.runs.saved_model import SavedModel
from fed_dp.runs.scores import final, metrics_of
from fed_dp.tasks import Task

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

Tables = Mapping[str, Any]
Engine = Literal["auto", "ray", "in-process"]
DEFAULT_CLIENTS = 10


def simulate(
    experiment: str | Path | Experiment | None = None,
    *,
    model: Any = None,
    data: Data | str | Tables | None = None,
    task: Task | type[Task] | str | Tables | None = None,
    trainer: TrainerOptions | str | Tables | None = None,
    strategy: StrategyOptions | str | Tables | None = None,
    privacy: Budget | Privacy | Tables | None = None,
    clients: int | Clients | Tables | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    settings: Sequence[str] = (),
    name: str | None = None,
    engine: Engine = "auto",
    folder: str | Path | None = None,
    runs: str | Path = "runs",
    progress: bool | None = None,
    track: Sequence[str] = (),
) -> Run:
    """Run a federated simulation and return what it came to.

    Parameters
    ----------
    experiment
        A shipped experiment ("digits:psgd"), a TOML file, or an `Experiment`: what is not given below is as
        it says. Without it, as the defaults are.
    model
        A factory of torch modules (a class or a function; arguments named `shape` and `classes` are filled
        in), a module, an import path, or the name of a shipped network.
    data
        `fed_dp.Data.from_arrays(…)`, or the name of a data set.
    task
        "classification", "binary", "multilabel", "regression", or a `fed_dp.Task`.
    trainer, strategy
        Options such as `fed_dp.Psgd(clip=1.0)` and `fed_dp.Averaging()`, or names.
    privacy
        `fed_dp.Budget(epsilon=…, delta=…)` of each client over the whole run.
    clients
        How many; by default one for each owner of records, or ten.
    settings
        Further keys as the command line takes them: "clients.fraction=0.5".
    engine
        "ray", "in-process", or "auto": Ray, unless clients train one at a time or Ray is not installed.
    folder
        The run folder. One that holds an unfinished run of the same experiment is resumed, a finished one is
        returned. By default a new one under `runs`.
    progress
        Whether to show a progress bar; by default, where standard error is a terminal.
    track
        "tensorboard" or "mlflow" (extras): where the curves are also written.

    Raises
    ------
    fed_dp.errors.FedDpError
        For every mistake that could be foreseen, before anything runs; the message names key and value.
    """
    from fed_dp.runs.report import write_report
    from fed_dp.server.tracking import tracked
    from fed_dp.simulations.runner import simulate as run

    parts = {"model": model, "data": data, "task": task, "trainer": trainer, "strategy": strategy}
    whole = experiment_of(
        experiment,
        {kind: value for kind, value in parts.items() if value is not None},
        privacy=privacy,
        clients=clients,
        plain={"rounds": rounds, "seed": seed, "name": name},
        settings=settings,
    )
    observer = tracked(_observer(progress), track)
    try:
        path, summary = run(
            whole,
            observer=observer,
            engine=engine,
            root=Path(runs),
            folder=None if folder is None else Path(folder),
        )
    finally:
        observer.stop()
    lines = RunFolder(path).lines()
    write_report(path / REPORT, whole.name, {whole.name: summary}, {whole.name: lines})
    return Run(path)


def experiment_of(
    experiment: str | Path | Experiment | None,
    parts: Mapping[str, Any],
    *,
    privacy: Any = None,
    clients: Any = None,
    plain: Tables | None = None,
    settings: Sequence[str] = (),
) -> Experiment:
    """Return an experiment with parts given from Python laid over it."""
    if experiment is None:
        tables: dict[str, Any] = {"clients": {"count": DEFAULT_CLIENTS}, "name": "simulation"}
    else:
        loaded = experiment if isinstance(experiment, Experiment) else load_experiment(experiment)
        tables = loaded.tables()
    for kind, value in parts.items():
        tables[kind] = component_table(kind, value)  # type: ignore[arg-type]
    if privacy is not None:
        tables["privacy"] = _privacy_table(privacy)
    owners = getattr(parts.get("data"), "clients", None)
    if clients is not None:
        tables["clients"] = {"count": clients} if isinstance(clients, int) else _table(clients)
    elif owners is not None:
        tables["clients"] = {**tables.get("clients", {}), "count": owners}
    tables |= {key: value for key, value in (plain or {}).items() if value is not None}
    return build(override(tables, settings))


def component_table(kind: plugins.Kind, value: Any) -> dict[str, Any] | str:
    """Return the table of an experiment that stands for an object; what no module holds is shared."""
    if isinstance(value, str):
        if kind == "model" and ":" in value:
            return {"factory": value}
        return {"name": value}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, type) and issubclass(value, Section):
        value = value()
    if isinstance(value, Section):
        table = _table(value)
        registered = value.__class__ in _registered(kind)
        return table if registered else {**table, "name": _path_of(type(value))}
    if kind == "model":
        return {"factory": _path_of(value)}
    raise ConfigError(f"{kind} = {value!r}: expected a name, a table, or options such as fed_dp.Psgd(…)")


def _registered(kind: plugins.Kind) -> set[type[Any]]:
    return set(plugins.components(kind).values())


def _table(section: Any) -> dict[str, Any]:
    return (
        dict(section) if isinstance(section, Mapping) else section.model_dump(mode="json", exclude_none=True)
    )


def _privacy_table(privacy: Any) -> dict[str, Any]:
    if isinstance(privacy, Budget):
        return {
            "budget_epsilon": float(privacy.epsilon),
            **({"delta": privacy.delta} if privacy.delta else {}),
        }
    return _table(privacy)


def _path_of(value: Any) -> str:
    """Return an import path of a class, function or module; where there is none, share it under one."""
    if inspect.isclass(value) or inspect.isfunction(value):
        module, name = value.__module__, value.__qualname__
        path = f"{module}:{name}"
        if "<" not in name:
            if module == "__main__":
                plugins.share(path, value)
            return path
    elif not callable(value):
        raise ConfigError(f"model = {value!r}: expected a torch module, a factory of them, or a name")
    made = value if hasattr(value, "__qualname__") else type(value)
    word = "".join(c if c.isalnum() else "_" for c in made.__qualname__)
    path = f"shared:{word}_{_content(value)}"
    plugins.share(path, value)
    return path


def _content(value: Any) -> str:
    """Return a short hash of what a module or function is, by which it is known in the experiment."""
    digest = hashlib.sha256(plugins.code_of(value).encode())
    if hasattr(value, "state_dict"):
        for name, tensor in value.state_dict().items():
            digest.update(name.encode() + tensor.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def _observer(progress: bool | None) -> Any:
    from fed_dp.server.observers import Silent

    if not (sys.stderr.isatty() if progress is None else progress):
        return Silent()
    from rich.console import Console

    from fed_dp.simulations.progress import ProgressBar

    return ProgressBar(Console(stderr=True, highlight=False))


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, and what stands in it."""

    folder: Path

    @cached_property
    def summary(self) -> dict[str, Any]:
        """What summary.json says."""
        return RunFolder(self.folder).summary()

    @property
    def experiment(self) -> Experiment:
        """The experiment, whole."""
        return RunFolder(self.folder).experiment()

    @property
    def privacy(self) -> Statement | None:
        """What it cost, the total first; None where nothing is private."""
        cost = self.summary["privacy"]
        return None if cost is None else Statement(**cost)

    @property
    def epsilon(self) -> float | None:
        """The total ε over the whole run; None where nothing is private."""
        return None if self.privacy is None else self.privacy.epsilon_total

    @property
    def scores(self) -> dict[str, float]:
        """The final score in each metric, the one to compare first."""
        return {metric.name: final(self.summary, metric) for metric in metrics_of(self.summary)}

    @property
    def history(self) -> pd.DataFrame:
        """A row for each round: its scores, the ε spent by then, clients, bytes and seconds."""
        import pandas as pd

        rows = []
        for line in RunFolder(self.folder).lines():
            numbers = {key: value for key, value in line.items() if isinstance(value, int | float)}
            spent = line["epsilon"] and line["epsilon"]["max"]
            counts = {f"clients_{key}": value for key, value in line["clients"].items()}
            sent = {f"bytes_{key}": line["bytes"][key] for key in ("uploaded", "downloaded")}
            rows.append({**numbers, "epsilon": spent, **counts, **sent})
        return pd.DataFrame(rows)

    @property
    def saved_model(self) -> SavedModel:
        """The trained model with `predict` and `scores`."""
        return load_model(self.folder)

    @property
    def model(self) -> nn.Module:
        """The trained torch module: of a network of one's own, the module that its factory made."""
        return self.saved_model.module()

    @property
    def report(self) -> Path:
        """The page about the run."""
        return self.folder / REPORT

    def __str__(self) -> str:
        """Tell of it in a few lines: scores, cost, folder."""
        told = ", ".join(
            f"{metric.label} {final(self.summary, metric):.4f}" for metric in metrics_of(self.summary)
        )
        cost = "no privacy" if self.privacy is None else str(self.privacy)
        return f"{self.summary['experiment']}: {told}\n{cost}\n{self.folder}"


def load_model(path: str | Path) -> SavedModel:
    """Return a trained model from a run folder, or from the model.npz in one."""
    return SavedModel.load(Path(path))


@dataclass(frozen=True)
class Comparison:
    """What a comparison came to: its folder, and all numbers."""

    folder: Path
    outcome: dict[str, Any]

    @property
    def report(self) -> Path:
        """The page about it."""
        return self.folder / REPORT

    @property
    def table(self) -> pd.DataFrame:
        """A row for each mechanism at each ε: as table.csv."""
        import pandas as pd

        return pd.read_csv(self.folder / "table.csv")


def compare(
    experiment: str | Path,
    *,
    epsilon: Sequence[float] = (),
    seeds: int | None = None,
    only: Sequence[str] = (),
    settings: Sequence[str] = (),
    profile: str | None = None,
    jobs: int | None = None,
    fresh: bool = False,
    audit: bool = True,
    runs: str | Path = "runs",
) -> Comparison:
    """Compare mechanisms at several ε, over several seeds, against pSGD and without privacy.

    As `fed-dp compare`: results are kept under `runs`, and nothing is run twice.
    """
    from fed_dp.comparison.compare import compare as run
    from fed_dp.experiment.comparing import plan

    planned = plan(
        str(experiment),
        epsilons=[float(each) for each in epsilon],
        seeds=seeds,
        only=list(only),
        settings=list(settings),
        wanted_profile=profile,
    )
    command = f"fed_dp.compare({str(experiment)!r}, epsilon={list(epsilon)}, seeds={seeds})"
    folder, found = run(planned, root=Path(runs), command=command, jobs=jobs, fresh=fresh, audit=audit)
    return Comparison(folder, found)
