"""Random numbers for torch in simulations: one independent stream per purpose, round and client.

torch's generator for processors keeps only 32 bits of a seed: among 300 rounds of 300 clients, two would be
expected to share all their noise. So its whole state is filled here.
"""

from __future__ import annotations

import numpy as np
import torch

from fed_dp import seeds

WORDS = 624  # of the Mersenne Twister's state
_START = 24  # bytes before them in a state as torch (2.13) writes it


def torch_generator(
    seed: int, purpose: str, *where: int, device: torch.device | None = None
) -> torch.Generator:
    """Return torch's generator of one purpose at one place (round, client)."""
    if device is not None and device.type != "cpu":
        return torch.Generator(device).manual_seed(seeds.integer(seed, purpose, *where))  # keeps 64 bits
    generator = torch.Generator().manual_seed(1)
    state = generator.get_state()
    words = state.numpy()[_START : _START + 8 * WORDS].view(np.uint64)
    if words[:2].tolist() != [1, 1812433254]:  # as manual_seed(1) fills them
        raise RuntimeError("this version of torch writes the state of its generator in another way")
    words[:] = seeds.words(seed, purpose, *where, count=WORDS)
    generator.set_state(state)
    return generator
