"""The support vector machine's network: Fourier features of an RBF kernel under a linear machine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from fed_dp.errors import ModelError
from fed_dp.models.network import Network, Shape, size_of
from fed_dp.options import Size

if TYPE_CHECKING:
    from torch import nn


class Rbf(Network):
    """Fourier features of the kernel exp(−‖x − y‖²/σ²); two classes have one output, whose sign decides."""

    name: Literal["rbf"] = "rbf"
    offers = "kernel"
    features: Size | None = None
    width: Annotated[float, Field(gt=0, le=1e6)] | None = None  # σ

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from fed_dp.models.fitted import KernelMachine

        features = self.features or 100
        if features % 2:
            raise ModelError(f"model.features = {features}: Fourier features come in pairs; expected even")
        return KernelMachine(size_of(shape), features, classes, self.width or 2 * math.sqrt(size_of(shape)))
