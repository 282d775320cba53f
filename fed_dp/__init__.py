"""fed_dp: private federated learning on Flower, where every number about privacy can be checked."""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["__version__"]
