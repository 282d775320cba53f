"""Fashion-MNIST: photographs of clothes, in the format and of the size of MNIST.

Reference: Xiao, Rasul, Vollgraf, "Fashion-MNIST", arXiv 1708.07747, 2017.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fed_dp.data.dataset import DataSet, standardised
from fed_dp.data.files import File
from fed_dp.data.options import Published
from fed_dp.data.sets.mnist import read_images

FASHION = standardised((0.2860,), (0.3530,))  # published, of the training images, on the scale 0..1
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # where the package dataset-fashion-mnist puts them
_HOME = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
_PUBLISHED = (
    "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
)
_PACKAGED = (  # the same images, compressed once more
    "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
    "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
    "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
    "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
)


class FashionMnist(Published):
    """Fashion-MNIST, 28×28: as published, or from Debian's package dataset-fashion-mnist."""

    name: Literal["fashion-mnist"] = "fashion-mnist"
    about = "Fashion-MNIST, 28×28"
    directory = "fashion_mnist"
    layouts = (
        tuple(File(name, digest, _HOME + name) for name, digest in zip(_NAMES, _PUBLISHED, strict=True)),
    )

    @classmethod
    def folder(cls, path: str | Path | None = None) -> Path:
        """Return `path`, the folder among all data sets, or, where that is not there, the package's."""
        usual = super().folder(path)
        return DEBIAN if path is None and not usual.is_dir() and DEBIAN.is_dir() else usual

    @classmethod
    def files(cls, folder: Path) -> tuple[File, ...]:
        """Return the files; those of the package have checksums of their own."""
        if folder.resolve() == DEBIAN:
            return tuple(File(name, digest) for name, digest in zip(_NAMES, _PACKAGED, strict=True))
        return super().files(folder)

    def read_files(self, folder: Path, files: tuple[File, ...]) -> DataSet:
        """Read the images as they are."""
        train, test = read_images(folder, *files[:2]), read_images(folder, *files[2:])
        return DataSet("fashion-mnist", train, test, 10, *FASHION)
