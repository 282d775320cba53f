"""A model's arrays (a state_dict) as one flat vector, and how Flower's messages carry them.

All floating-point arrays are parts of the vector, in their order; whole numbers and booleans (the counters of
normalisation layers) stay as they are and are not exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fed_dp.errors import RunError
from fed_dp.sharing.message import WIRE
from fed_dp.sharing.update import Vector

UPDATE = "fed_dp.update"  # the name of an array that holds a sparse update in the wire format
TERMS = "fed_dp"  # the name of the record in which `Dssgd` tells the mod what to upload,
PARTLY = "partly"  # and in that, whether it sends parts of the model


@dataclass(frozen=True, slots=True)
class Layout:
    """Names, types and shapes of a model's arrays."""

    parts: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, type, shape

    @classmethod
    def of(cls, arrays: ArrayRecord) -> Layout:
        """Return the layout of a model.

        Raises
        ------
        RunError
            When it has no numbers to train.
        """
        layout = cls(tuple((name, array.dtype, tuple(array.shape)) for name, array in arrays.items()))
        if not layout.size:
            raise RunError("the model has no floating-point arrays: there is nothing to exchange")
        return layout

    @property
    def size(self) -> int:
        """How many numbers the vector has."""
        return sum(int(np.prod(shape)) for _, kind, shape in self.parts if _is_float(kind))

    def flatten(self, arrays: ArrayRecord, *, of: str) -> Vector:
        """Return a model as a vector; `of` says in messages whose model it is.

        Raises
        ------
        RunError
            When its arrays are not those of the layout.
        """
        found = Layout(tuple((name, array.dtype, tuple(array.shape)) for name, array in arrays.items()))
        if found != self:
            ours, theirs = dict(_named(self)), dict(_named(found))
            name = next(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
            raise RunError(f"{of}: array {name!r} is {theirs.get(name)}, expected {ours.get(name)}")
        values = []
        for (name, kind, shape), array in zip(self.parts, arrays.values(), strict=True):
            if not _is_float(kind):
                continue
            value = array.numpy()  # what is within, whatever is said of it
            if value.shape != shape or value.dtype != np.dtype(kind):
                raise RunError(
                    f"{of}: array {name!r} holds {value.dtype} of {value.shape}, not {kind} of {shape}"
                )
            values.append(value.ravel())
        return np.concatenate(values).astype(np.float32)

    def fill(self, template: ArrayRecord, vector: Vector) -> ArrayRecord:
        """Return the template's arrays with the vector's numbers."""
        filled, start = ArrayRecord(), 0
        for name, kind, shape in self.parts:
            if not _is_float(kind):
                filled[name] = template[name]
                continue
            count = int(np.prod(shape))
            filled[name] = Array(vector[start : start + count].reshape(shape).astype(kind))
            start += count
        return filled


def _is_float(kind: str) -> bool:
    return np.issubdtype(np.dtype(kind), np.floating)


def _named(layout: Layout) -> list[tuple[str, str]]:
    return [(name, f"{kind} of shape {shape}") for name, kind, shape in layout.parts]


def update_record(data: bytes) -> ArrayRecord:
    """Return a record that holds an encoded update."""
    return ArrayRecord({UPDATE: Array("uint8", (len(data),), WIRE, data)})


def update_in(record: ArrayRecord) -> bytes | None:
    """Return the encoded update that a record holds; None where it holds whole arrays."""
    return record[UPDATE].data if UPDATE in record else None


def the_arrays(content: RecordDict, *, of: str) -> tuple[str, ArrayRecord]:
    """Return the one record of arrays that a message holds, and its name.

    Raises
    ------
    RunError
        When it holds none, or several.
    """
    found = list(content.array_records.items())
    if len(found) != 1:
        names = ", ".join(repr(name) for name, _ in found) or "none"
        raise RunError(f"{of}: expected one record of arrays, found {names}")
    return found[0]


def server_round(content: RecordDict) -> int:
    """Return the number of the round as Flower's strategies tell it; 0 where none is told."""
    for record in content.config_records.values():
        if isinstance(record, ConfigRecord) and type(number := record.get("server-round")) is int:
            return max(0, number)
    return 0
