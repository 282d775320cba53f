"""What a release costs: events describe, composition interprets, ledgers keep, a statement tells people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fed_dp.lazy import exports

if TYPE_CHECKING:
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
    from fed_dp.accounting.guarantee import Guarantee, guarantees
    from fed_dp.accounting.ledger import Ledger
    from fed_dp.accounting.statement import Statement, spent, spread

__all__ = [
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
    "guarantees",
    "noise_multiplier",
    "pure_epsilon",
    "pure_share",
    "spent",
    "spread",
    "to_json",
    "total",
]
__getattr__ = exports(
    __name__,
    {
        "Account": "account",
        "Budget": "account",
        "Entry": "account",
        "Event": "events",
        "Gaussian": "events",
        "Guarantee": "guarantee",
        "Laplace": "events",
        "Ledger": "ledger",
        "Release": "events",
        "SampledGaussian": "events",
        "SparseVector": "events",
        "Statement": "statement",
        "Unprotected": "events",
        "epsilon": "composition",
        "from_json": "events",
        "guarantees": "guarantee",
        "noise_multiplier": "composition",
        "pure_epsilon": "composition",
        "pure_share": "composition",
        "spent": "statement",
        "spread": "statement",
        "to_json": "events",
        "total": "composition",
    },
)
