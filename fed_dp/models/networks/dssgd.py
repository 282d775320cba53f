"""The networks of DSSGD's paper: Shokri and Shmatikov, "Privacy-Preserving Deep Learning", CCS 2015."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fed_dp.models.network import Network, Shape, size_of

if TYPE_CHECKING:
    from torch import nn


class DssgdMlp(Network):
    """Fig. 5: 140,106 parameters for 1024 inputs, 402,250 for 3072."""

    name: Literal["dssgd-mlp"] = "dssgd-mlp"

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from torch import nn

        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(size_of(shape), 128),
            nn.ReLU(),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Linear(64, classes),
            nn.LogSoftmax(dim=1),
        )


class DssgdCnnMnist(Network):
    """Fig. 6: 105,506 parameters. 32 → 28 → 9 → 5 → 2, so 64 · 2 · 2 = 256.

    The paper has tanh before the pooling; tanh grows, so the maximum commutes with it: same values,
    a ninth of the work.
    """

    name: Literal["dssgd-cnn-mnist"] = "dssgd-cnn-mnist"

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from torch import nn

        from fed_dp.models.layers import ChannelsLast

        self.exactly(shape, (1, 32, 32))
        return nn.Sequential(
            ChannelsLast(),
            nn.Conv2d(1, 32, 5),
            nn.MaxPool2d(3),
            nn.Tanh(),
            nn.Conv2d(32, 64, 5),
            nn.MaxPool2d(2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(256, 200),
            nn.Tanh(),
            nn.Linear(200, classes),
            nn.LogSoftmax(dim=1),
        )


class DssgdCnnSvhn(Network):
    """Fig. 7: 313,546 parameters. 32 → 28 → 14 → 10 → 5, so 64 · 5 · 5 = 1600."""

    name: Literal["dssgd-cnn-svhn"] = "dssgd-cnn-svhn"

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from torch import nn

        from fed_dp.models.layers import ChannelsLast, L2Pooling, SubtractiveNormalisation

        self.exactly(shape, (3, 32, 32))
        return nn.Sequential(
            ChannelsLast(),
            nn.Conv2d(3, 64, 5),
            nn.Tanh(),
            L2Pooling(),
            SubtractiveNormalisation(64),
            nn.Conv2d(64, 64, 5),
            nn.Tanh(),
            L2Pooling(),
            SubtractiveNormalisation(64),
            nn.Flatten(),
            nn.Linear(1600, 128),
            nn.Tanh(),
            nn.Linear(128, classes),
            nn.LogSoftmax(dim=1),
        )
