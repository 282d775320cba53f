"""Support vector machines' networks: Fourier features of an RBF kernel, and the kernel itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from fed_dp.errors import ModelError
from fed_dp.models.network import Network, Shape, size_of
from fed_dp.options import Size

if TYPE_CHECKING:
    from torch import nn

Width = Annotated[float, Field(gt=0, le=1e6)]


class Rbf(Network):
    """Fourier features of the kernel exp(−‖x − y‖²/σ²); two classes have one output, whose sign decides."""

    name: Literal["rbf"] = "rbf"
    offers = "kernel"
    features: Size | None = None
    width: Width | None = None  # σ

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from fed_dp.models.kernel import KernelMachine

        features = self.features or 100
        if features % 2:
            raise ModelError(f"model.features = {features}: Fourier features come in pairs; expected even")
        return KernelMachine(size_of(shape), features, classes, self.width or usual_width(shape))


class RbfExact(Network):
    """The kernel itself, over support vectors. They are records: for public ones alone."""

    name: Literal["rbf-exact"] = "rbf-exact"
    offers = "kernel"
    holds_records = True
    width: Width | None = None  # σ

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it, for as many records as there are."""
        from fed_dp.models.kernel import ExactKernelMachine

        records = decided.get("records", 1)
        return ExactKernelMachine(size_of(shape), records, classes, self.width or usual_width(shape))


def usual_width(shape: Shape) -> float:
    """Return σ where none is given: 2 √inputs, for inputs in [−1, 1]."""
    return 2 * math.sqrt(size_of(shape))
