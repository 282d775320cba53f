"""Whether a network treats every record by itself, found out numerically.

The guarantees of pSGD and of statistics bound one record's part of a sum. Where the output or the gradient
of a record depends on the others in its batch (a mean over the batch, a running statistic), there is none.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fed_dp.errors import ModelError
from fed_dp.models.network import Shape
from fed_dp.tasks import Task

BATCHES = (2, 5, 33)  # records in the random batches that are tried
LOSS_BATCHES = (*BATCHES, 257)  # of losses, which cost little
NUDGE = 0.02  # of all parameters: what is multiplied by a 0 would not be seen
TOLERANCE = 1e-4  # relative: far above rounding
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def check_independent(
    network: nn.Module, shape: Shape, *, name: str, seen: Callable[[nn.Module, Tensor], Tensor] | None = None
) -> None:
    """Refuse a network in which records of a batch depend on each other, in training mode.

    By default its outputs and gradients are looked at; with `seen`, what that returns of records instead.
    Dropout, which is drawn anew for each record, is left out. What only larger batches show, or what a
    network hides from its buffers, is not found.

    Raises
    ------
    ModelError
        Naming the network and what depends on other records.
    """
    network = _nudged(_exact(network, shape).train())
    for module in network.modules():
        if isinstance(module, DROPOUT):
            module.eval()
    source = torch.Generator().manual_seed(0)
    buffers = {key: value.clone() for key, value in network.named_buffers()}
    for count in BATCHES:
        x = torch.randn(count, *shape, generator=source).to(_example(network))
        if seen is not None:
            with torch.no_grad():
                alone = torch.cat([seen(network, part) for part in torch.split(x, 1)])
                _compare(name, "features", seen(network, x), alone)
        else:
            _compare_training(network, x, name, source)
    if any(not torch.equal(value, buffers[key]) for key, value in network.named_buffers()):
        raise ModelError(
            f"model.name = {name!r} keeps something of the records that it sees (a buffer changes): no "
            "guarantee for one record holds; expected layers without running statistics, such as GroupNorm"
        )


def check_independent_loss(task: Task, network: nn.Module, shape: Shape, outputs: int) -> None:
    """Refuse a task whose loss of a record depends on the other records of its batch.

    Raises
    ------
    ModelError
        Naming the task, and what `loss` did.
    """
    source = torch.Generator().manual_seed(0)
    where = f"task.name = {task.name!r}"
    network = _nudged(copy.deepcopy(network).eval())
    for count in LOSS_BATCHES:
        with torch.no_grad():
            seen = network(
                torch.randn(min(count, BATCHES[-1]), *shape, generator=source).to(_example(network))
            )
        free = 3 * torch.randn(count, outputs, generator=source).to(seen)  # whatever the network is
        for found in (seen, free.log_softmax(1) if task.log_probabilities else free):
            targets = _targets(task, len(found), outputs, source).to(found.device)
            _compare_losses(task, found, targets, where)


def _compare_losses(task: Task, found: Tensor, targets: Tensor, where: str) -> None:
    """Compare each record's loss and its gradient, in a batch and alone."""
    found = found.detach().requires_grad_()
    together = task.loss(found, targets)
    if not isinstance(together, Tensor) or together.shape != (len(found),):
        told = tuple(together.shape) if isinstance(together, Tensor) else type(together).__name__
        raise ModelError(
            f"{where}: loss() of {len(found)} records returned {told}, expected shape ({len(found)},)"
        )
    alone = torch.cat([task.loss(found[k : k + 1], targets[k : k + 1]) for k in range(len(found))])
    pairs = [(together.detach(), alone.detach())]
    if together.requires_grad:
        direction = torch.linspace(-1, 2, len(found)).to(together)  # each record's loss has its own weight
        pairs.append((_gradient(together * direction, found), _gradient(alone * direction, found)))
    for one, other in pairs:
        if not torch.allclose(one, other, rtol=TOLERANCE, atol=1e-6, equal_nan=True):
            raise ModelError(
                f"{where}: the loss of a record depends on the other records of its batch: no guarantee for "
                "one record holds; expected a loss of each record by itself"
            )


def _gradient(losses: Tensor, outputs: Tensor) -> Tensor:
    return torch.autograd.grad(losses.sum(), outputs)[0]


def _nudged(network: nn.Module) -> nn.Module:
    """Return a network with all parameters moved a little."""
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(NUDGE * torch.randn(parameter.shape, generator=source).to(parameter))
    return network


def _targets(task: Task, count: int, outputs: int, source: torch.Generator) -> Tensor:
    """Return random targets of a task."""
    if task.targets == "class":
        return torch.randint(outputs, (count,), generator=source)
    if task.targets == "labels":
        return torch.randint(2, (count, outputs), generator=source).float()
    return torch.randn(count, outputs, generator=source)


def _compare_training(network: nn.Module, x: Tensor, name: str, source: torch.Generator) -> None:
    """Compare outputs, and the gradient of a random function of them."""
    together, alone = network(x), torch.cat([network(part) for part in torch.split(x, 1)])
    _compare(name, "output", together.detach(), alone.detach())
    direction = torch.randn(together.shape, generator=source).to(x)
    parameters = [p for p in network.parameters() if p.requires_grad]
    gradients = [
        torch.autograd.grad((each * direction).sum(), parameters, allow_unused=True)
        for each in (together, alone)
    ]
    for found, wanted in zip(*gradients, strict=True):
        if found is not None and wanted is not None:  # else a parameter of another objective
            _compare(name, "gradient", found, wanted)


def _compare(name: str, what: str, together: Tensor, alone: Tensor) -> None:
    scale = float(torch.nan_to_num(alone).abs().max()) if alone.numel() else 0.0
    if together.shape == alone.shape and torch.allclose(
        together, alone, rtol=0, atol=TOLERANCE * scale + 1e-12, equal_nan=True
    ):
        return
    raise ModelError(
        f"model.name = {name!r}: the {what} of a record depends on the other records of its batch: no "
        "guarantee for one record holds; expected layers that treat each record by itself, such as GroupNorm "
        "in place of BatchNorm"
    )


def _exact(network: nn.Module, shape: Shape) -> nn.Module:
    """Return a copy of a network in double precision: in single, rounding may move the largest of a pool.

    One that only works in single precision is copied as it is.
    """
    with warnings.catch_warnings():  # TorchScript's parameters are no leaves of the graph
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)
        double = copy.deepcopy(network).double()
    try:
        with torch.no_grad():
            double(torch.zeros(2, *shape).to(_example(double)))
    except RuntimeError:
        return copy.deepcopy(network)
    return double


def _example(network: nn.Module) -> Tensor:
    """Return a tensor of the network's device and precision."""
    return next(network.parameters(), torch.zeros(0)).detach()
