"""Which trainer an experiment names."""

from __future__ import annotations

from fed_dp.accounting import SampledGaussian
from fed_dp.clients import device
from fed_dp.clients.psgd import PsgdTrainer
from fed_dp.clients.sgd import SgdTrainer
from fed_dp.clients.trainer import Trainer
from fed_dp.data.dataset import DataSet
from fed_dp.experiment import Experiment, Psgd
from fed_dp.experiment.release import agreement
from fed_dp.models import FlatNetwork


def make_trainer(experiment: Experiment, dataset: DataSet) -> tuple[Trainer, FlatNetwork]:
    """Build the experiment's trainer and its network on this process's device."""
    where = device.choose(experiment.clients.gpus)
    net = FlatNetwork(experiment.model.name, dataset.shape, dataset.classes, where)
    config = experiment.trainer
    agreed = agreement(experiment, client=0, size=net.size)
    if isinstance(config, Psgd):
        assert agreed is not None  # by schema
        assert isinstance(agreed.release, SampledGaussian)
        return PsgdTrainer(config, net, release=agreed.release), net
    return SgdTrainer(config, net), net
