"""A generated health social network of 254 people, by day or by week."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from fed_dp.data.dataset import DataSet
from fed_dp.data.options import Embedded
from fed_dp.options import Count, Size


class HealthDaily(Embedded):
    """300 days."""

    name: Literal["health-daily"] = "health-daily"
    influence: bool = True  # of friends: false leaves it out
    # M: consecutive time points that are used, or which share of those that there are; none: all.
    points: Count | Annotated[float, Field(gt=0, le=1)] | None = None
    test: Literal["latest", "random"] = (
        "latest"  # the last fifth of the time, or a random tenth of all records
    )
    label: Literal["next", "now"] = "next"  # more exercise at the next time point, or now than before
    persons: Size | None = None  # how many there are: then their numbers stand in the records
    about = "health social network of 254 people, 300 days, generated"
    owners = "people"
    of_behaviour = True
    later_keys = ("persons", "points", "test", "label")
    weekly: ClassVar[bool] = False

    @model_validator(mode="after")
    def _possible_points(self) -> HealthDaily:
        from fed_dp.data.health import WINDOW, most_points

        most, least = most_points(weekly=self.weekly, test=self.test), WINDOW if self.test == "latest" else 1
        if self.used_points is not None and not least <= self.used_points <= most:
            raise ValueError(
                f"data.points = {self.points}: data.name = {self.name!r} with data.test = {self.test!r} has "
                f"{most} time points, and a record spans {WINDOW}; expected {least}..{most}, or a share of "
                "them"
            )
        return self

    @property
    def used_points(self) -> int | None:
        """How many time points are used; None: all."""
        from fed_dp.data.health import most_points

        if not isinstance(self.points, float):
            return self.points
        return round(self.points * most_points(weekly=self.weekly, test=self.test))

    @property
    def numbered_persons(self) -> int | None:
        """As stated."""
        return self.persons

    def read(self) -> DataSet:
        """Generate all records."""
        from fed_dp.data.behaviour import numbered
        from fed_dp.data.health import health_network, without_influence

        found = health_network(weekly=self.weekly, points=self.used_points, test=self.test, label=self.label)
        return numbered(found if self.influence else without_influence(found), self.persons)


class HealthWeekly(HealthDaily):
    """48 weeks."""

    name: Literal["health-weekly"] = "health-weekly"  # type: ignore[assignment]
    about = "the same by 48 weeks, generated"
    weekly = True
