"""Which trainer an experiment names."""

from __future__ import annotations

from fed_dp.accounting import SampledGaussian
from fed_dp.clients import device
from fed_dp.clients.adlm import AdlmTrainer
from fed_dp.clients.paper import PaperTrainer
from fed_dp.clients.psgd import PsgdTrainer
from fed_dp.clients.sgd import SgdTrainer
from fed_dp.clients.statistics import StatisticsTrainer
from fed_dp.clients.svm import SvmTrainer
from fed_dp.clients.trainer import Trainer
from fed_dp.data.dataset import DataSet
from fed_dp.experiment import Dpa, Experiment, Functional, LaplaceMechanism, Pcdbn, Psgd, Svm
from fed_dp.experiment.pairs import PAPER_MODELS
from fed_dp.experiment.release import agreement, svm_noise
from fed_dp.models import FlatNetwork


def make_trainer(experiment: Experiment, dataset: DataSet) -> tuple[Trainer, FlatNetwork]:
    """Build the experiment's trainer and its network on this process's device."""
    where = device.choose(experiment.clients.gpus)
    model = experiment.model
    net = FlatNetwork(model.name, dataset.shape, dataset.classes, where, experiment.network)
    config = experiment.trainer
    agreed = agreement(experiment, client=0, size=net.size)
    if isinstance(config, Psgd):
        assert agreed is not None  # by schema
        assert isinstance(agreed.release, SampledGaussian)
        return PsgdTrainer(
            config,
            net,
            release=agreed.release,
            noise_source=experiment.privacy.noise_source,
            together=experiment.clients.at_once,
        ), net
    if isinstance(config, Svm):
        return SvmTrainer(
            config,
            net,
            release=None if agreed is None else agreed.release,
            kind=svm_noise(experiment),
            step=_step(experiment),
            as_printed=experiment.privacy.variant == "paper_as_printed",
        ), net
    if isinstance(config, LaplaceMechanism) and model.name in PAPER_MODELS:
        return AdlmTrainer(
            config,
            net,
            epsilon=experiment.privacy.budget_epsilon,
            shared=experiment.privacy.variant == "paper_as_released",
        ), net
    if isinstance(config, Dpa | Pcdbn) and model.name in PAPER_MODELS:
        return PaperTrainer(
            config,
            net,
            epsilon=experiment.privacy.budget_epsilon,
            as_printed=experiment.privacy.variant == "paper_as_printed" or not config.perturb,
            as_released=experiment.privacy.variant == "paper_as_released",
        ), net
    if isinstance(config, Functional):
        return StatisticsTrainer(
            config,
            net,
            stages=None if agreed is None else agreed.stages,
            sites=_together(experiment),
            sends_statistics=experiment.strategy.name == "statistics",
            step=_step(experiment),
        ), net
    return SgdTrainer(config, net, together=experiment.clients.at_once), net


def _together(experiment: Experiment) -> int:
    """Return how many sites a round's model comes from."""
    if experiment.strategy.name not in ("averaging", "dssgd"):
        return 1
    return max(1, round(experiment.clients.count * experiment.clients.fraction))


def _step(experiment: Experiment) -> float:
    """Return how far a site moves the model towards its own: under dssgd, where moves add up, its part."""
    return 1 / _together(experiment) if experiment.strategy.name == "dssgd" else 1.0
