"""CIFAR-10, whole or as a subset."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fed_dp.data.dataset import DataSet, Records, standardised
from fed_dp.data.files import File, verified
from fed_dp.data.options import Published

# Published means and standard deviations of the training images, on the scale 0..1.
CIFAR = standardised((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_CIFAR = (
    File(
        "cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    ),
)
_TEST = File("test_batch.bin.xz", "6f98fa4aa6bc45118bc106e07a8e07eb403609364ddaca1ee739d9127c68b291")
_BATCHES = tuple(  # the files of the archive, compressed one by one
    File(f"data_batch_{number}.bin.xz", digest)
    for number, digest in enumerate(
        (
            "d5de7683d3f827a5b44cc75966e019999d0781c69e5bfecaa9de8f927fc9b821",
            "0e03217b8faad1105234eccbdfebfbdebdc7aa8cf1a7d73a9d4b3af99e8f02c5",
            "215f786be65adcbfce0c632b98a44d4c0f365339bbac28154483487e059371e0",
            "6e5f4d1e04dde66ac38fff2569e1f003954953e4730604cfb81249cd6b1fe7ba",
            "5ae1bb69353aa78f6e8e1a907c2891d6de5a717367ee72f36f5ce523d4499369",
        ),
        start=1,
    )
)
_SUBSET = (_BATCHES[0], _TEST)


class Cifar10(Published):
    """CIFAR-10, 32×32×3."""

    name: Literal["cifar10"] = "cifar10"
    about = "CIFAR-10, 32×32×3"
    directory = "cifar10"
    layouts = (_CIFAR, (*_BATCHES, _TEST), _SUBSET)

    def read_files(self, folder: Path, files: tuple[File, ...]) -> DataSet:
        """Read training and test images."""
        from fed_dp.data.formats import read_bytes, read_cifar, read_tar

        paths = [verified(folder, file) for file in files]
        if files == _CIFAR:
            names = [f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)]
            *batches, last = read_tar(paths[0], (*names, "cifar-10-batches-bin/test_batch.bin"))
        else:
            *batches, last = (read_bytes(path) for path in paths)
        train = read_cifar(b"".join(batches), where=str(paths[0]))
        test = read_cifar(last, where=str(paths[-1]))
        notes = ("a subset: 10,000 of 50,000 training images",) if files == _SUBSET else ()
        return DataSet("cifar10", Records(*train), Records(*test), 10, *CIFAR, notes=notes)
