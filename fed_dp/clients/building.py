"""Build an experiment's trainer and its network on this process's device."""

from __future__ import annotations

from fed_dp import plugins
from fed_dp.clients import device
from fed_dp.clients.trainer import Trainer
from fed_dp.data.dataset import DataSet
from fed_dp.errors import ConfigError
from fed_dp.experiment import Experiment
from fed_dp.experiment.plan import release_plan
from fed_dp.models import FlatNetwork
from fed_dp.tasks import TARGET_WORDS


def check_targets(experiment: Experiment, dataset: DataSet) -> None:
    """Refuse data whose targets are not those of the task."""
    if dataset.targets != (wanted := experiment.task.targets):
        fitting = [
            repr(name)
            for name, task in plugins.own_components("task").items()
            if task.targets == dataset.targets
        ]
        raise ConfigError(
            f"task.name = {experiment.task.name!r} takes {TARGET_WORDS[wanted]}; {dataset.name} has "
            f"{TARGET_WORDS[dataset.targets]}; expected task.name = {' or '.join(fitting)}"
        )


def make_trainer(experiment: Experiment, dataset: DataSet) -> tuple[Trainer, FlatNetwork]:
    """Return the trainer, which the experiment's table builds, and its network."""
    check_targets(experiment, dataset)
    network = experiment.network(dataset.shape, dataset.classes)
    net = FlatNetwork(network, device.choose(experiment.clients.gpus))
    plan = None  # where a selection of its changes is what is private, the trainer itself adds no noise
    if experiment.noisy_part is experiment.trainer:
        plan = release_plan(experiment, client=0, size=net.size)
    trainer: Trainer = experiment.trainer.build(experiment, net, plan)
    return trainer, net
