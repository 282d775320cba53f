"""Streams of random numbers for torch: no two places of a simulation share one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from fed_dp import seeds
from fed_dp.models.streams import WORDS, torch_generator
from tests.conftest import some

PURPOSE = "psgd noise"


def first(seed: int, turn: int, client: int) -> list[float]:
    return torch.randn(4, generator=torch_generator(seed, PURPOSE, turn, client)).tolist()  # type: ignore[no-any-return]


def test_two_clients_whose_seeds_have_the_same_low_bits_draw_other_noise() -> None:
    """torch's generator keeps 32 bits of a seed: of 300 × 300 pairs, two had the same noise."""
    seen: dict[int, tuple[int, int]] = {}
    for place in itertools.product(range(1, 400), range(400)):
        low = seeds.integer(0, PURPOSE, *place) & 0xFFFFFFFF
        if low in seen:
            break
        seen[low] = place
    else:
        pytest.fail("no pair was found")
    one, other = (torch.Generator().manual_seed(seeds.integer(0, PURPOSE, *p)) for p in (seen[low], place))
    assert torch.equal(torch.randn(9, generator=one), torch.randn(9, generator=other))  # so it was
    assert first(0, *seen[low]) != first(0, *place)


@pytest.mark.parametrize("count", some([200_000, 1_000_000], [200_000]))
def test_no_two_keys_have_the_same_stream(count: int) -> None:
    """Of 32 bits, so many keys would share some: 4.7 pairs are expected of 200,000, 116 of a million."""
    keys = itertools.islice(itertools.product(range(1, 1001), range(1000)), count)
    found = np.stack([seeds.words(0, PURPOSE, *key, count=4) for key in keys])
    assert len(np.unique(found, axis=0)) == count
    assert len(np.unique(found[:, 0])) < count


def test_the_whole_state_is_filled_and_the_same_key_repeats_it() -> None:
    state = torch_generator(3, PURPOSE, 1, 2).get_state()
    words = state.numpy()[24 : 24 + 8 * WORDS].view(np.uint64)
    np.testing.assert_array_equal(words, seeds.words(3, PURPOSE, 1, 2, count=WORDS))
    assert first(3, 1, 2) == first(3, 1, 2) != first(3, 2, 1) != first(4, 1, 2)


@pytest.mark.statistical
def test_what_is_drawn_from_it_is_normal() -> None:
    drawn = torch.randn(200_000, generator=torch_generator(0, PURPOSE, 1, 0), dtype=torch.float64)
    assert abs(float(drawn.mean())) < 0.01
    assert float(drawn.std()) == pytest.approx(1, abs=0.01)
