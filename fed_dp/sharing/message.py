"""What a message holds: the names that strategies and clients agree on, and what may arrive.

Download (server → site): arrays {WEIGHTS}, config {ROUND}.
Upload (site → server): arrays {CHANGE}, metrics {RECORDS, …}, config {EVENTS, DEVICE}.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fed_dp.errors import UploadRefused

ARRAYS, METRICS, CONFIG = "arrays", "metrics", "config"  # the records of a message
WEIGHTS, CHANGE = "weights", "change"
ROUND, RECORDS, EVENTS, DEVICE = "round", "records", "events", "device"
PARTITION = "partition-id"

LARGEST = 1e3  # of a weight or a change; beyond it a network only overflows

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Upload:
    """A site's change of all parameters, with the public number of its records."""

    change: Vector
    records: int


def from_npy(data: bytes) -> NDArray[Any]:
    """Read an array from npy bytes without copying it (Flower's own reader copies twice)."""
    stream = io.BytesIO(data)
    try:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(stream)
        if fortran or dtype.hasobject:
            raise ValueError(f"order or type {dtype} is not allowed")
        return np.frombuffer(data, dtype, math.prod(shape), stream.tell()).reshape(shape)
    except (ValueError, SyntaxError, TypeError) as error:
        raise UploadRefused(f"not an npy array: {error}") from None


def check_vector(values: Any, *, size: int, what: str) -> Vector:
    """Return `values` if it is a float32 vector of `size` within ±LARGEST; refuse it otherwise."""
    if not isinstance(values, np.ndarray) or values.dtype != np.float32:
        found = getattr(values, "dtype", type(values).__name__)
        raise UploadRefused(f"{what}: expected float32, found {found}")
    if values.shape != (size,):
        raise UploadRefused(f"{what}: expected shape ({size},), found {values.shape}")
    fits = np.abs(values) <= LARGEST  # false for NaN
    if not fits.all():
        position = int(np.flatnonzero(~fits)[0])
        raise UploadRefused(
            f"{what}: {values[position]} at index {position}, expected finite values within ±{LARGEST:g}"
        )
    return values


def check_records(records: Any, *, announced: int) -> int:
    """Return the number of records if it is the one the site announced when the run began."""
    if not isinstance(records, int) or records != announced:
        raise UploadRefused(f"{RECORDS} = {records!r}: the site announced {announced} when the run began")
    return records
