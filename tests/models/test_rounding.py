from __future__ import annotations

import os

import pytest
import torch

from fed_dp.models import rounding


@pytest.mark.parametrize(
    ("capability", "mode"), [("AVX512", "AVX512,STRICT"), ("AVX2", "AVX2,STRICT"), ("DEFAULT", None)]
)
def test_the_strict_mode_is_that_of_the_processor(
    capability: str, mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(rounding.MODE, raising=False)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    rounding.fix()
    assert os.environ.get(rounding.MODE) == mode


def test_a_mode_that_somebody_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rounding.MODE, "COMPATIBLE")
    rounding.fix()
    assert os.environ[rounding.MODE] == "COMPATIBLE"
