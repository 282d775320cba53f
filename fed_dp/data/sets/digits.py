"""scikit-learn's digits, 8×8: no files, nothing to fetch."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fed_dp.data.dataset import DataSet, Records, divided, every_nth
from fed_dp.data.options import Embedded


class Digits(Embedded):
    """8×8 digits, embedded in scikit-learn."""

    name: Literal["digits"] = "digits"
    about = "8×8 digits, embedded in scikit-learn"

    def read(self) -> DataSet:
        """Read all records."""
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images = (bunch.images.astype(np.float32) / 8 - 1)[:, None]  # pixels are 0..16
        labels = bunch.target.astype(np.int64)
        return divided("digits", Records(images, labels), every_nth(len(labels), 5), classes=10)
