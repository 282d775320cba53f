"""A network of the user's own: any torch module, from an import path or from Python."""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from fed_dp import plugins
from fed_dp.errors import ConfigError, ModelError
from fed_dp.models.network import Network, Shape
from fed_dp.tasks import Task

if TYPE_CHECKING:
    from torch import Tensor, nn

_CHECKED: set[tuple[str, Shape, int]] = set()  # what was tried in this process already


class Own(Network):
    """`factory` is called with `options`; it returns a module, or is one.

    It may end in logits or in log-probabilities; one logit stands for two classes. Where it takes arguments
    `shape` or `classes`, it is told the shape of an input and the number of outputs. What does not change in
    training (buffers, parameters without gradient) is made anew by the factory wherever the network is built,
    from the same random numbers, and never travels.
    """

    name: Literal["own"] = "own"
    factory: Annotated[str, Field(min_length=1)]  # package.module:name
    options: dict[str, Any] = Field(default_factory=dict)
    outputs: Literal["logits", "log-probabilities"] = "logits"
    code: str | None = None  # SHA-256 of the code; that of the code at hand, unless it is given

    @model_validator(mode="before")
    @classmethod
    def _same_code(cls, table: Any) -> Any:
        """Note the code of the factory; refuse other code than was noted."""
        if not isinstance(table, dict) or not isinstance(path := table.get("factory"), str):
            return table
        try:
            return {**table, "code": plugins.same_code(path, table.get("code"), key="model")}
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @property
    def sizes(self) -> dict[str, int]:
        """The whole numbers among its options."""
        return {f"options.{key}": value for key, value in self.options.items() if type(value) is int}

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it, and add what turns its outputs into log-probabilities."""
        from torch import nn

        from fed_dp.models.layers import TwoClasses

        module = self._made(shape, classes)
        self._fix_constants(module, shape, classes)
        outputs = self._check(module, shape, classes)
        if self.outputs == "log-probabilities":
            return nn.Sequential(module, nn.Identity())
        return nn.Sequential(module, TwoClasses() if outputs < classes else nn.LogSoftmax(dim=1))

    def without_log_probabilities(self, network: nn.Module, task: Task) -> nn.Module:
        """Return the outputs as they are."""
        from torch import nn

        from fed_dp.models.layers import TwoClasses

        assert isinstance(network, nn.Sequential)  # by build
        if self.outputs == "log-probabilities" or isinstance(network[1], TwoClasses):
            raise ModelError(
                f"model.factory = {self.factory!r}: the task takes outputs as they are, one for each target; "
                "expected model.outputs = 'logits' and as many outputs"
            )
        return nn.Sequential(network[0])

    def own_module(self, network: nn.Module) -> nn.Module:
        """Return the module that the factory made."""
        from torch import nn

        assert isinstance(network, nn.Sequential)  # by build
        return network[0]

    def _made(self, shape: Shape, classes: int) -> nn.Module:
        """Call the factory."""
        from torch import nn

        factory = plugins.imported(self.factory, key="model.factory")
        if isinstance(factory, nn.Module):
            return copy.deepcopy(factory)
        if not callable(factory):
            raise ModelError(
                f"model.factory = {self.factory!r} is {factory!r}: expected a function or a class"
            )
        offered = {"shape": shape, "classes": classes}
        try:
            taken = inspect.signature(factory).parameters
            known = {key: value for key, value in offered.items() if key in taken}
            module = factory(**{**known, **self.options})
        except Exception as error:
            raise ModelError(
                f"model.factory = {self.factory!r} with model.options = {self.options} failed: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(module, nn.Module):
            raise ModelError(
                f"model.factory = {self.factory!r} returned {type(module).__name__}: expected a torch "
                "nn.Module"
            )
        return module

    def _fix_constants(self, module: nn.Module, shape: Shape, classes: int) -> None:
        """Make frozen parameters and buffers the same everywhere: from fixed random numbers."""
        import torch

        for name, parameter in module.named_parameters():
            if parameter.dtype != torch.float32:
                raise ModelError(
                    f"model.factory = {self.factory!r}: parameter {name!r} is {parameter.dtype}, expected "
                    "float32"
                )
        frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
        if not frozen and not any(True for _ in module.buffers()):
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            same = self._made(shape, classes)
        held = dict(same.named_parameters())
        for name in frozen:
            owner, _, leaf = name.rpartition(".")
            part = module.get_submodule(owner)
            delattr(part, leaf)
            part.register_buffer(leaf, held[name].detach())
        buffers = dict(same.named_buffers())
        for name, buffer in module.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])

    def _check(self, module: nn.Module, shape: Shape, classes: int) -> int:
        """Try it on random records, once; return how many outputs it has."""
        import torch

        source = torch.Generator().manual_seed(0)
        x = torch.randn(2, *shape, generator=source)
        where = f"model.factory = {self.factory!r}"
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        try:
            with torch.random.fork_rng(devices=[]):
                outputs = module.train()(x)
        except Exception as error:
            raise ModelError(
                f"{where} does not take inputs of shape {shape}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(outputs, torch.Tensor) or outputs.dim() != 2 or len(outputs) != 2:
            told = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
            raise ModelError(
                f"{where} returned {told} for 2 records: expected a tensor of shape (2, {classes})"
            )
        one_logit = classes == 2 and outputs.shape[1] == 1 and self.outputs == "logits"
        if outputs.shape[1] != classes and not one_logit:
            also = " (or 1 logit)" if classes == 2 and self.outputs == "logits" else ""
            raise ModelError(f"{where} has {outputs.shape[1]} outputs: the data needs {classes}{also}")
        key = (self.model_dump_json(), shape, classes)
        if key not in _CHECKED:
            self._check_training(module, outputs, before)
            _CHECKED.add(key)
        return int(outputs.shape[1])

    def _check_training(self, module: nn.Module, outputs: Tensor, before: dict[str, Tensor]) -> None:
        import torch

        where = f"model.factory = {self.factory!r}"
        for name, buffer in module.named_buffers():
            if not torch.equal(buffer, before[name]):
                raise ModelError(
                    f"{where}: the buffer {name!r} changes in training, and only parameters travel; expected "
                    "layers without running statistics, such as GroupNorm in place of BatchNorm"
                )
        named = dict(module.named_parameters())
        if not named:
            raise ModelError(f"{where} has no parameters to train")
        if not outputs.requires_grad:
            raise ModelError(f"{where}: its outputs have no gradient")
        gradients = torch.autograd.grad(outputs.sum(), list(named.values()), allow_unused=True)
        if without := [name for name, gradient in zip(named, gradients, strict=True) if gradient is None]:
            raise ModelError(
                f"{where}: parameter {without[0]!r} has no gradient: it takes no part in the outputs; remove "
                "it, or freeze it (requires_grad_(False))"
            )
        if self.outputs == "log-probabilities":
            sums = outputs.detach().exp().sum(1)
            if not torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
                raise ModelError(
                    f"{where}: its outputs are no log-probabilities (they add up to {float(sums[0]):.3g}); "
                    "expected model.outputs = 'logits'"
                )
