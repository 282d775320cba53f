"""AdLM's convolutional network as its paper has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fed_dp.models.network import Network, Shape
from fed_dp.options import Size

if TYPE_CHECKING:
    from torch import nn


class AdlmCnnNetwork(Network):
    """MNIST: 32 and 64 filters of 5×5, 25 units. CIFAR-10: 128 of 3×3, 128 and 256 of 5×5, 30 units."""

    name: Literal["adlm-cnn"] = "adlm-cnn"
    offers = "noisy-inputs"
    filters: Size | None = None
    hidden: Size | None = None

    def build(
        self, shape: Shape, classes: int, *, released: bool = False, apart: bool = False, **decided: Any
    ) -> nn.Module:
        """Build it, as printed or as released; or, `apart`, such that no record depends on its batch."""
        from fed_dp.models.adlm import AdlmCnn

        image = self.image(shape, at_least=8)
        how = {"released": released, "apart": apart}
        if image[0] == 1:
            first = self.filters or 32
            return AdlmCnn(image, classes, (first, 2 * first), (5, 5), self.hidden or 25, **how)
        first = self.filters or 128
        return AdlmCnn(image, classes, (first, first, 2 * first), (3, 5, 5), self.hidden or 30, **how)
