"""Build an experiment's trainer and its network on this process's device."""

from __future__ import annotations

from fed_dp.clients import device
from fed_dp.clients.trainer import Trainer
from fed_dp.data.dataset import DataSet
from fed_dp.experiment import Experiment
from fed_dp.experiment.plan import release_plan
from fed_dp.models import FlatNetwork


def make_trainer(experiment: Experiment, dataset: DataSet) -> tuple[Trainer, FlatNetwork]:
    """Return the trainer, which the experiment's table builds, and its network."""
    network = experiment.network(dataset.shape, dataset.classes)
    net = FlatNetwork(network, device.choose(experiment.clients.gpus))
    plan = release_plan(experiment, client=0, size=net.size)
    trainer: Trainer = experiment.trainer.build(experiment, net, plan)
    return trainer, net
