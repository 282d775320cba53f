"""The weights that a run begins with: drawn from its seed, or fitted to public records."""

from __future__ import annotations

from fed_dp.experiment.federation import Federation
from fed_dp.experiment.schema import Experiment
from fed_dp.models import Vector, initial_weights


def starting_weights(experiment: Experiment, members: Federation) -> Vector:
    """Return the weights of round 0; the same everywhere for the same experiment and records."""
    data = members.dataset
    return initial_weights(
        experiment.model.name,
        data.shape,
        data.classes,
        seed=experiment.seed,
        options=experiment.network,
        public=members.public if experiment.fits_to_public else None,
    )
