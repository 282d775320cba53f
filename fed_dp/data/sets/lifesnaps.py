"""LifeSnaps: daily activity of 71 people, by day or in windows of four days."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from fed_dp.data.dataset import DataSet, Floats, Records, divided, identity
from fed_dp.data.files import File, verified
from fed_dp.data.options import Published
from fed_dp.data.tables import Columns
from fed_dp.options import Size

if TYPE_CHECKING:
    import pandas as pd

_LIFESNAPS = (
    File(
        "daily_fitbit_sema_df_unprocessed.csv",
        "679a29a08598ad37ae5970f9a9d108802bed9cb6cac1a13747aa8e821da160ad",
    ),
)
LIFESNAPS_COLUMNS = Columns(
    bounds={
        "steps": (0, 30_000),
        "steps_before": (0, 30_000),
        "distance": (0, 25_000),
        "calories": (0, 6_000),
        "lightly_active_minutes": (0, 600),
        "moderately_active_minutes": (0, 200),
        "very_active_minutes": (0, 300),
        "sedentary_minutes": (0, 1_440),
        "resting_hr": (40, 100),
        "minutesAsleep": (0, 900),
        "stress_score": (0, 100),
    },
    categories={"gender": ("MALE", "FEMALE"), "weekday": tuple("0123456")},
    gaps=True,
)


class LifeSnaps(Published):
    """Person-days with steps. Label: the person's next day with steps has more of them.

    The last fifth of each person's days is the test set, so no one is tested on their past.
    """

    name: Literal["lifesnaps"] = "lifesnaps"
    about = "daily activity of 71 people"
    owners = "people"
    directory = "lifesnaps"
    layouts = (_LIFESNAPS,)

    def read_files(self, folder: Path, files: tuple[File, ...]) -> DataSet:
        """Read all days."""
        table, x = _days_with_steps(folder, files)
        people = table.groupby("id")
        following = people["steps"].shift(-1)
        table["rises"] = following > table["steps"]
        table["position"] = people.cumcount() / people["id"].transform("size")
        there = following.notna().to_numpy()
        table, x = table[there], x[there]
        y, owner = table["rises"].to_numpy(np.int64), table["id"].to_numpy(np.str_)
        test = table["position"].to_numpy() >= 0.8
        return divided(
            "lifesnaps",
            Records(x, y, owner),
            test,
            classes=2,
            notes=(
                "label: the next recorded day has more steps than this one",
                "people with a single day of steps have no next day and are left out",
            ),
        )


class LifeSnapsWindows(Published):
    """The same in windows of four days, as records of behaviour, without friends."""

    name: Literal["lifesnaps-windows"] = "lifesnaps-windows"
    persons: Size | None = None  # how many there are: then their numbers stand in the records
    about = "the same in windows of four days"
    owners = "people"
    directory = "lifesnaps"
    layouts = (_LIFESNAPS,)
    of_behaviour = True
    later_keys = ("persons",)

    @property
    def numbered_persons(self) -> int | None:
        """As stated."""
        return self.persons

    def read_files(self, folder: Path, files: tuple[File, ...]) -> DataSet:
        """Read each person's windows of days with steps."""
        from fed_dp.data import behaviour

        table, x = _days_with_steps(folder, files)
        _, person = np.unique(table["id"].to_numpy(np.str_), return_inverse=True)
        steps = table["steps"].to_numpy(np.float64)
        days = table["date"].to_numpy("datetime64[D]").astype(np.float64)
        lines = behaviour.lines_of(person, days, x, steps, np.zeros(len(x)), window=behaviour.WINDOW)
        late, owner = lines.place >= 0.8 * lines.count, table["id"].to_numpy(np.str_)
        found = DataSet(
            "lifesnaps-windows",
            lines.of(~late, owner),
            lines.of(late, owner),
            2,
            *identity(),
            notes=(
                "label: the next recorded day has more steps than this one",
                f"people with fewer than {behaviour.WINDOW + 1} days of steps are left out",
                "it has no friends: their influence is 0 throughout",
                *behaviour.notes(),
            ),
        )
        return behaviour.numbered(found, self.persons)


def _days_with_steps(folder: Path, files: tuple[File, ...]) -> tuple[pd.DataFrame, Floats]:
    """Return the person-days that have steps, by person and date, and their inputs."""
    import pandas as pd

    from fed_dp.data.formats import read_table

    path = verified(folder, files[0])
    table = read_table(path, low_memory=False)
    table["date"] = pd.to_datetime(table["date"])
    table = table[table["steps"].notna()].sort_values(["id", "date"], ignore_index=True)
    table["steps_before"] = table.groupby("id")["steps"].shift(1)
    table["weekday"] = table["date"].dt.day_of_week.astype(str)
    return table, LIFESNAPS_COLUMNS.encode(table, where=str(path))
