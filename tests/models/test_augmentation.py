from __future__ import annotations

import pytest
import torch

from fed_dp.models.augmentation import Views


def images(count: int = 3) -> torch.Tensor:
    return torch.arange(count * 2 * 5 * 6, dtype=torch.float32).reshape(count, 2, 5, 6)


def test_the_first_view_is_the_image_and_the_others_are_drawn_from_the_source() -> None:
    x = images()
    views = Views(4, shift=1, flip=True)
    found, same = (views.of(x, torch.Generator().manual_seed(1)) for _ in range(2))
    assert found.shape == (3, 4, 2, 5, 6)
    assert torch.equal(found[:, 0], x)
    assert torch.equal(found, same)
    assert not torch.equal(found, views.of(x, torch.Generator().manual_seed(2)))


def test_a_shifted_view_repeats_the_border() -> None:
    x = images(1)
    source = torch.Generator().manual_seed(0)
    shifts = set()
    for _ in range(100):
        view = Views(2, shift=1).of(x, source)[0, 1]
        [found] = [
            (down, right)
            for down in (-1, 0, 1)
            for right in (-1, 0, 1)
            if torch.equal(
                view,
                x[0][:, (torch.arange(5) + down).clamp(0, 4)][:, :, (torch.arange(6) + right).clamp(0, 5)],
            )
        ]
        shifts.add(found)
    assert len(shifts) == 9  # every shift occurs


def test_about_half_of_the_flipped_views_are_mirrored() -> None:
    x = images(200)
    views = Views(2, flip=True).of(x, torch.Generator().manual_seed(0))[:, 1]
    mirrored = sum(torch.equal(view, image.flip(2)) for view, image in zip(views, x, strict=True))
    as_they_are = sum(torch.equal(view, image) for view, image in zip(views, x, strict=True))
    assert mirrored + as_they_are == 200
    assert mirrored == pytest.approx(100, abs=35)
