"""Drop-in parts for somebody's own Flower app, which else stays as it is.

`Dssgd` is a Flower strategy: distributed selective SGD with `strategy.start(grid, arrays)`. The others are
mods of a ClientApp: `selective_upload` sends a chosen part of the changes, `private_upload` sends them with
noise, charged to a ledger, and `ledger` charges what an app with noise of its own says it releases.
`simulate` runs any pair of apps over fed_dp's own grid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fed_dp.lazy import exports

if TYPE_CHECKING:
    from fed_dp.flower.ledger_mod import ledger
    from fed_dp.flower.private import private_upload
    from fed_dp.flower.selective import selective_upload
    from fed_dp.flower.simulation import simulate
    from fed_dp.flower.strategy import Dssgd

__all__ = ["Dssgd", "ledger", "private_upload", "selective_upload", "simulate"]
__getattr__ = exports(
    __name__,
    {
        "Dssgd": "strategy",
        "ledger": "ledger_mod",
        "private_upload": "private",
        "selective_upload": "selective",
        "simulate": "simulation",
    },
)
