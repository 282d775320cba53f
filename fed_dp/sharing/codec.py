"""The one wire format. Header, then where the coordinates are, then their values.

    header   magic b"FD", format 1, type of the values (4: float32, 2: float16), size n, count k
    where    nothing   if k = n
             a bitmap  if n bits are fewer than the next
             gaps      else: Elias-Fano, k (2 + log2 n/k) bits at most, within half a bit per index of
                       the information bound log2 C(n, k); low bits packed, high parts in unary
    values   k little-endian floats

Which of the three it is follows from n and k alone, so an update has exactly one encoding.
Measured (benchmarks/bench_sharing.py), this beats byte-wise gaps and bitmaps in size at every
fraction, and costs less than the selection of the coordinates.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fed_dp.errors import UploadRefused
from fed_dp.sharing.update import MAX_ABS_VALUE, Indices, SparseUpdate

Precision = Literal["float32", "float16"]
Bytes = NDArray[np.uint8]

_HEADER = struct.Struct("<2sBBII")
_MAGIC, _FORMAT = b"FD", 1
_TYPES: dict[int, np.dtype[Any]] = {4: np.dtype("<f4"), 2: np.dtype("<f2")}


def encode(update: SparseUpdate, *, precision: Precision = "float32") -> bytes:
    """Return the bytes of an update. float16 halves the values' bytes and rounds them to 11 bits."""
    kind = np.dtype(precision).itemsize
    header = _HEADER.pack(_MAGIC, _FORMAT, kind, update.size, len(update))
    where = b"" if update.indices is None else _pack(update.indices, update.size)
    return b"".join((header, where, update.values.astype(_TYPES[kind], copy=False).tobytes()))


def decode(data: bytes, *, size: int, most: int, bound: float = MAX_ABS_VALUE) -> SparseUpdate:
    """Read an update of at most `most` of `size` coordinates within ±`bound`; refuse anything else."""
    if len(data) < _HEADER.size:
        raise UploadRefused(f"truncated: {len(data)} bytes, the header alone has {_HEADER.size}")
    magic, version, kind, n, k = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _FORMAT or kind not in _TYPES:
        raise UploadRefused(f"not an update: it begins with {data[:4].hex()}")
    if n != size:
        raise UploadRefused(f"size: expected {size} parameters, found {n}")
    if k > most:
        raise UploadRefused(f"too many: {k} coordinates, at most {most} are allowed")
    start = _HEADER.size + _where_bytes(n, k)
    expected = start + k * kind
    if len(data) != expected:
        what = "truncated" if len(data) < expected else "too long"
        raise UploadRefused(f"{what}: {len(data)} bytes, {k} of {n} coordinates take {expected}")
    values = np.frombuffer(data, _TYPES[kind], k, start).astype(np.float32, copy=False)
    bound = max(bound, float(_TYPES[kind].type(bound)))  # the sender rounded it, too
    if k == n:
        return SparseUpdate(None, values, n, bound)
    where = np.frombuffer(data, np.uint8, start - _HEADER.size, _HEADER.size)
    return SparseUpdate(_unpack(where, n, k), values, n, bound)


@lru_cache(maxsize=1024)
def information_bound(size: int, count: int, value_bytes: int = 4) -> float:
    """Return the fewest bytes that tell which `count` of `size` coordinates, and the value of each."""
    ways = math.lgamma(size + 1) - math.lgamma(count + 1) - math.lgamma(size - count + 1)
    return ways / math.log(2) / 8 + value_bytes * count


# --------------------------------------------------------------------------- where they are


def _low_bits(size: int, count: int) -> int:
    """Return how many low bits of an index are stored as they are: about log2 of the mean gap."""
    return max(0, (size // count).bit_length() - 1)


def _gap_bytes(size: int, count: int) -> tuple[int, int]:
    """Return the bytes of the packed low bits and of the unary high parts."""
    low = _low_bits(size, count)
    return (count * low + 7) // 8, (count + (size >> low) + 8) // 8


def _is_bitmap(size: int, count: int) -> bool:
    return (size + 7) // 8 <= sum(_gap_bytes(size, count))


def _where_bytes(size: int, count: int) -> int:
    if count in (0, size):
        return 0
    return (size + 7) // 8 if _is_bitmap(size, count) else sum(_gap_bytes(size, count))


def _pack(indices: Indices, size: int) -> bytes:
    count = indices.size
    if count == 0:
        return b""
    if _is_bitmap(size, count):
        bits = np.zeros(size, np.uint8)
        bits[indices] = 1
        return np.packbits(bits).tobytes()
    low = _low_bits(size, count)
    unary = np.zeros(8 * _gap_bytes(size, count)[1], np.uint8)
    unary[(indices >> low) + np.arange(count)] = 1
    return _pack_low(indices, low) + np.packbits(unary).tobytes()


def _unpack(where: Bytes, size: int, count: int) -> Indices:
    if count == 0:
        return np.empty(0, np.int64)
    if _is_bitmap(size, count):
        return _ones(where, count)
    low = _low_bits(size, count)
    split = _gap_bytes(size, count)[0]
    high = _ones(where[split:], count) - np.arange(count)
    return (high << low) | _unpack_low(where[:split], low, count)


def _ones(packed: Bytes, count: int) -> Indices:
    found = np.flatnonzero(np.unpackbits(packed).view(np.bool_))
    if found.size != count:
        raise UploadRefused(f"indices: expected {count}, found {found.size}")
    return found


def _pack_low(indices: Indices, low: int) -> bytes:
    """Pack the low bits of each index, lowest bit first."""
    if low == 0:
        return b""
    narrow = indices.astype("<u4").view(np.uint8).reshape(-1, 4)
    bits = np.unpackbits(narrow, axis=1, count=low, bitorder="little")
    return np.packbits(bits).tobytes()


def _unpack_low(packed: Bytes, low: int, count: int) -> Indices:
    if low == 0:
        return np.zeros(count, np.int64)
    if packed[-1] & ((1 << -count * low % 8) - 1):
        raise UploadRefused("indices: the bits after the last are not zero")
    bits = np.unpackbits(packed, count=count * low).reshape(count, low)
    narrow = np.zeros((count, 4), np.uint8)
    narrow[:, : (low + 7) // 8] = np.packbits(bits, axis=1, bitorder="little")
    return narrow.view("<u4").reshape(-1).astype(np.int64)
