"""What a deployed site keeps between rounds: for its own experiment and guarantee, and for no other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fed_dp.clients.memory import OnDisk
from fed_dp.errors import PrivacyError

STEM = "0123456789abcdef"  # of both digests: 64 bits, for which another experiment can be found
ONE, OTHER = STEM + "1" * 48, STEM + "2" * 48
OWN = np.arange(4, dtype=np.float32)


def kept(folder: Path, experiment: str = ONE, guarantee: str = "psgd", own: np.ndarray = OWN) -> Path:
    OnDisk(folder, experiment, 1, guarantee).keep({"steps": [3.0]}, own)
    [path] = folder.iterdir()
    return path


def test_weights_that_no_noise_has_covered_start_no_other_experiment(tmp_path: Path) -> None:
    path = kept(tmp_path)
    assert ONE in path.name
    same = OnDisk(tmp_path, ONE, 2, "psgd")
    assert same.own() == pytest.approx(OWN)
    assert same.state() == {"steps": [3.0]}
    assert OnDisk(tmp_path, OTHER, 2, "psgd").own() is None


def test_a_file_says_inside_whose_it_is(tmp_path: Path) -> None:
    path = kept(tmp_path)
    with pytest.raises(PrivacyError, match="another experiment or guarantee; nothing was sent"):
        OnDisk(tmp_path, ONE, 2, "none").own()
    path.rename(path.with_name(path.name.replace(ONE, OTHER)))
    with pytest.raises(PrivacyError, match="another experiment or guarantee; nothing was sent"):
        OnDisk(tmp_path, OTHER, 2, "psgd").own()


@pytest.mark.parametrize("value", [1001.0, -np.inf, np.nan])
def test_weights_beyond_what_a_message_may_hold_are_refused(value: float, tmp_path: Path) -> None:
    kept(tmp_path, own=np.array([0.0, value], np.float32))
    with pytest.raises(PrivacyError, match="weights beyond ±1000; nothing was sent"):
        OnDisk(tmp_path, ONE, 2, "psgd").own()
