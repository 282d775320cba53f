"""Everything that arrives: read back exactly, or refused by name."""

from __future__ import annotations

import struct
from math import comb, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fed_dp.errors import UploadRefused
from fed_dp.sharing.codec import decode, encode, information_bound
from fed_dp.sharing.update import MAX_ABS_VALUE, SparseUpdate

HEADER = 12


@st.composite
def updates(draw: st.DrawFn) -> SparseUpdate:
    size = draw(st.integers(1, 5000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.one_of(st.integers(0, size), st.sampled_from([0, 1, size - 1, size])))
    indices = np.sort(rng.choice(size, max(0, count), replace=False)).astype(np.int64)
    return SparseUpdate.of(rng.normal(size=size).astype(np.float32), indices)


def same(one: SparseUpdate, other: SparseUpdate) -> bool:
    indices = np.arange(one.size) if one.indices is None else one.indices
    others = np.arange(other.size) if other.indices is None else other.indices
    return np.array_equal(indices, others) and one.values.tobytes() == other.values.tobytes()


@given(updates())
def test_an_update_is_read_back_exactly(update: SparseUpdate) -> None:
    assert same(update, decode(encode(update), size=update.size, most=len(update)))


@given(updates())
def test_float16_rounds_the_values_and_nothing_else(update: SparseUpdate) -> None:
    back = decode(encode(update, precision="float16"), size=update.size, most=update.size)
    rounded = update.values.astype(np.float16).astype(np.float32)
    assert same(SparseUpdate(update.indices, rounded, update.size), back)
    bounded = SparseUpdate(update.indices, np.clip(update.values, -0.001, 0.001), update.size, 0.001)
    decode(encode(bounded, precision="float16"), size=update.size, most=update.size, bound=0.001)


@given(updates(), st.data())
def test_cut_or_longer_bytes_are_refused(update: SparseUpdate, data: st.DataObject) -> None:
    whole = encode(update)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(UploadRefused, match="truncated"):
        decode(whole[:cut], size=update.size, most=update.size)
    with pytest.raises(UploadRefused, match="too long"):
        decode(whole + b"\0", size=update.size, most=update.size)


@given(updates(), st.data())
def test_damaged_bytes_are_refused_or_make_a_valid_update(update: SparseUpdate, data: st.DataObject) -> None:
    whole = bytearray(encode(update))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    vector = np.zeros(update.size, np.float32)
    try:
        found = decode(bytes(whole), size=update.size, most=len(update))
    except UploadRefused:
        return
    found.add_to(vector)
    assert np.abs(vector).max() <= MAX_ABS_VALUE
    assert np.count_nonzero(vector) <= len(update)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_read_but_never_crash(data: bytes) -> None:
    for prefix in (b"", struct.pack("<2sBBII", b"FD", 1, 4, 100, 7)):
        try:
            found = decode(prefix + data, size=100, most=10)
        except UploadRefused:
            continue
        assert len(found) <= 10


def written(**changes: int) -> bytes:
    header = {"version": 1, "kind": 4, "size": 1000, "count": 10, **changes}
    update = SparseUpdate(np.arange(0, 1000, 100), np.ones(10, np.float32), 1000)
    return struct.pack("<2sBBII", b"FD", *header.values()) + encode(update)[HEADER:]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "truncated: 0 bytes"),
        (b"NP" + written()[2:], "not an update"),
        (written(version=9), "not an update"),
        (written(kind=8), "not an update"),
        (written(size=999), "size: expected 1000 parameters, found 999"),
        (written(count=11), "too many: 11 coordinates, at most 10"),
        (written(count=2**32 - 1), "too many"),
        (written(count=9), "too long"),
        (written()[:-1], "truncated"),
        (written()[:-4] + struct.pack("<f", np.nan), "values: nan at position 9"),
        (written()[:-4] + struct.pack("<f", -np.inf), "values: -inf at position 9"),
        (
            written()[:-4] + struct.pack("<f", 0.51),
            "values: 1.0 at position 0, expected finite values within ±0.5",
        ),
    ],
)
def test_each_fault_has_its_name(data: bytes, says: str) -> None:
    with pytest.raises(UploadRefused, match=says):
        decode(data, size=1000, most=10, bound=0.5 if "±0.5" in says else MAX_ABS_VALUE)


