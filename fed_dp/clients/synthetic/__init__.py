"""Synthetic records from a noisy histogram: what DPME and Filter-Priority share.

The histogram is released once. Each of its cells then stands for records in its middle, as many as were
counted, and logistic regression is fitted to these, free of charge.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from fed_dp.accounting.guarantee import Guarantee
from fed_dp.clients.functional import step_of
from fed_dp.errors import ConfigError
from fed_dp.experiment.components import AuditSetup, Limit, TrainerOptions
from fed_dp.mechanisms.histogram import Grid, recommended_bins
from fed_dp.options import Count, NonNegative

if TYPE_CHECKING:
    from fed_dp.clients.trainer import Trainer
    from fed_dp.experiment.plan import ReleasePlan
    from fed_dp.experiment.schema import Experiment
    from fed_dp.mechanisms import Noise
    from fed_dp.mechanisms.noise import Integers, Reals
    from fed_dp.models import FlatNetwork

Place = Annotated[int, Field(ge=0)]


class Synthetic(TrainerOptions):
    """Options of what is trained on synthetic records: released once, however many rounds follow."""

    # Which inputs span the grid, as places in a record's numbers; none: all. Public, like bins.
    attributes: Annotated[tuple[Place, ...], Field(strict=False, min_length=1)] | None = None
    # Of each attribute; none: as Lei's analysis asks of so many records.
    bins: Annotated[int, Field(ge=2, le=1000)] | None = None
    weight_decay: NonNegative = 1e-4
    local_steps: Count = 100  # of L-BFGS, at most
    perturb: bool = True  # false: no noise, no privacy

    needs = "logistic"
    divides_by_records = True
    lists_all: ClassVar[bool] = False  # whether the counts of all cells are kept, however many there are
    neighbours: ClassVar[dict[bool, Guarantee]]  # by whether the number of records is declared

    @property
    def private(self) -> bool:
        """Whether it adds noise."""
        return self.perturb

    def guarantee(self, experiment: Experiment) -> Guarantee:
        """Proved; neighbours follow from what sums are divided by."""
        return self.neighbours[experiment.data.expected_records is not None]

    def release_plan(self, experiment: Experiment, *, client: int, size: int) -> ReleasePlan:
        """One release of the histogram for the whole budget."""
        from fed_dp.accounting import Laplace
        from fed_dp.experiment.plan import ReleasePlan, budget_of

        budget = budget_of(experiment)
        assert budget is not None  # by check_privacy
        release = Laplace(budget.epsilon)
        name, source = self.guarantee(experiment).name, experiment.privacy.noise_source
        return ReleasePlan(release, name, source, (release,))

    def check(self, experiment: Experiment) -> None:
        """Refuse an attribute that is named twice."""
        named = self.attributes or ()
        if twice := sorted({place for place in named if named.count(place) > 1}):
            raise ValueError(f"trainer.attributes names {twice[0]} twice: expected places that differ")

    def check_noise(self, experiment: Experiment) -> None:
        """Refuse privacy that its noise, which is Laplace, does not give."""
        privacy = experiment.privacy
        if experiment.mechanism is None:
            if privacy != type(privacy)():
                raise ValueError("trainer.perturb = false adds no noise: no privacy key can hold")
        elif experiment.noisy_part is self and privacy.delta is not None:
            raise ValueError(
                f"privacy.delta = {privacy.delta:g}: trainer.name = {self.name!r} adds Laplace noise, which "
                "is ε-DP with δ = 0; expected without privacy.delta"
            )

    def limits(self, experiment: Experiment, *, client: int) -> dict[str, Limit]:
        """Limit descent steps."""
        return {"trainer.local_steps": (self.local_steps, "steps")}

    # ----------------------------------------------------------------------------------- cells

    @abstractmethod
    def most_cells(self, *, secure: bool) -> int:
        """Return how many cells it can count, with a secure source of noise or another one."""

    @abstractmethod
    def too_many(self, grid: Grid, *, secure: bool) -> str:
        """Say what is wrong with a grid of more."""

    @abstractmethod
    def released(
        self, cells: Integers, grid: Grid, *, expected: int, epsilon: float, noise: Noise
    ) -> tuple[Integers, Reals] | Reals:
        """Return noisy counts: of some cells, by number, or of all in order."""

    def grid(self, *, attributes: int, classes: int, records: int, secure: bool) -> Grid:
        """Return the grid for a public number of records: no finer than it can count.

        Raises
        ------
        ConfigError
            When even two bins for each attribute, or those asked for, are too many cells.
        """
        most, bins = self.most_cells(secure=secure), self.bins
        if bins is None:
            bins = recommended_bins(records=records, attributes=attributes)
            while bins > 2 and Grid(attributes, bins, classes).cells > most:
                bins -= 1
        if (grid := Grid(attributes, bins, classes)).cells > most:
            raise ConfigError(self.too_many(grid, secure=secure))
        return grid

    # ------------------------------------------------------------------------------------ building

    def build(self, experiment: Experiment, net: FlatNetwork, plan: ReleasePlan | None) -> Trainer:
        """Return the trainer."""
        from fed_dp.clients.synthetic.trainer import SyntheticTrainer

        return SyntheticTrainer(
            self,
            net,
            release=None if plan is None else plan.release,
            secure=experiment.privacy.noise_source == "secure",
            step=step_of(experiment),
        )


def few_cells(name: str) -> AuditSetup:
    """Return the smallest experiment: two attributes of digits, in two bins each."""
    return AuditSetup(
        model={"name": "logistic"},
        trainer={"name": name, "attributes": [20, 43], "bins": 2, "local_steps": 5},
    )
