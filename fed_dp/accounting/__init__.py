"""What a release costs: events describe, composition interprets, a statement tells people."""

from __future__ import annotations

from fed_dp.accounting.composition import epsilon, noise_multiplier
from fed_dp.accounting.events import Event, SampledGaussian, from_json, to_json
from fed_dp.accounting.statement import Statement, spent, spread, statement

__all__ = [
    "Event",
    "SampledGaussian",
    "Statement",
    "epsilon",
    "from_json",
    "noise_multiplier",
    "spent",
    "spread",
    "statement",
    "to_json",
]
