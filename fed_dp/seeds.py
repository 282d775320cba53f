"""Seeds for simulation: one root seed, one independent stream per purpose, round and client.

The same (seed, purpose, round, client) gives the same stream on every engine and in every
process, so a re-run message draws the very same noise: it is the same release, not a second one.
Seeds exist for simulation only. A deployed site must never draw noise from here.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

Generator = np.random.Generator


def _sequence(seed: int, purpose: str, *where: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *where])


def generator(seed: int, purpose: str, *where: int) -> Generator:
    """Return the NumPy generator of one purpose at one place (round, client)."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, *where)))


def words(seed: int, purpose: str, *where: int, count: int) -> NDArray[np.uint32]:
    """Return the state of a generator of another library: so many words of 32 bits."""
    return np.asarray(_sequence(seed, purpose, *where).generate_state(count, np.uint32), np.uint32)


def integer(seed: int, purpose: str, *where: int) -> int:
    """Return a 63-bit seed of one purpose at one place, for a library with its own generators."""
    return int(_sequence(seed, purpose, *where).generate_state(1, np.uint64)[0] >> np.uint64(1))
