"""The weights that a run begins with: drawn from its seed, or fitted to public records."""

from __future__ import annotations

from fed_dp.experiment.federation import Federation
from fed_dp.experiment.schema import Experiment
from fed_dp.models import NetworkSpec, Vector, initial_weights


def network_of(experiment: Experiment, federation: Federation) -> NetworkSpec:
    """Return what the experiment's network is built from, for the records at hand."""
    return experiment.network(federation.dataset.shape, federation.dataset.classes)


def starting_weights(experiment: Experiment, federation: Federation) -> Vector:
    """Return the weights of round 0; the same everywhere for the same experiment and records."""
    public = federation.public if experiment.fits_to_public else None
    return initial_weights(network_of(experiment, federation), seed=experiment.seed, public=public)
