"""What a data set declares: its options, its files, how it is read; and how records are divided.

A data set is the table `data` of an experiment. Its class is registered under the entry point
`fed_dp.datasets`.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from fed_dp import plugins
from fed_dp.data import partition
from fed_dp.data.files import File, home
from fed_dp.options import Count, Counts, Fraction, Positive, Section, of_client

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fed_dp.data.dataset import DataSet, Integers
    from fed_dp.seeds import Generator


class Partition(Section):
    """How records are divided among the clients."""

    name: str
    natural: ClassVar[bool] = False  # whether clients are the records' own owners
    by_class: ClassVar[bool] = False  # whether it looks at the records' classes

    @abstractmethod
    def divide(
        self, labels: Integers, owner: NDArray[Any] | None, *, clients: int, rng: Generator
    ) -> list[Integers]:
        """Return each client's records, as places in `labels`."""


class Iid(Partition):
    """Every record to exactly one client, at random, in equal shares."""

    name: Literal["iid"] = "iid"

    def divide(
        self, labels: Integers, owner: NDArray[Any] | None, *, clients: int, rng: Generator
    ) -> list[Integers]:
        """Divide."""
        return partition.iid(len(labels), clients=clients, rng=rng)


class FixedFraction(Partition):
    """Each client draws its own fraction of all records; clients overlap (as in DSSGD's paper)."""

    name: Literal["fraction"]
    fraction: Fraction = 0.01

    def divide(
        self, labels: Integers, owner: NDArray[Any] | None, *, clients: int, rng: Generator
    ) -> list[Integers]:
        """Divide."""
        return partition.fixed_fraction(len(labels), clients=clients, fraction=self.fraction, rng=rng)


class Dirichlet(Partition):
    """Class shares per client from a symmetric Dirichlet; small alpha means one-sided clients."""

    name: Literal["dirichlet"]
    alpha: Positive = 0.5
    min_records: Count = 10
    by_class = True

    def divide(
        self, labels: Integers, owner: NDArray[Any] | None, *, clients: int, rng: Generator
    ) -> list[Integers]:
        """Divide."""
        return partition.dirichlet(
            labels, clients=clients, alpha=self.alpha, min_records=self.min_records, rng=rng
        )


class Shards(Partition):
    """Records sorted by label, cut into equal shards, `per_client` random shards each."""

    name: Literal["shards"]
    per_client: Count = 2
    by_class = True

    def divide(
        self, labels: Integers, owner: NDArray[Any] | None, *, clients: int, rng: Generator
    ) -> list[Integers]:
        """Divide."""
        return partition.shards(labels, clients=clients, per_client=self.per_client, rng=rng)


class Natural(Partition):
    """One client per natural owner of the records: a writer, a hospital, a person."""

    name: Literal["natural"]
    natural = True

    def divide(
        self, labels: Integers, owner: NDArray[Any] | None, *, clients: int, rng: Generator
    ) -> list[Integers]:
        """Divide."""
        return partition.natural(owner, clients=clients)


AnyPartition = Annotated[Iid | FixedFraction | Dirichlet | Shards | Natural, Field(discriminator="name")]


class Data(Section):
    """Which records, from where, and how they are divided among the clients; subclasses add options."""

    name: str = ""
    path: str | None = None
    partition: AnyPartition = Iid()
    # What is public, for encoders that are fitted to it: so many training records, which are set aside and
    # not protected, or another data set.
    public_records: Annotated[int, Field(ge=0)] = 0
    public_data: Literal["digits"] | None = None
    # What private sums are divided by in place of the number of records: one number, or one for each client.
    # Public, and not chosen by looking at the records; then their number is protected, too.
    expected_records: Counts | None = None
    # Cross-validation: the training records in so many folds, of which one takes the test records' place.
    folds: Annotated[int, Field(ge=2)] | None = None
    fold: Annotated[int, Field(ge=0)] = 0

    about: ClassVar[str]
    owners: ClassVar[str | None] = None  # what a natural client is
    directory: ClassVar[str] = ""  # under the folder of all data sets
    layouts: ClassVar[tuple[tuple[File, ...], ...]] = (
        (),
    )  # alternative sets of files; `fetch` gets the first
    of_behaviour: ClassVar[bool] = (
        False  # whether records are, or can be, of behaviour: with past and friends
    )
    of_digits: ClassVar[bool] = False  # whether records are images of ten digits
    at_sites: ClassVar[bool] = False  # whether real sites can have records of their own

    @model_validator(mode="after")
    def _public_and_folds(self) -> Data:
        if self.public_records and self.public_data is not None:
            raise ValueError("data.public_records and data.public_data are both set: expected one of them")
        if self.fold >= (self.folds or 1):
            raise ValueError(f"data.fold = {self.fold}: expected below data.folds = {self.folds or 'none'}")
        return self

    @property
    def has_public(self) -> bool:
        """Whether there are public records."""
        return bool(self.public_records or self.public_data)

    @property
    def has_behaviour(self) -> bool:
        """Whether its records are of behaviour."""
        return self.of_behaviour

    @property
    def numbered_persons(self) -> int | None:
        """How many persons there are, where each one's number stands in its records."""
        return None

    @property
    def friends_file(self) -> str | None:
        """The file, beside the records, that says who is friends with whom."""
        return None

    @property
    def key(self) -> str:
        """What decides the records that are read, and not who has them."""
        return self.model_dump_json(exclude={"partition", "public_records", "public_data", "folds", "fold"})

    def expected(self, client: int) -> int | None:
        """Return the declared number of a client's records; None where the number itself is public."""
        return None if self.expected_records is None else of_client(self.expected_records, client)

    def sizes(self) -> dict[str, int]:
        """Return what a site's limits look at, by the key that asks for it."""
        return {}

    @abstractmethod
    def read(self) -> DataSet:
        """Read all records, checking every file against its published checksum."""


class Embedded(Data):
    """A data set without files."""

    @model_validator(mode="after")
    def _no_path(self) -> Embedded:
        if self.path is not None:
            raise ValueError(
                f"data.path = {self.path!r}: data.name = {self.name!r} is embedded and has no path"
            )
        return self


class Published(Data):
    """A data set of files that are published with checksums."""

    @classmethod
    def folder(cls, path: str | Path | None = None) -> Path:
        """Return where its files are looked for: `path`, or under the folder of all data sets."""
        return home() / cls.directory if path is None else Path(path)

    @classmethod
    def files(cls, folder: Path) -> tuple[File, ...]:
        """Return the first layout that is there; where none is, the first, to be complained about."""
        there = (files for files in cls.layouts if all((folder / f.name).is_file() for f in files))
        return next(there, cls.layouts[0])

    def read(self) -> DataSet:
        """Read all records, checking every file against its published checksum."""
        folder = self.folder(self.path)
        return self.read_files(folder, self.files(folder))

    @abstractmethod
    def read_files(self, folder: Path, files: tuple[File, ...]) -> DataSet:
        """Read the files of one layout."""


def read(name: str, path: Path | None = None) -> DataSet:
    """Read a known data set, from `path` or from where its files usually are."""
    section: Data = plugins.read("data", {"name": name} | ({} if path is None else {"path": str(path)}))
    return section.read()
