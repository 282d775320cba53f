"""What a message holds: the names that strategies and clients agree on, and what may arrive.

Download (server → site): arrays {WEIGHTS}, config {ROUND, LEDGER_HEAD}.
Upload (site → server): arrays {CHANGE}, metrics {RECORDS, …}, config {ROUND, EVENTS, LEDGER_HEAD, DEVICE}.
LEDGER_HEAD is the number and seal of the last entry in the site's ledger, as the server has seen it.
Both arrays are sparse updates in the wire format of `codec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fed_dp.errors import UploadRefused
from fed_dp.sharing.update import SparseUpdate

ARRAYS, METRICS, CONFIG = "arrays", "metrics", "config"  # the records of a message
WEIGHTS, CHANGE = "weights", "change"
ROUND, RECORDS, EVENTS, LEDGER_HEAD, DEVICE = "round", "records", "events", "mark", "device"
PARTITION, PARTITIONS = "partition-id", "num-partitions"  # of a node's own config …
SIMULATED = "simulated"  # … where our own Grid says that it is a virtual one
SCORES = "scores"  # of what a site says of itself: whether it tells how well a model does there
REFUSED = "refused"  # … and why its own file does not allow the experiment
SITE = "site"  # of a node's own config: a deployed site's own file
LEDGER = "ledger"  # of a node's own config: a deployed site's file; of its state: a virtual client's account
WIRE = "fed_dp.sharing.codec"  # Flower's name of how an array is written


@dataclass(frozen=True, slots=True)
class Upload:
    """A site's selected changes, with the public number of its records."""

    update: SparseUpdate
    records: int


def check_records(records: Any, *, announced: int) -> int:
    """Return the number of records if it is the one the site announced when the run began."""
    if not isinstance(records, int) or records != announced:
        raise UploadRefused(f"{RECORDS} = {records!r}: the site announced {announced} when the run began")
    return records


def check_round(found: Any, *, asked: int) -> None:
    """Refuse an upload that was made for another round: a replay."""
    if found != asked:
        raise UploadRefused(f"{ROUND} = {found!r}: the site was asked for round {asked}")
