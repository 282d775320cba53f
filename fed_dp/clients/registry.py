"""Which trainer an experiment names."""

from __future__ import annotations

from fed_dp.clients import device
from fed_dp.clients.psgd import PsgdTrainer
from fed_dp.clients.sgd import SgdTrainer
from fed_dp.clients.trainer import Trainer
from fed_dp.data.dataset import DataSet
from fed_dp.experiment import Experiment, Psgd
from fed_dp.models import FlatNetwork


def make_trainer(experiment: Experiment, dataset: DataSet) -> tuple[Trainer, FlatNetwork]:
    """Build the experiment's trainer and its network on this process's device."""
    where = device.choose(experiment.clients.gpus)
    net = FlatNetwork(experiment.model.name, dataset.shape, dataset.classes, where)
    config, privacy = experiment.trainer, experiment.privacy
    if isinstance(config, Psgd):
        assert privacy.budget_epsilon is not None  # by schema
        assert privacy.delta is not None
        trainer: Trainer = PsgdTrainer(
            config,
            net,
            budget_epsilon=privacy.budget_epsilon,
            delta=privacy.delta,
            rounds=experiment.rounds,
        )
        return trainer, net
    return SgdTrainer(config, net), net
