"""Records that a program has in memory: arrays, a table of pandas, a torch data set; or what a loader gives.

They never leave the process that made them, but for the workers of its own simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, ValidationError

from fed_dp import plugins
from fed_dp.data.dataset import DataSet, Floats, Records, every_nth, identity
from fed_dp.data.options import Data, Embedded, Natural
from fed_dp.errors import ConfigError, DataCorrupt, DataMissing
from fed_dp.tasks import Targets

if TYPE_CHECKING:
    import pandas as pd

Pair = tuple[Any, Any]
Bounds = Mapping[str, tuple[float, float]]
_HELD: dict[str, DataSet] = {}  # by their SHA-256


class Arrays(Embedded):
    """Records in memory, made by `from_arrays`, `from_frame` or `from_dataset`."""

    name: Literal["arrays"] = "arrays"
    sha256: str
    clients: int | None = None  # how many natural owners they have

    about = "records of the program that calls fed_dp"
    owners = "client"

    @classmethod
    def from_arrays(
        cls,
        x: ArrayLike,
        y: ArrayLike,
        *,
        test: Pair | float = 0.2,
        client: ArrayLike | None = None,
        classes: int | Sequence[str] | None = None,
        scale: float | None = None,
        **options: Any,
    ) -> Arrays:
        """Return records of one array of inputs and one of targets, a row for each record.

        Parameters
        ----------
        x
            Numbers, taken as they are; bytes are divided by 255 (or multiplied by `scale`). What turns raw
            values into these must be public knowledge, and not computed from the records.
        y
            A class of each record (whole numbers or words), or a row of zeros and ones, or numbers.
        test
            Inputs and targets of the test records, or the share that is held out: every n-th record.
        client
            Whose each record is. Then every one of these is a client.
        classes
            How many classes there are, or their names. Without it, as many as the labels show.
        options
            Other keys of the table `data`: partition, expected_records, public_records, …
        """
        inputs, targets = _inputs(x, "x"), np.asarray(y)
        owner = None if client is None else np.asarray(client).astype(np.str_)
        if not isinstance(test, int | float) and len(test) != 2:
            raise DataCorrupt(f"test: expected (x, y) or a share, got {len(test)} values")
        pairs = [(inputs, targets)]
        if not isinstance(test, int | float):
            pairs.append((_inputs(test[0], "test x"), np.asarray(test[1])))
        encoded, count, kind = _targets([target for _, target in pairs], classes)
        records = Records(inputs, encoded[0], owner)
        if isinstance(test, int | float):
            held = _held_out(len(records), float(test))
            train, tested = records.part(~held), records.part(held)
            notes: tuple[str, ...] = (f"every {round(1 / test)}th record is held out for tests",)
        else:
            train, tested, notes = records, Records(pairs[1][0], encoded[1]), ()
        constants = identity()
        if inputs.dtype == np.uint8:
            constants = (np.full(1, 1 / 255 if scale is None else scale, np.float32), constants[1])
        elif scale is not None:
            constants = (np.full(1, scale, np.float32), constants[1])
        return cls._of(
            DataSet("arrays", train, tested, count, *constants, notes=notes, targets=kind), options
        )

    @classmethod
    def from_frame(
        cls,
        table: pd.DataFrame,
        *,
        label: str | Sequence[str],
        bounds: Bounds | None = None,
        categories: Mapping[str, Sequence[str]] | None = None,
        ignore: Sequence[str] = (),
        client: str | None = None,
        gaps: bool = False,
        test: pd.DataFrame | float = 0.2,
        classes: int | Sequence[str] | None = None,
        **options: Any,
    ) -> Arrays:
        """Return the records of a table: a row for each.

        `bounds` (of numbers: low, high) and `categories` (of words: all that there may be) are public
        knowledge about every column but `label`, `client` and those to `ignore`; they are never taken from
        the records. `label` is a column, or several. With `gaps`, values may be missing.
        """
        import pandas as pd

        from fed_dp.data.tables import DATES, Columns

        columns = Columns(dict(bounds or {}), dict(categories or {}), gaps)
        labels = [label] if isinstance(label, str) else list(label)
        stated = {*columns.bounds, *columns.categories, *labels, *ignore, *([client] if client else [])}
        for name in (*labels, *([client] if client else [])):
            if name not in table.columns:
                raise DataCorrupt(
                    f"the table has no column {name!r}; found: {', '.join(map(str, table.columns))}"
                )
        for name in table.columns:
            if name in stated:
                continue
            if pd.api.types.is_datetime64_any_dtype(table[name].dtype):
                raise DataCorrupt(f"column {name!r}: {DATES}")
            raise DataCorrupt(
                f"column {name!r}: expected in bounds (of numbers: low, high) or categories (of words: all "
                "that there may be), which are public knowledge, or in ignore"
            )

        def pair(part: pd.DataFrame, where: str) -> Pair:
            y = part[labels[0]] if isinstance(label, str) else part[labels]
            return columns.encode(part, where=where), y.to_numpy()

        return cls.from_arrays(
            *pair(table, "the table"),
            test=pair(test, "the test table") if isinstance(test, pd.DataFrame) else test,
            client=None if client is None else table[client].to_numpy(),
            classes=classes,
            **options,
        )

    @classmethod
    def from_dataset(cls, dataset: Any, *, test: Any = 0.2, **options: Any) -> Arrays:
        """Return the records of a torch `Dataset` of (inputs, target) items; `test` may be another."""
        shared = test if isinstance(test, int | float) else _items(test, "the test data set")
        return cls.from_arrays(*_items(dataset, "the data set"), test=shared, **options)

    @classmethod
    def _of(cls, dataset: DataSet, options: Mapping[str, Any]) -> Arrays:
        """Keep a data set, and return the section that stands for it."""
        sha256 = dataset.fingerprint()
        _HELD[sha256] = dataset
        owner, given = dataset.train.owner, dict(options)
        if isinstance(given.get("partition"), str):
            given["partition"] = {"name": given["partition"]}
        if owner is not None:
            given.setdefault("partition", Natural(name="natural"))
            given["clients"] = len(np.unique(owner))
        try:
            return cls(sha256=sha256, **given)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise ConfigError(f"data.{key} = {first['input']!r}: {first['msg']}") from None

    def read(self) -> DataSet:
        """Return the records, which this process must hold."""
        try:
            return _HELD[self.sha256]
        except KeyError:
            raise DataMissing(
                "data.name = 'arrays': these records were in the memory of the program that began the run; "
                "call fed_dp from a program that makes them again"
            ) from None


class OwnLoader(Data):
    """A function of the user's own that returns records: `loader` is called with `options`."""

    name: Literal["own"] = "own"
    loader: Annotated[str, Field(min_length=1)]  # package.module:name
    options: dict[str, Any] = Field(default_factory=dict)

    about = "your own: what data.loader returns"
    owners = "as its loader says"

    def read(self) -> DataSet:
        """Call the loader."""
        loader = plugins.imported(self.loader, key="data.loader")
        where = f"data.loader = {self.loader!r}"
        if not isinstance(loader, Callable):  # type: ignore[arg-type]
            raise ConfigError(f"{where} is {loader!r}: expected a function that returns fed_dp.Data")
        try:
            found = loader(**self.options)
        except Exception as error:
            raise DataCorrupt(f"{where} failed: {type(error).__name__}: {error}") from error
        if not isinstance(found, Arrays):
            raise DataCorrupt(f"{where} returned {type(found).__name__}: expected fed_dp.Data.from_arrays(…)")
        return found.read()


