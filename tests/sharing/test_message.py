from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fed_dp.errors import UploadRefused
from fed_dp.sharing.message import check_records, check_vector, from_npy


def npy(values: np.ndarray, *, pickle: bool = False) -> bytes:
    out = io.BytesIO()
    np.save(out, values, allow_pickle=pickle)
    return out.getvalue()


@given(hnp.arrays(st.sampled_from([np.float32, np.int64]), hnp.array_shapes(min_dims=0, max_dims=3)))
def test_npy_bytes_are_read_exactly(values: np.ndarray) -> None:
    if not values.flags.f_contiguous or values.flags.c_contiguous:
        assert np.array_equal(from_npy(npy(values)), values, equal_nan=values.dtype.kind == "f")


@given(st.binary(max_size=200))
def test_other_bytes_are_refused_not_crashed_on(data: bytes) -> None:
    with pytest.raises(UploadRefused):
        from_npy(data)


def test_truncated_objects_and_transposed_arrays_are_refused() -> None:
    whole = npy(np.arange(9, dtype=np.float32))
    for wrong in (
        whole[:-1],
        whole[:20],
        npy(np.array([{}], object), pickle=True),
        npy(np.asfortranarray(np.ones((2, 3)))),
    ):
        with pytest.raises(UploadRefused, match="not an npy array"):
            from_npy(wrong)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (np.zeros(3, np.float64), "expected float32, found float64"),
        ([0.0, 0.0, 0.0], "found list"),
        (np.zeros(4, np.float32), r"expected shape \(3,\), found \(4,\)"),
        (np.zeros((3, 1), np.float32), "expected shape"),
        (np.array([0, np.nan, 0], np.float32), "nan at index 1"),
        (np.array([0, 0, -np.inf], np.float32), "-inf at index 2"),
        (np.array([0, 0, 3e38], np.float32), "at index 2, expected finite values within"),
    ],
)
def test_a_wrong_vector_is_refused_by_name(values: object, says: str) -> None:
    with pytest.raises(UploadRefused, match=f"change: .*{says}"):
        check_vector(values, size=3, what="change")


def test_a_site_cannot_change_how_many_records_it_has() -> None:
    assert check_records(10, announced=10) == 10
    for wrong in (11, -10, 10.0, "10", 10**12):
        with pytest.raises(UploadRefused, match="announced 10"):
            check_records(wrong, announced=10)
