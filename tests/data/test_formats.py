from __future__ import annotations

import gzip
import io
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pytest
import scipy.io

from fed_dp.data.formats import read_bytes, read_cifar, read_idx, read_mat, read_npz, read_table, read_tar
from fed_dp.data.sets.svhn import MEANS, YUV, read_svhn, to_yuv, yuv_constants
from fed_dp.errors import DataCorrupt, DataMissing


def idx(values: np.ndarray) -> bytes:
    kinds = {"uint8": 8, "int32": 12}
    header = bytes([0, 0, kinds[str(values.dtype)], values.ndim])
    shape = b"".join(n.to_bytes(4, "big") for n in values.shape)
    return header + shape + values.astype(values.dtype.newbyteorder(">")).tobytes()


IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


def test_idx_is_read_plain_and_gzipped_in_any_rank_and_type(tmp_path: Path) -> None:
    for values in (IMAGES, np.array([[1, -2], [3, 70_000]], np.int32)):
        (tmp_path / "a").write_bytes(idx(values))
        (tmp_path / "a.gz").write_bytes(gzip.compress(idx(values)))
        assert np.array_equal(read_idx(tmp_path / "a"), values)
        assert np.array_equal(read_idx(tmp_path / "a.gz"), values)


def test_wrong_files_are_refused_by_name(tmp_path: Path) -> None:
    whole = gzip.compress(idx(IMAGES))
    files = {
        "short.gz": whole[: len(whole) // 2],
        "empty.gz": b"",
        "text.gz": b"hello",
        "short": idx(IMAGES)[:-1],
        "long": idx(IMAGES) + b"x",
        "text": b"hello",
        "short.xz": lzma.compress(b"x" * 99)[:-9],
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataCorrupt, match=name):
            read_idx(tmp_path / name)
    with pytest.raises(DataMissing, match="absent"):
        read_idx(tmp_path / "absent")


def test_npz_needs_its_names_and_refuses_pickles(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, X=IMAGES, y=np.array([0, 1]))
    x, _ = read_npz(path, ("X", "y"))
    assert np.array_equal(x, IMAGES)
    with pytest.raises(DataCorrupt, match="no array 'z'"):
        read_npz(path, ("X", "z"))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataCorrupt, match=r"a\.npz"):
        read_npz(path, ("X",))
    np.savez(path, X=np.array([{"evil": 1}], object))
    with pytest.raises(DataCorrupt, match="plain arrays"):
        read_npz(path, ("X",))


def test_cifar_rows_and_archive(tmp_path: Path) -> None:
    rows = np.arange(2 * 3073, dtype=np.uint32).astype(np.uint8)
    x, y = read_cifar(rows.tobytes(), where="here")
    assert x.shape == (2, 3, 32, 32)
    assert y.tolist() == [rows[0], rows[3073]]
    with pytest.raises(DataCorrupt, match=r"3,073"):
        read_cifar(rows.tobytes()[:-1], where="here")
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        entry = tarfile.TarInfo("in/a.bin")
        entry.size = 3
        archive.addfile(entry, io.BytesIO(b"abc"))
    assert read_tar(path, ("in/a.bin",)) == (b"abc",)
    with pytest.raises(DataCorrupt, match="no member"):
        read_tar(path, ("in/b.bin",))
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(DataCorrupt, match=r"a\.tar\.gz"):
        read_tar(path, ("in/a.bin",))


def test_svhn_reads_the_same_digits_from_mat_and_npz(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    y = np.array([1, 0, 9, 0, 4], np.uint8)
    np.savez(tmp_path / "a.npz", X=x, y=y)
    as_stored = {"X": x.transpose(1, 2, 3, 0), "y": np.where(y == 0, 10, y)[:, None]}
    scipy.io.savemat(tmp_path / "a.mat", as_stored)
    one, other = read_svhn(tmp_path / "a.npz"), read_svhn(tmp_path / "a.mat")
    assert np.array_equal(one.x, other.x)
    assert np.array_equal(one.y, other.y)
    with pytest.raises(DataCorrupt, match="no array"):
        read_mat(tmp_path / "a.mat", ("Z",))
    (tmp_path / "a.mat").write_bytes(b"no")
    with pytest.raises(DataCorrupt, match=r"a\.mat"):
        read_mat(tmp_path / "a.mat", ("X",))


def test_colours_become_luma_and_two_differences() -> None:
    """Against the definition: Y = .299 R + .587 G + .114 B, U = .492 (B − Y), V = .877 (R − Y)."""
    x = np.random.default_rng(0).integers(0, 256, (1003, 3, 4, 4), dtype=np.uint8)
    x[0], x[1], x[2] = 0, 255, np.array([255, 0, 0])[:, None, None]
    scale, shift = yuv_constants()
    deviation = float(YUV[0] @ (0.1980, 0.2010, 0.1970))
    mean = YUV @ MEANS
    y, u, v = np.moveaxis((to_yuv(x) * scale + shift) * deviation + mean[:, None, None], 1, 0)
    red, green, blue = np.moveaxis(x / 255.0, 1, 0)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    assert np.abs(y - luma).max() < 0.003  # half a byte, and rounding
    assert np.abs(u - 0.492 * (blue - luma)).max() < 0.003
    assert np.abs(v - 0.877 * (red - luma)).max() < 0.004
    grey = to_yuv(np.full((1, 3, 2, 2), 77, np.uint8))[0, :, 0, 0]
    assert grey.tolist() == [77, 128, 128]  # no colour: in the middle


def test_tables_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n1,2,3\n")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    for name in ("a.csv", "a.parquet"):
        with pytest.raises(DataCorrupt, match=name):
            read_table(tmp_path / name)
    assert read_bytes(tmp_path / "a.csv").startswith(b"a,b")
