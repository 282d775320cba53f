"""Small networks for gradient methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fed_dp.models.network import Network, Shape, size_of

if TYPE_CHECKING:
    from torch import nn


class Linear(Network):
    """Logistic regression."""

    name: Literal["linear"] = "linear"

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from torch import nn

        return nn.Sequential(nn.Flatten(), nn.Linear(size_of(shape), classes), nn.LogSoftmax(dim=1))


class Logistic(Linear):
    """Logistic regression that begins at 0, so that inputs nothing is learnt from count for nothing."""

    name: Literal["logistic"] = "logistic"  # type: ignore[assignment]
    offers = "logistic"

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from torch import nn

        network = super().build(shape, classes)
        for parameter in network.parameters():
            nn.init.zeros_(parameter)
        return network


class SmallMlp(Network):
    """A perceptron with one layer of 32 units."""

    name: Literal["small-mlp"] = "small-mlp"

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from torch import nn

        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(size_of(shape), 32),
            nn.ReLU(),
            nn.Linear(32, classes),
            nn.LogSoftmax(dim=1),
        )


class SmallCnn(Network):
    """Two convolutions of 3×3, each under max-pooling by 2."""

    name: Literal["small-cnn"] = "small-cnn"

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from torch import nn

        channels, height, width = self.image(shape, at_least=8)
        return nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * (height // 4) * (width // 4), classes),
            nn.LogSoftmax(dim=1),
        )
