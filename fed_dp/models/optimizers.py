"""Which optimiser takes a trainer's steps; anything but plain SGD is torch's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

OptimizerName = Literal["sgd", "adam", "adamw"]


def check_optimizer(name: OptimizerName, *, momentum: float) -> None:
    """Refuse options that an optimiser does not have.

    Raises
    ------
    ValueError
        Naming the key.
    """
    if name != "sgd" and momentum:
        raise ValueError(
            f"trainer.momentum = {momentum:g}: trainer.optimizer = {name!r} has moments of its own; allowed "
            "with 'sgd'"
        )


def optimizer_of(
    name: OptimizerName,
    parameters: Iterable[Tensor],
    *,
    learning_rate: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Return the optimiser, with torch's default for what is not given. Its state lasts for one round."""
    from torch import optim

    if name == "adam":
        return optim.Adam(parameters, learning_rate, weight_decay=weight_decay)
    if name == "adamw":
        return optim.AdamW(parameters, learning_rate, weight_decay=weight_decay)
    return optim.SGD(parameters, learning_rate, momentum=momentum, weight_decay=weight_decay)
