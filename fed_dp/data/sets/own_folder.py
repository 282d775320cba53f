"""A user's own data: idx, npz, CSV or Parquet in a folder, with bounds, classes and categories stated.

Bounds are public knowledge about the columns; they are never taken from the data, because that would reveal
its extremes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from fed_dp.data.dataset import DataSet
from fed_dp.data.options import Data
from fed_dp.options import Words
from fed_dp.tasks import Targets

if TYPE_CHECKING:
    from fed_dp.data.folder import FolderOptions

Bounds = Annotated[tuple[float, float], Field(strict=False)]
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

    about = "your own: idx, npz, CSV or Parquet in data.path"
    owners = "data.client"
    at_sites = True

    @model_validator(mode="after")
    def _statements_make_sense(self) -> OwnFolder:
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
        pairs = self.bounds if isinstance(self.bounds, dict) else {"every input": self.bounds}
        for name, pair in pairs.items():
            if pair is not None and not -MAX_BOUND <= pair[0] < pair[1] <= MAX_BOUND:
                raise ValueError(
                    f"data.bounds of {name} = {list(pair)}: expected low < high, within ±{MAX_BOUND:g}"
                )
        lists = {f"categories.{name}": words for name, words in self.categories.items()}
        for key in ("classes", "outputs"):
            lists |= {key: stated} if isinstance(stated := getattr(self, key), tuple) else {}
        for name, words in lists.items():
            if not words or len(set(words)) < len(words):
                raise ValueError(f"data.{name} = {list(words)}: expected words that differ")
        return self

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the classes, or of other targets: as stated, or their numbers."""
        stated = self.classes if self.targets == "class" else self.outputs
        assert stated is not None  # checked above
        return stated if isinstance(stated, tuple) else tuple(map(str, range(stated)))

    def folder_options(self, path: str | Path | None = None) -> FolderOptions:
        """Return what is stated about the records in `path`, or in the folder that the experiment names."""
        from fed_dp.data.folder import FolderOptions

        assert self.path is not None  # these three are checked above
        assert self.bounds is not None
        stated = self.classes if self.targets == "class" else self.outputs
        assert stated is not None
        return FolderOptions(
            Path(self.path if path is None else path),
            self.bounds,
            stated,
            self.label,
            self.client,
            self.categories,
            self.gaps,
            self.test_fraction,
            targets=self.targets,
            ignore=self.ignore,
        )

    def sizes(self) -> dict[str, int]:
        """Return how wide classes and inputs make a network."""
        columns = len(self.bounds) if isinstance(self.bounds, dict) else 0
        return {
            f"data.{'classes' if self.targets == 'class' else 'outputs'}": len(self.output_names),
            "inputs of data.bounds and data.categories": 2 * columns
            + sum(map(len, self.categories.values())),
        }

    def read(self) -> DataSet:
        """Read the folder's training and test records."""
        from fed_dp.data.folder import read_folder

        return read_folder(self.folder_options())
