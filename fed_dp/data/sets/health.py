"""A generated health social network of 254 people, by day or by week."""

from __future__ import annotations

from typing import ClassVar, Literal

from fed_dp.data.dataset import DataSet
from fed_dp.data.options import Embedded
from fed_dp.options import Size


class HealthDaily(Embedded):
    """300 days."""

    name: Literal["health-daily"] = "health-daily"
    influence: bool = True  # of friends: false leaves it out
    persons: Size | None = None  # how many there are: then their numbers stand in the records
    about = "health social network of 254 people, 300 days, generated"
    owners = "people"
    of_behaviour = True
    later_keys = ("persons",)
    weekly: ClassVar[bool] = False

    @property
    def numbered_persons(self) -> int | None:
        """As stated."""
        return self.persons

    def read(self) -> DataSet:
        """Generate all records."""
        from fed_dp.data.behaviour import numbered
        from fed_dp.data.health import health_network, without_influence

        found = health_network(weekly=self.weekly)
        return numbered(found if self.influence else without_influence(found), self.persons)


class HealthWeekly(HealthDaily):
    """48 weeks."""

    name: Literal["health-weekly"] = "health-weekly"  # type: ignore[assignment]
    about = "the same by 48 weeks, generated"
    weekly = True
