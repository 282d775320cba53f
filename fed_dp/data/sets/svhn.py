"""SVHN: street view house numbers, whole or as a subset."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fed_dp.data.dataset import DataSet, Floats, Records, standardised
from fed_dp.data.files import File, verified
from fed_dp.data.options import Published

# Published means and standard deviations of the training images, on the scale 0..1.
MEANS, DEVIATIONS = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)
SVHN = standardised(MEANS, DEVIATIONS)
# Y, U, V of red, green, blue (ITU-R BT.601, analogue scale, as Torch7's rgb2yuv), and the span of each.
YUV = np.array([[0.299, 0.587, 0.114], [-0.14713, -0.28886, 0.436], [0.615, -0.51499, -0.10001]])
SPAN = np.array([1.0, 2 * 0.436, 2 * 0.615])
ZERO = np.array([0.0, 0.5, 0.5])  # where in its span 0 is
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
    later_keys = ("colours",)
    colours: Literal["rgb", "yuv"] = "rgb"  # yuv: as DSSGD's paper converts them

    def read_files(self, folder: Path, files: tuple[File, ...]) -> DataSet:
        """Read training and test digits."""
        splits = [read_svhn(verified(folder, file)) for file in files]
        notes: tuple[str, ...] = ()
        if files == _SVHN_SUBSET:
            notes = ("a subset: 10,000 of 73,257 training and 2,000 of 26,032 test digits",)
        constants = SVHN
        if self.colours == "yuv":
            splits = [Records(to_yuv(split.x), split.y) for split in splits]
            constants, notes = yuv_constants(), (*notes, "colours are converted to YUV")
        return DataSet("svhn", splits[0], splits[1], 10, *constants, notes=notes)


def to_yuv(x: NDArray[np.uint8] | Floats) -> NDArray[np.uint8]:
    """Return images (n, 3, height, width) of red, green and blue as bytes of Y, U and V.

    Bytes span the range that each can have: 0..1, ±0.436 and ±0.615.
    """
    mixing = (YUV / SPAN[:, None]).astype(np.float32)
    offset = (255 * ZERO).astype(np.float32)[:, None, None]
    found = np.empty(x.shape, np.uint8)
    for start in range(0, len(x), 1000):
        mixed = np.einsum("cd,ndhw->nchw", mixing, x[start : start + 1000].astype(np.float32)) + offset
        found[start : start + 1000] = np.clip(np.rint(mixed), 0, 255)
    return found


def yuv_constants() -> tuple[Floats, Floats]:
    """Return (scale, shift) that map bytes of Y, U and V to (value − mean)/deviation.

    Means follow from the published ones of red, green and blue. All three are divided by what the published
    deviations allow Y at most, which is what it has where the colours vary alike.
    """
    deviation = float(YUV[0] @ DEVIATIONS)
    scale = SPAN / (255 * deviation)
    shift = -(YUV @ MEANS + SPAN * ZERO) / deviation
    return scale.astype(np.float32)[:, None, None], shift.astype(np.float32)[:, None, None]


def read_svhn(path: Path) -> Records:
    """Read digits as `X` and `y` from npz (N,32,32,3), or from mat (32,32,3,N) where 0 is written 10."""
    from fed_dp.data.formats import read_mat, read_npz

    if path.suffix == ".mat":
        x, y = read_mat(path, ("X", "y"))
        return Records(np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y.ravel().astype(np.int64) % 10)
    x, y = read_npz(path, ("X", "y"))
    return Records(np.ascontiguousarray(x.transpose(0, 3, 1, 2)), y.astype(np.int64))
