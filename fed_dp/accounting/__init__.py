"""What a release costs: events describe, composition interprets, ledgers keep, a statement tells people."""

from __future__ import annotations

from fed_dp.accounting.account import Account, Budget, Entry
from fed_dp.accounting.composition import epsilon, noise_multiplier, pure_epsilon, pure_share, total
from fed_dp.accounting.events import (
    Event,
    Gaussian,
    Laplace,
    Release,
    SampledGaussian,
    SparseVector,
    Unprotected,
    from_json,
    to_json,
)
from fed_dp.accounting.guarantee import GUARANTEES, Guarantee
from fed_dp.accounting.ledger import Ledger
from fed_dp.accounting.statement import Statement, spent, spread, statement

__all__ = [
    "GUARANTEES",
    "Account",
    "Budget",
    "Entry",
    "Event",
    "Gaussian",
    "Guarantee",
    "Laplace",
    "Ledger",
    "Release",
    "SampledGaussian",
    "SparseVector",
    "Statement",
    "Unprotected",
    "epsilon",
    "from_json",
    "noise_multiplier",
    "pure_epsilon",
    "pure_share",
    "spent",
    "spread",
    "statement",
    "to_json",
    "total",
]
