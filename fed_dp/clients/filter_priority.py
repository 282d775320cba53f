"""Filter-Priority: synthetic records from the cells of a noisy histogram that a filter and a sample keep.

Reference: Cormode, Procopiuc, Srivastava, Tran, "Differentially Private Summaries for Sparse Data", ICDT
2012.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from fed_dp.accounting.guarantee import Guarantee
from fed_dp.clients.synthetic import Synthetic, few_cells
from fed_dp.experiment.components import AuditSetup
from fed_dp.mechanisms.histogram import LISTED, MAX_CELLS, Grid, filter_priority, unlisted
from fed_dp.options import Count

if TYPE_CHECKING:
    from fed_dp.mechanisms import Noise
    from fed_dp.mechanisms.noise import Integers, Reals

_REASON = (
    "a histogram over public cells, of which a record is in one: that record moves one count by 1, and "
    "Laplace noise of scale 1/ε on every cell covers it; a filter by a public threshold and a priority "
    "sample (Cormode et al. 2012) are computed from noisy counts alone, and empty cells that pass are drawn "
    "as if all had been listed; released once; {}"
)
PUBLIC = Guarantee(
    "filter_priority",
    "proved",
    "record",
    "zero-out one",
    _REASON.format("cells, threshold and sample follow from the public number of records"),
)
DECLARED = Guarantee(
    "filter_priority_add_remove",
    "proved",
    "record",
    "add/remove one",
    _REASON.format("cells, threshold and sample follow from a declared public number"),
)


class FilterPriority(Synthetic):
    """Filter-Priority: noisy counts of a sparse histogram; training is on the middles of the cells kept."""

    name: Literal["filter-priority"] = "filter-priority"
    size: Count | None = None  # of the sample; none: as many cells as there are (expected) records

    guarantees = (PUBLIC, DECLARED)
    neighbours = {False: PUBLIC, True: DECLARED}  # noqa: RUF012 - a class variable, by its base

    def most_cells(self, *, secure: bool) -> int:
        """Where noise is exact, all cells are listed."""
        return LISTED if secure else MAX_CELLS

    def too_many(self, grid: Grid, *, secure: bool) -> str:
        """Say why there are too many cells."""
        if secure:
            return unlisted(grid)
        return (
            f"trainer.name = 'filter-priority': {grid.attributes} attributes in {grid.bins} bins and "
            f"{grid.classes} classes are {grid.cells:.3g} cells; expected up to {MAX_CELLS:.3g}, whose "
            "numbers are exact: name fewer trainer.attributes or trainer.bins"
        )

    def released(
        self, cells: Integers, grid: Grid, *, expected: int, epsilon: float, noise: Noise
    ) -> tuple[Integers, Reals] | Reals:
        """Return the cells that are kept, and their noisy counts."""
        size = self.size or expected
        return filter_priority(cells, grid, expected=expected, epsilon=epsilon, size=size, noise=noise)

    @classmethod
    def audits(cls) -> Mapping[str, Mapping[str, AuditSetup]]:
        """Audit a small histogram."""
        return {"filter-priority": {"proved": few_cells("filter-priority")}}
