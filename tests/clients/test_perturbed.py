"""The papers' forms: batches with as many records of each class."""

from __future__ import annotations

import torch

from fed_dp.clients.functional.perturbed import balanced_batches


def test_balanced_batches_have_as_many_of_each_class_and_an_epochs_number_of_batches() -> None:
    y = torch.tensor([0] * 95 + [1] * 5)
    batches = list(balanced_batches(y, 20, torch.Generator().manual_seed(1)))
    assert len(batches) == 5
    for rows in batches:
        assert torch.bincount(y[rows]).tolist() == [10, 10]
    seen = torch.cat(batches)
    assert len(torch.unique(seen[y[seen] == 1])) > 1  # not always the same
    again = list(balanced_batches(y, 20, torch.Generator().manual_seed(1)))
    assert all(torch.equal(one, other) for one, other in zip(batches, again, strict=True))
    [alone] = balanced_batches(torch.zeros(7, dtype=torch.int64), 20, torch.Generator())
    assert len(alone) == 20
