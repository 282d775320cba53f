"""Public records of another data set, laid out as the records at hand: what an encoder may be fitted to."""

from __future__ import annotations

import numpy as np
from scipy.ndimage import zoom
from sklearn.datasets import load_digits

from fed_dp.data.dataset import DataSet, Floats, Integers
from fed_dp.errors import DataError

MARGIN = 1 / 7  # on each side, as MNIST has it


def public_digits(like: DataSet) -> tuple[Floats, Integers]:
    """Return scikit-learn's digits, enlarged and framed as the images of `like`, with its constants.

    They are written by other people than MNIST's and published with a library: no record of a site is
    among them.
    """
    shape = like.shape
    if len(shape) != 3 or min(shape[1:]) < 16 or like.classes != 10 or like.train.x.dtype != np.uint8:
        raise DataError(
            f"data.public_data = 'digits' stands for images of ten digits of 16×16 or more, not for "
            f"{like.name!r} of shape {shape}; allowed: data.public_records"
        )
    bunch = load_digits()
    margins = [round(MARGIN * side) for side in shape[1:]]
    inner = [side - 2 * margin for side, margin in zip(shape[1:], margins, strict=True)]
    large = zoom(bunch.images / 16, (1, inner[0] / 8, inner[1] / 8), order=1, grid_mode=True, mode="nearest")
    framed = np.pad(large, ((0, 0), *((margin, margin) for margin in margins)))
    pixels = np.repeat(framed[:, None], shape[0], axis=1) * 255
    return (pixels * like.scale + like.shift).astype(np.float32), bunch.target.astype(np.int64)
