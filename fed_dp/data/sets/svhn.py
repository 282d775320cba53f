"""SVHN: street view house numbers, whole or as a subset."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from fed_dp.data.dataset import DataSet, Records, standardised
from fed_dp.data.files import File, verified
from fed_dp.data.options import Published

# Published means and standard deviations of the training images, on the scale 0..1.
SVHN = standardised((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))
_SVHN_HOME = "http://ufldl.stanford.edu/housenumbers/"
_SVHN = tuple(
    File(name, digest, _SVHN_HOME + name)
    for name, digest in (
        ("train_32x32.mat", "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"),
        ("test_32x32.mat", "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"),
    )
)
_SVHN_SUBSET = (
    File("svhn_train_10000.npz", "d11dbaac27d1043b72434d2ec051c71f9b3e9bc7052caa83766d0beee2a9f9fc"),
    File("svhn_test_2000.npz", "14d89d517c949696654d7f84403c60bc874d6cea7b53695269ac560d5b445f79"),
)


class Svhn(Published):
    """Street view house numbers, 32×32×3."""

    name: Literal["svhn"] = "svhn"
    about = "street view house numbers, 32×32×3"
    directory = "svhn"
    layouts = (_SVHN, _SVHN_SUBSET)
    of_digits = True

    def read_files(self, folder: Path, files: tuple[File, ...]) -> DataSet:
        """Read training and test digits."""
        splits = [read_svhn(verified(folder, file)) for file in files]
        notes: tuple[str, ...] = ()
        if files == _SVHN_SUBSET:
            notes = ("a subset: 10,000 of 73,257 training and 2,000 of 26,032 test digits",)
        return DataSet("svhn", splits[0], splits[1], 10, *SVHN, notes=notes)


def read_svhn(path: Path) -> Records:
    """Read digits as `X` and `y` from npz (N,32,32,3), or from mat (32,32,3,N) where 0 is written 10."""
    from fed_dp.data.formats import read_mat, read_npz

    if path.suffix == ".mat":
        x, y = read_mat(path, ("X", "y"))
        return Records(np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y.ravel().astype(np.int64) % 10)
    x, y = read_npz(path, ("X", "y"))
    return Records(np.ascontiguousarray(x.transpose(0, 3, 1, 2)), y.astype(np.int64))
