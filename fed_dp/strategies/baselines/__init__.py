"""The reference lines: all records in one place, the public records alone, and nobody sharing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from fed_dp.experiment.components import StrategyOptions, StrategySetting

if TYPE_CHECKING:
    from fed_dp.data.dataset import Integers
    from fed_dp.experiment.schema import Experiment
    from fed_dp.strategies.site_strategy import SiteStrategy


class Pooled(StrategyOptions):
    """One node has all that is used."""

    pooled = True

    def build(self, setting: StrategySetting) -> SiteStrategy:
        """Return the strategy."""
        from fed_dp.strategies.baselines.strategy import CentralisedStrategy

        return CentralisedStrategy(setting.weights, setting.sites, **setting.common)


class Centralised(Pooled):
    """All records in one place."""

    name: Literal["centralised"] = "centralised"

    def pooled_records(self, parts: Sequence[Integers], public: Integers | None) -> Integers:
        """Return all records."""
        return np.unique(np.concatenate(parts))


class Public(Pooled):
    """The public records alone (data.public_records), in one place: what can be had without the others."""

    name: Literal["public"] = "public"
    public_alone = True
    audited_by_runs = False

    def pooled_records(self, parts: Sequence[Integers], public: Integers | None) -> Integers:
        """Return the public records."""
        assert public is not None  # by check
        return public

    def check(self, experiment: Experiment) -> None:
        """Refuse noise, and to do without public records."""
        if experiment.private or not experiment.data.public_records:
            raise ValueError(
                "strategy.name = 'public' trains on public records alone: expected data.public_records, and "
                "a trainer that adds no noise"
            )


class Standalone(StrategyOptions):
    """Every site alone."""

    name: Literal["standalone"] = "standalone"
    one_model = False
    audited_by_runs = False

    def build(self, setting: StrategySetting) -> SiteStrategy:
        """Return the strategy."""
        from fed_dp.strategies.baselines.strategy import StandaloneStrategy

        return StandaloneStrategy(setting.weights, setting.sites, **setting.common)
