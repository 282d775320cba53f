"""What an audit found: a lower bound, how sure it is, by which attack, and what it means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fed_dp.accounting.guarantee import guarantee
from fed_dp.accounting.statement import number

REFUTED = "refuted in this configuration"
NOT_REFUTED = "not refuted by this attack"
NOTHING_STATED = "nothing is stated that could be refuted"


@dataclass(frozen=True, slots=True)
class StatedGuarantee:
    """What is stated about a release: how sure it is, and whom it protects."""

    stated: str  # proved, claimed or refuted
    unit: str
    neighbours: str


@dataclass(frozen=True, slots=True)
class Finding:
    """The lower bound `bound` on ε at `delta`, against the ε that is stated (`claim`).

    `confidence` is 1 where the loss is exact. `trials` counts the runs of the mechanism in both worlds
    together; 0 where it was not sampled.
    """

    subject: str
    guarantee: StatedGuarantee
    claim: float
    delta: float
    bound: float  # −∞ where the attack showed nothing
    confidence: float
    attack: str
    trials: int = 0
    seed: int | None = None
    noise: float = 1.0  # by what the noise was multiplied, to see whether the audit notices

    @property
    def refuted(self) -> bool:
        """Whether more is lost than is stated; beyond the rounding errors of an exact loss."""
        return self.bound > self.claim * (1 + 1e-6)

    @property
    def verdict(self) -> str:
        """The finding in words. There is no word for a bound below the claim that says "verified"."""
        if self.claim == math.inf:
            return NOTHING_STATED
        return REFUTED if self.refuted else NOT_REFUTED

    def tables(self) -> dict[str, Any]:
        """Return it as plain tables."""
        claim = self.claim if math.isfinite(self.claim) else None
        tables = {**asdict(self), **asdict(self.guarantee), "claim": claim, "bound": _finite(self.bound)}
        del tables["guarantee"]
        return {**tables, "verdict": self.verdict}

    def lines(self) -> list[str]:
        """Return it for people: what is stated first, then the bound."""
        sure = "exact" if self.confidence == 1 else f"{self.confidence:.1%} confidence, {self.trials} trials"
        weakened = "" if self.noise == 1 else f"; with {self.noise:g} × its noise"
        seed = "" if self.seed is None else f", seed {self.seed}"
        return [
            f"{self.subject}: stated ε = {number(self.claim)}, δ = {self.delta:g} "
            f"({self.guarantee.stated}; one "
            f"{self.guarantee.unit}, {self.guarantee.neighbours}){weakened}",
            f"  at least ε = {bound_text(self.bound)} is lost ({sure}{seed}): {self.verdict}",
            f"  attack: {self.attack}",
        ]


def stated(name: str) -> StatedGuarantee:
    """Return what a named guarantee states."""
    found = guarantee(name)
    return StatedGuarantee(found.status, found.unit, found.neighbours)


def _finite(bound: float) -> float | None:
    """Return a bound for JSON: 0 where nothing was shown (ε is never less), none where it is infinite."""
    return None if bound == math.inf else max(bound, 0.0)


def bound_text(bound: float | None) -> str:
    """Write a bound as it stands in tables: no number is infinite."""
    return "∞" if bound is None or bound == math.inf else number(max(bound, 0.0))


def row_text(found: Mapping[str, Any], *, delta: float) -> str:
    """Return a finding's tables in a few words; at another δ than a row's, also what is stated there."""
    sure = "exact" if found["confidence"] == 1 else f"{found['confidence']:.1%}, {found['trials']} trials"
    verdict = f"; {found['verdict']}" if found["verdict"] == REFUTED else ""
    there = ""
    if found["delta"] != delta:
        there = f" of {bound_text(found['claim'])} at δ = {found['delta']:g}"
    return f"≥ {bound_text(found['bound'])}{there} ({sure}){verdict}"
