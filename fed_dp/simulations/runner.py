"""Running one experiment: our ServerApp and ClientApp over our own Grid, in a run folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from flwr.app import Context, RecordDict

from fed_dp.clients.building import make_trainer
from fed_dp.clients.trainer import ClientBatchTrainer
from fed_dp.experiment import Experiment, to_run_config
from fed_dp.experiment.federation import load, make_federation
from fed_dp.extras import installed, need
from fed_dp.mechanisms import SecureNoise
from fed_dp.runs.folder import RunFolder, new_path
from fed_dp.server.app import RUN_FOLDER, make_server_app
from fed_dp.server.observers import Observer, Several, Silent
from fed_dp.simulations.grid import RUN_ID, SERVER_NODE, Config, InProcessGrid, SimulationGrid

Engine = Literal["auto", "ray", "in-process"]


class _Clients(Silent):
    """Writes the clients' state beside every checkpoint of the server."""

    def __init__(self, grid: SimulationGrid) -> None:
        self._grid = grid

    def checkpoint(self, folder: Path, done: int) -> None:
        self._grid.save(folder, done)

    def restore(self, folder: Path, done: int) -> None:
        self._grid.load(folder, done)


def engine_for(engine: Engine, experiment: Experiment) -> Engine:
    """Return where an experiment runs. `auto` is Ray if it is installed, unless clients train one at a time.

    Then this process does it without the way to another and back, a third of a round of DSSGD's MLP.
    A GPU or a cluster that the experiment asks for is Ray's.
    """
    alone = experiment.nodes == 1 or experiment.strategy.one_at_a_time or not installed("ray")
    if engine == "auto":
        engine = (
            "in-process" if alone and not experiment.clients.gpus and not experiment.ray.address else "ray"
        )
    if engine == "ray":
        need("ray", extra="simulation", what="engine = 'ray'")
    return engine


def check(experiment: Experiment) -> int:
    """Tell of wrong data, an impossible partition, network or budget, or noise that is not there, at once.

    Return how many clients are worth training at once.
    """
    if experiment.privacy.noise_source == "secure":
        SecureNoise()
    trainer, _ = make_trainer(experiment, make_federation(experiment).dataset)
    return trainer.clients_at_once if isinstance(trainer, ClientBatchTrainer) else 1


def simulate(
    experiment: Experiment,
    *,
    observer: Observer,
    engine: Engine = "auto",
    root: Path = Path("runs"),
    folder: Path | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Run (or go on with) one experiment; return its run folder and its summary.

    `folder` that holds an unfinished run of this experiment is resumed; a finished one is returned.
    """
    client_batch = check(experiment)
    path = folder or new_path(root, experiment.name)
    if (path / "experiment.toml").is_file() and (done := RunFolder.open(path, experiment)).finished:
        return path, done.summary()
    config: Config = {**to_run_config(experiment), RUN_FOLDER: str(path.absolute())}
    with _grid(engine_for(engine, experiment), experiment, config, client_batch) as grid:
        app = make_server_app(Several(_Clients(grid), observer))
        app(grid, Context(RUN_ID, SERVER_NODE, {}, RecordDict(), config))
    return path, RunFolder(path).summary()


@contextmanager
def session(engine: Engine, *experiments: Experiment) -> Iterator[None]:
    """Hold one Ray session for several runs, if any of them runs on Ray."""
    on_ray = [e for e in experiments if engine_for(engine, e) == "ray"]
    if not on_ray:
        yield
        return
    from fed_dp.simulations.ray_grid import ray_session

    cluster = on_ray[0].ray
    with ray_session(cluster.address, object_store_gb=cluster.object_store_gb):
        yield


@contextmanager
def _grid(
    engine: Engine, experiment: Experiment, config: Config, client_batch: int
) -> Iterator[SimulationGrid]:
    if engine == "in-process":
        from fed_dp.clients.app import app

        yield InProcessGrid(experiment.nodes, config, app, client_batch)
        return
    from fed_dp.simulations.ray_grid import Pool, RayGrid

    clients = experiment.clients
    with session(engine, experiment):
        pool = Pool(
            clients=experiment.nodes,
            cpus=clients.cpus,
            gpus=clients.gpus,
            section=experiment.data,
            dataset=load(experiment.data),
        )
        try:
            yield RayGrid(experiment.nodes, config, pool, client_batch)
        finally:
            pool.close()