def _inputs(x: ArrayLike, what: str) -> NDArray[np.uint8] | Floats:
    try:
        found = np.asarray(x)
    except ValueError:
        raise DataCorrupt(f"{what}: expected numbers, one row of the same shape for each record") from None
    if found.dtype == object or not (np.issubdtype(found.dtype, np.number) or found.dtype == bool):
        raise DataCorrupt(
            f"{what} holds {found.dtype}: expected numbers, one row of the same shape for each record"
        )
    if found.ndim < 2:
        raise DataCorrupt(f"{what} has shape {found.shape}: expected a row for each record, (n, …)")
    return found if found.dtype == np.uint8 else np.ascontiguousarray(found, np.float32)


def _targets(
    parts: Sequence[NDArray[Any]], classes: int | Sequence[str] | None
) -> tuple[list[NDArray[Any]], int, Targets]:
    """Return targets as a data set keeps them, how many outputs they ask for, and of which kind they are."""
    first = parts[0]
    named = classes if classes is not None and not isinstance(classes, int) else None
    if named is not None or (first.ndim == 1 and first.dtype.kind in "OUS"):
        found_names = sorted({str(value) for part in parts for value in part})
        names = found_names if named is None else [str(name) for name in named]
        codes = {name: code for code, name in enumerate(names)}
        if unknown := [name for name in found_names if name not in codes]:
            raise DataCorrupt(f"label {unknown[0]!r} is not one of {', '.join(names)} (classes)")
        return [np.array([codes[str(v)] for v in part], np.int64) for part in parts], len(names), "class"
    if first.ndim == 1 and first.dtype.kind in "iub":
        found = [part.astype(np.int64) for part in parts]
        count = classes if isinstance(classes, int) else None
        return found, count or 1 + max(int(part.max(initial=0)) for part in found), "class"
    if first.ndim not in (1, 2) or first.dtype.kind not in "iubf":
        raise DataCorrupt(
            f"y has shape {first.shape} of {first.dtype}: expected (n,) or (n, outputs), of numbers"
        )
    rows = [part.astype(np.float32).reshape(len(part), -1) for part in parts]
    kind: Targets = "labels" if first.dtype.kind in "iub" else "numbers"
    return rows, rows[0].shape[1], kind


def _held_out(count: int, share: float) -> NDArray[np.bool_]:
    if not 0 < share < 1 or count < 2:
        raise DataCorrupt(
            f"test = {share:g} of {count} records: expected a share between 0 and 1, of two or more"
        )
    return every_nth(count, max(2, min(count, round(1 / share))))


def _items(dataset: Any, what: str) -> Pair:
    """Read all items of a torch data set."""
    inputs: list[NDArray[Any]] = []
    targets: list[NDArray[Any]] = []
    for place in range(len(dataset)):
        try:
            item = dataset[place]
        except Exception as error:
            raise DataCorrupt(
                f"{what}: item {place} cannot be read: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataCorrupt(f"{what}: item {place} is {type(item).__name__}, expected (inputs, target)")
        x, y = (np.asarray(part) for part in item)
        if inputs and x.shape != inputs[0].shape:
            raise DataCorrupt(
                f"{what}: item {place} has inputs of shape {x.shape}, item 0 of shape {inputs[0].shape}: "
                "expected one shape"
            )
        inputs.append(x)
        targets.append(y)
    if not inputs:
        raise DataCorrupt(f"{what} has no items")
    return np.stack(inputs), np.stack(targets)
