"""DPME: M-estimators from a noisy histogram of all cells.

Reference: Lei, "Differentially Private M-Estimators", NIPS 2011.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from fed_dp.accounting.guarantee import Guarantee
from fed_dp.clients.synthetic import Synthetic, few_cells
from fed_dp.experiment.components import AuditSetup
from fed_dp.mechanisms.histogram import Grid, noisy_histogram

if TYPE_CHECKING:
    from fed_dp.mechanisms import Noise
    from fed_dp.mechanisms.noise import Integers, Reals

MAX_LISTED = 2**20  # cells
_REASON = (
    "a histogram over public cells (Lei 2011), of which a record is in one: that record moves one count by "
    "1, and Laplace noise of scale 1/ε on every cell, empty ones included, covers it; released once, "
    "whatever is trained on it is computed from what was released; {}"
)
PUBLIC = Guarantee(
    "dpme",
    "proved",
    "record",
    "zero-out one",
    _REASON.format("cells follow from the public number of records"),
)
DECLARED = Guarantee(
    "dpme_add_remove",
    "proved",
    "record",
    "add/remove one",
    _REASON.format("cells follow from a declared public number"),
)


class Dpme(Synthetic):
    """DPME: a noisy count of every cell; the network is trained on the cells' middles."""

    name: Literal["dpme"] = "dpme"

    guarantees = (PUBLIC, DECLARED)
    lists_all = True
    neighbours = {False: PUBLIC, True: DECLARED}  # noqa: RUF012 - a class variable, by its base

    def most_cells(self, *, secure: bool) -> int:
        """All cells are listed."""
        return MAX_LISTED

    def too_many(self, grid: Grid, *, secure: bool) -> str:
        """Say that all cells are listed."""
        return (
            f"trainer.name = 'dpme': {grid.attributes} attributes in {grid.bins} bins and {grid.classes} "
            f"classes are {grid.cells} cells, all of which get noise; expected up to {MAX_LISTED}: name "
            "fewer trainer.attributes or trainer.bins, or take trainer.name = 'filter-priority'"
        )

    def released(
        self, cells: Integers, grid: Grid, *, expected: int, epsilon: float, noise: Noise
    ) -> tuple[Integers, Reals] | Reals:
        """Return the noisy count of every cell."""
        return noisy_histogram(cells, grid, expected=expected, epsilon=epsilon, noise=noise)

    @classmethod
    def audits(cls) -> Mapping[str, Mapping[str, AuditSetup]]:
        """Audit a small histogram."""
        return {"dpme": {"proved": few_cells("dpme")}}