def gaps(high: list[int], low: list[int]) -> bytes:
    """Indices of ten of a thousand, written by hand: six low bits each, and the rest in unary."""
    bits = np.array([[index >> b & 1 for b in range(6)] for index in low], np.uint8)
    unary = np.zeros(8 * ((10 + (1000 >> 6) + 8) // 8), np.uint8)
    unary[np.array(high) + np.arange(10)] = 1
    where = np.packbits(bits).tobytes() + np.packbits(unary).tobytes()
    return written()[:HEADER] + where + np.ones(10, "<f4").tobytes()


def test_hostile_indices_are_refused() -> None:
    high, low = [0, 1, 2, 3, 4, 5, 6, 7, 8, 15], [0] * 10
    assert len(decode(gaps(high, low), size=1000, most=10)) == 10  # it is a valid way to write them
    with pytest.raises(UploadRefused, match="indices: 1007 is out of range, expected 0 to 999"):
        decode(gaps(high, [0] * 9 + [47]), size=1000, most=10)
    with pytest.raises(UploadRefused, match="indices: 64 at position 2 is repeated"):
        decode(gaps([0, 1, 1, 3, 4, 5, 6, 7, 8, 9], low), size=1000, most=10)
    with pytest.raises(UploadRefused, match="indices: 65 at position 2 is not sorted"):
        decode(gaps([0, 1, 1, 3, 4, 5, 6, 7, 8, 9], [0, 2, 1, *([0] * 7)]), size=1000, most=10)
    padded = bytearray(gaps(high, low))
    padded[HEADER + 7] |= 1  # 60 bits take eight bytes
    with pytest.raises(UploadRefused, match="bits after the last are not zero"):
        decode(bytes(padded), size=1000, most=10)
    lost = bytearray(gaps(high, low))
    lost[HEADER + 8] = 0
    with pytest.raises(UploadRefused, match="indices: expected 10, found 6"):
        decode(bytes(lost), size=1000, most=10)


@pytest.mark.parametrize("size", [140_106, 105_506, 402_250, 313_546])
@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_the_bytes_are_near_the_fewest_possible(size: int, fraction: float) -> None:
    rng = np.random.default_rng(0)
    count = int(fraction * size)
    indices = np.sort(rng.choice(size, count, replace=False)).astype(np.int64)
    update = SparseUpdate.of(rng.normal(size=size).astype(np.float32), indices)
    assert 1 <= len(encode(update)) / information_bound(size, count) < (1.04 if fraction == 0.001 else 1.02)


def test_the_information_bound_is_log2_of_the_ways_and_32_bits_a_value() -> None:
    for size, count in ((1, 0), (10, 3), (500, 17), (300, 300)):
        assert information_bound(size, count) == pytest.approx(log2(comb(size, count)) / 8 + 4 * count)


@pytest.mark.parametrize(
    ("indices", "values", "says"),
    [
        ([0, 1], [1, 2, 3], "expected 3 of type int64"),
        ([-1, 1, 2], [1, 2, 3], "indices: -1 is out of range"),
        ([0, 1, 5], [1, 2, 3], "indices: 5 is out of range, expected 0 to 4"),
        ([0, 2, 2], [1, 2, 3], "indices: 2 at position 2 is repeated"),
        ([2, 1, 3], [1, 2, 3], "indices: 1 at position 1 is not sorted"),
        ([0, 1, 2], [1, np.nan, 3], "values: nan at position 1"),
        ([0, 1, 2], [1, 2, np.inf], "values: inf at position 2"),
        ([0, 1, 2], [1, 2, -1001], "values: -1001.0 at position 2"),
        (None, [1, 2, 3], "size: expected 5 values, found 3"),
    ],
)
def test_no_wrong_update_can_be_made(indices: list[int] | None, values: list[float], says: str) -> None:
    where = None if indices is None else np.array(indices, np.int64)
    with pytest.raises(UploadRefused, match=says):
        SparseUpdate(where, np.array(values, np.float32), 5)


def test_types_are_exact() -> None:
    with pytest.raises(UploadRefused, match="expected a float32 vector, found float64"):
        SparseUpdate.dense(np.zeros(5))  # type: ignore[arg-type]
    with pytest.raises(UploadRefused, match="expected a float32 vector, found float32 of shape"):
        SparseUpdate.dense(np.zeros((5, 1), np.float32))
    with pytest.raises(UploadRefused, match="found float64"):
        SparseUpdate(np.zeros(1), np.zeros(1, np.float32), 5)  # type: ignore[arg-type]
