"""MNIST: as published, in a 32×32 frame as in DSSGD's paper, and with each digit's writer (QMNIST)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from fed_dp.data.dataset import DataSet, Records, standardised
from fed_dp.data.files import File, verified
from fed_dp.data.options import Published
from fed_dp.errors import DataCorrupt

# Published means and standard deviations of the training images, on the scale 0..1.
MNIST_28 = standardised((0.1307,), (0.3081,))
MNIST_32 = standardised((0.1001,), (0.2752,))  # the same images in a frame of 32 × 32
_MNIST_HOME = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_WRITERS_HOME = "https://raw.githubusercontent.com/facebookresearch/qmnist/master/"
_MNIST = tuple(
    File(name, digest, _MNIST_HOME + name)
    for name, digest in (
        (
            "train-images-idx3-ubyte.gz",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        (
            "train-labels-idx1-ubyte.gz",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        (
            "t10k-images-idx3-ubyte.gz",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        (
            "t10k-labels-idx1-ubyte.gz",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    )
)
_WRITERS = tuple(
    File(f"../mnist_writers/{name}", digest, _WRITERS_HOME + name)
    for name, digest in (
        (
            "qmnist-train-labels-idx2-int.gz",
            "2c05dc77f6b916b38e455e97ab129a42a444f3dbef09b278a366f82904e0dd9f",
        ),
        (
            "qmnist-test-labels-idx2-int.gz",
            "9fbcbe594c3766fdf4f0b15c5165dc0d1e57ac604e01422608bb72c906030d06",
        ),
    )
)


class Mnist(Published):
    """MNIST, 28×28."""

    name: Literal["mnist"] = "mnist"
    about = "MNIST, 28×28"
    directory = "mnist"
    layouts = (_MNIST,)
    of_digits = True

    def read_files(self, folder: Path, files: tuple[File, ...]) -> DataSet:
        """Read the images as they are."""
        train, test = read_images(folder, *files[:2]), read_images(folder, *files[2:4])
        return DataSet("mnist", train, test, 10, *MNIST_28)


class Mnist32(Mnist):
    """The same with two pixels of black on every side."""

    name: Literal["mnist-32"] = "mnist-32"  # type: ignore[assignment]
    about = "MNIST in a 32×32 frame (DSSGD's paper)"

    def read_files(self, folder: Path, files: tuple[File, ...]) -> DataSet:
        """Read the images and frame them."""
        small = super().read_files(folder, files)
        frame = ((0, 0), (0, 0), (2, 2), (2, 2))
        train, test = (Records(np.pad(r.x, frame).astype(np.uint8), r.y) for r in (small.train, small.test))
        return DataSet("mnist-32", train, test, 10, *MNIST_32)


class MnistWriters(Mnist):
    """The same with each digit's writer."""

    name: Literal["mnist-writers"] = "mnist-writers"  # type: ignore[assignment]
    about = "MNIST, 28×28, with each digit's writer"
    owners = "writers"
    layouts = ((*_MNIST, *_WRITERS),)

    def read_files(self, folder: Path, files: tuple[File, ...]) -> DataSet:
        """Read images and writers."""
        from fed_dp.data.formats import read_idx

        plain = super().read_files(folder, files)
        with_owners = []
        for records, file in zip((plain.train, plain.test), files[4:], strict=True):
            rows = read_idx(verified(folder, file))[: len(records)]
            if not np.array_equal(rows[:, 0], records.y):
                raise DataCorrupt(f"{folder / file.name}: its classes are not those of the MNIST labels")
            with_owners.append(Records(records.x, records.y, np.char.mod("%04d", rows[:, 2])))
        return DataSet("mnist-writers", with_owners[0], with_owners[1], 10, *MNIST_28)


def read_images(folder: Path, images: File, labels: File) -> Records:
    """Read grey images and their labels from two idx files."""
    from fed_dp.data.formats import read_idx

    x, y = read_idx(verified(folder, images)), read_idx(verified(folder, labels))
    return Records(x[:, None].astype(np.uint8), y.astype(np.int64))
