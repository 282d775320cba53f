"""How matrix products round: the same for a product alone and beside others, on every processor.

Left to itself, Intel's MKL, which torch multiplies with, chooses how it sums by how many products there are
and where they lie in memory; on some processors a virtual client's numbers then depend on who is trained
beside it. Its strict mode does not, and costs no time that we could measure.
"""

from __future__ import annotations

import os

import torch

MODE = "MKL_CBWR"  # MKL reads it at its first product


def fix() -> None:
    """Ask MKL for its strict mode, unless somebody has chosen a mode, or there is no MKL."""
    if MODE in os.environ or not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return
    capability = torch.backends.cpu.get_cpu_capability()
    for known in ("AVX512", "AVX2"):
        if known in capability:
            os.environ[MODE] = f"{known},STRICT"
            return
