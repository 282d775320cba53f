from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fed_dp import plugins
from fed_dp.data import DataSet, read
from fed_dp.data.sets.cifar10 import Cifar10
from fed_dp.data.sets.fashion import DEBIAN, FashionMnist

SHAPES = {  # training records, test records, shape, classes, natural clients
    "digits": (1438, 359, (1, 8, 8), 10, None),
    "mnist": (60_000, 10_000, (1, 28, 28), 10, None),
    "mnist-32": (60_000, 10_000, (1, 32, 32), 10, None),
    "mnist-writers": (60_000, 10_000, (1, 28, 28), 10, 539),
    "fashion-mnist": (60_000, 10_000, (1, 28, 28), 10, None),
    "svhn": (10_000, 2_000, (3, 32, 32), 10, None),
    "cifar10": (50_000, 10_000, (3, 32, 32), 10, None),
    "adult": (32_561, 16_281, (111,), 2, None),
    "heart": (738, 182, (31,), 2, 4),
    "lifesnaps": (3852, 854, (31,), 2, 70),
    "lifesnaps-windows": (3642, 854, (1, 5, 31), 2, 70),
    "health-daily": (60_198, 14_986, (1, 5, 30), 2, 254),
    "health-weekly": (8_890, 2_286, (1, 5, 30), 2, 254),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_data_set_is_read_whole(name: str, needs: Callable[[str], None]) -> None:
    needs(name)
    found = read(name)
    owners = None if found.train.owner is None else len(np.unique(found.train.owner))
    counted = (len(found.train), len(found.test), found.shape, found.classes, owners)
    if any("a subset" in note for note in found.notes) == (name == "svhn"):  # which of two is at hand
        assert counted == SHAPES[name]
    assert set(np.unique(found.test.y)) == set(range(found.classes))
    x = found.inputs(found.train, np.arange(0, len(found.train), 7))
    assert x.dtype == np.float32
    assert np.isfinite(x).all()


@pytest.mark.parametrize("name", ["mnist", "mnist-32", "fashion-mnist", "svhn", "cifar10"])
def test_published_constants_standardise_the_images(name: str, needs: Callable[[str], None]) -> None:
    needs(name)
    found = read(name)
    x = found.inputs(found.train, np.arange(0, len(found.train), 5))
    means, deviations = x.mean((0, 2, 3)), x.std((0, 2, 3))
    assert np.abs(means).max() < 0.05
    assert np.abs(deviations - 1).max() < 0.05


def test_the_first_batch_of_cifar10_alone_is_read_as_a_subset(
    needs: Callable[[str], None], tmp_path: Path
) -> None:
    needs("cifar10")
    whole = read("cifar10")
    if len(whole.train) < 50_000:
        pytest.skip("only the subset of CIFAR-10 is here")
    for name in ("data_batch_1.bin.xz", "test_batch.bin.xz"):
        if not (there := Cifar10.folder() / name).is_file():
            pytest.skip("CIFAR-10 is here as one archive")
        (tmp_path / name).symlink_to(there)
    subset = read("cifar10", tmp_path)
    assert subset.notes == ("a subset: 10,000 of 50,000 training images",)
    assert np.array_equal(subset.train.x, whole.train.x[:10_000])
    assert np.array_equal(subset.test.y, whole.test.y)


def test_fashion_mnist_is_found_where_the_package_puts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FED_DP_DATA", "/nowhere")
    expected = DEBIAN if DEBIAN.is_dir() else Path("/nowhere/fashion_mnist")
    assert FashionMnist.folder() == expected
    assert all(file.url for file in FashionMnist.files(Path("/nowhere/fashion_mnist")))
    assert FashionMnist.folder("/elsewhere") == Path("/elsewhere")


def test_svhn_in_yuv_is_the_same_digits_in_other_colours(needs: Callable[[str], None]) -> None:
    needs("svhn")
    rgb = read("svhn")
    yuv: DataSet = plugins.read("data", {"name": "svhn", "colours": "yuv"}).read()
    assert np.array_equal(yuv.train.y, rgb.train.y)
    assert yuv.train.x.dtype == np.uint8
    assert "colours are converted to YUV" in yuv.notes
    x = yuv.inputs(yuv.train, np.arange(0, len(yuv.train), 5))
    means, deviations = x.mean((0, 2, 3)), x.std((0, 2, 3))
    assert np.abs(means).max() < 0.05
    assert 0.9 < deviations[0] < 1.05
    assert (deviations[1:] < 0.5).all()  # house numbers are mostly grey


def test_writers_of_training_and_test_digits_are_different_people(needs: Callable[[str], None]) -> None:
    needs("mnist-writers")
    found = read("mnist-writers")
    assert found.train.owner is not None
    assert found.test.owner is not None
    assert not set(found.train.owner) & set(found.test.owner)


def test_reading_inputs_never_changes_the_records() -> None:
    found = read("digits")
    before = found.train.x.copy()
    found.inputs(found.train)[:] = 7
    assert np.array_equal(found.train.x, before)
