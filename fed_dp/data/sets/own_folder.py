"""A user's own data: idx, npz, CSV or Parquet in a folder, with bounds, classes and categories stated.

Bounds are public knowledge about the columns; they are never taken from the data, because that would reveal
its extremes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from fed_dp.data.behaviour import WINDOW
from fed_dp.data.dataset import DataSet
from fed_dp.data.options import Data
from fed_dp.options import Size, Words
from fed_dp.tasks import Targets

if TYPE_CHECKING:
    from fed_dp.data.folder import FolderOptions
    from fed_dp.data.persons import PersonColumns

Bounds = Annotated[tuple[float, float], Field(strict=False)]
OUTCOMES = ("no rise", "rise")  # the classes of records of behaviour
OF_PERSONS = ("person", "time", "rises", "window", "friends", "influence", "persons")
OF_LABELS = ("label", "classes", "outputs", "targets")
MAX_BOUND = 1e30  # of a column: beyond it, scaling could overflow for some records and not for others


class OwnFolder(Data):
    """A folder of the user's own; real sites have one each."""

    name: Literal["folder"] = "folder"
    label: str | None = None  # the column of the label, in tables
    client: str | None = None  # the column that says whose a record is
    bounds: dict[str, Bounds] | Bounds | None = None
    classes: Annotated[int, Field(ge=2)] | Words | None = None
    # Other targets than a class: labels of which each holds or not (0 or 1), or numbers.
    targets: Targets = "class"
    outputs: Annotated[int, Field(ge=1)] | Words | None = None  # their columns, or of arrays how many
    ignore: Words = ()  # columns that are no inputs
    categories: dict[str, Words] = Field(default_factory=dict)
    gaps: bool = False  # whether values may be missing: then an input beside each number says so
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    # A table of persons over time: its records are of behaviour, and the label is whether a column rises.
    person: str | None = None  # the column that says whose a line is
    time: str | None = None  # the column that says when it was
    rises: str | None = None  # the column of which the label says whether it is higher at the next time point
    window: Annotated[int, Field(ge=2, le=100)] | None = None  # time points in a record, now included: 4
    friends: Annotated[str, Field(pattern=r"^[\w-][\w .-]*\.(csv|parquet)$")] | None = None  # of two columns
    influence: str | None = None  # the column by which friends sway others; none: `rises`
    persons: Size | Words | None = None  # how many, numbered from 0, or their names: for model.users

    about = "your own: idx, npz, CSV or Parquet in data.path"
    owners = "data.client"
    at_sites = True
    of_behaviour = True
    later_keys = OF_PERSONS

    @model_validator(mode="after")
    def _statements_make_sense(self) -> OwnFolder:
        if self.has_behaviour:
            self._check_persons()
        else:
            self._check_labels()
        pairs = self.bounds if isinstance(self.bounds, dict) else {"every input": self.bounds}
        for name, pair in pairs.items():
            if pair is not None and not -MAX_BOUND <= pair[0] < pair[1] <= MAX_BOUND:
                raise ValueError(
                    f"data.bounds of {name} = {list(pair)}: expected low < high, within ±{MAX_BOUND:g}"
                )
        lists = {f"categories.{name}": words for name, words in self.categories.items()}
        for key in ("classes", "outputs", "persons"):
            lists |= {key: stated} if isinstance(stated := getattr(self, key), tuple) else {}
        for name, words in lists.items():
            if not words or len(set(words)) < len(words):
                raise ValueError(f"data.{name} = {list(words)}: expected words that differ")
        return self

    def _check_labels(self) -> None:
        """Refuse a folder of which it is not stated what is learnt."""
        wanted, unused = ("classes", "outputs") if self.targets == "class" else ("outputs", "classes")
        for key in ("path", "bounds", wanted):
            if getattr(self, key) is None:
                needs = "classes (and label, for tables)" if wanted == "classes" else "outputs"
                raise ValueError(
                    f"data.{key} is missing: data.name = 'folder' with data.targets = {self.targets!r} needs "
                    f"path, bounds and {needs}"
                )
        if getattr(self, unused) is not None:
            raise ValueError(f"data.{unused}: data.targets = {self.targets!r} has {wanted} in its place")

    def _check_persons(self) -> None:
        """Refuse statements about a table of persons over time that are not enough, or make no sense."""
        for key in ("path", "bounds", "person", "time", "rises"):
            if getattr(self, key) is None:
                raise ValueError(
                    f"data.{key} is missing: a table of persons over time needs path, bounds, person, time "
                    "and rises"
                )
        for key in OF_LABELS:
            if self.is_set(key):
                raise ValueError(
                    f"data.{key} is set: with data.person, the label is whether data.rises = {self.rises!r} "
                    "is higher at the next time point"
                )
        if self.influence is not None and self.friends is None:
            raise ValueError(
                f"data.influence = {self.influence!r}: without data.friends nobody is swayed; expected both"
            )
        apart = {key: getattr(self, key) for key in ("person", "time", "rises")}
        if len(set(apart.values())) < len(apart):
            raise ValueError(
                f"data.person, data.time and data.rises = {list(apart.values())}: expected three columns"
            )
        for key in ("rises", "influence"):
            name = getattr(self, key)
            stated = self.bounds if isinstance(self.bounds, dict) else {name: self.bounds}
            if name is not None and (name not in stated or name in (*self.categories, *self.ignore)):
                raise ValueError(f"data.{key} = {name!r}: expected a column of numbers, with data.bounds")

    @property
    def has_behaviour(self) -> bool:
        """Whether any of what is stated is of persons over time."""
        return any(getattr(self, key) is not None for key in OF_PERSONS)

    @property
    def numbered_persons(self) -> int | None:
        """As stated."""
        return len(self.persons) if isinstance(self.persons, tuple) else self.persons

    @property
    def friends_file(self) -> str | None:
        """As stated."""
        return self.friends

    @property
    def person_columns(self) -> PersonColumns | None:
        """What is stated about persons over time."""
        if not self.has_behaviour:
            return None
        from fed_dp.data.persons import PersonColumns

        given = {key: getattr(self, key) for key in OF_PERSONS if getattr(self, key) is not None}
        return PersonColumns(**given)

    @property
    def _outputs(self) -> int | tuple[str, ...]:
        """The classes, or other targets: as stated, or how many."""
        stated = self.classes if self.targets == "class" else self.outputs
        if self.has_behaviour:
            stated = OUTCOMES
        assert stated is not None  # checked above
        return stated

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the classes, or of other targets: as stated, or their numbers."""
        stated = self._outputs
        return stated if isinstance(stated, tuple) else tuple(map(str, range(stated)))

    def folder_options(self, path: str | Path | None = None) -> FolderOptions:
        """Return what is stated about the records in `path`, or in the folder that the experiment names."""
        from fed_dp.data.folder import FolderOptions

        assert self.path is not None  # both are checked above
        assert self.bounds is not None
        return FolderOptions(
            Path(self.path if path is None else path),
            self.bounds,
            self._outputs,
            self.label,
            self.client,
            self.categories,
            self.gaps,
            self.test_fraction,
            targets=self.targets,
            ignore=self.ignore,
            persons=self.person_columns,
        )

    def sizes(self) -> dict[str, int]:
        """Return how wide classes and inputs make a network."""
        columns = len(self.bounds) if isinstance(self.bounds, dict) else 0
        rows = (self.window or WINDOW) + 1 if self.has_behaviour else 1
        return {
            f"data.{'classes' if self.targets == 'class' else 'outputs'}": len(self.output_names),
            "inputs of data.bounds and data.categories": rows
            * (2 * columns + sum(map(len, self.categories.values()))),
            **({"data.persons": self.numbered_persons} if self.numbered_persons else {}),
        }

    def read(self) -> DataSet:
        """Read the folder's training and test records."""
        from fed_dp.data.folder import read_folder

        return read_folder(self.folder_options())
