"""The sites that take part, as the server knows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Site:
    """A node that takes part: its Flower id, its client number, its public number of records.

    `ledger` names a real site's ledger, the same in every run; a virtual client has none. A real site
    that is not there has node 0; one that does not tell how many records it has, has 0 of them.
    """

    node: int
    client: int
    records: int
    ledger: str = ""
    name: str = ""
    scores: bool = False  # whether it tells how well a model does on its own test records
    why: str = ""  # it takes no part, if it is there
    refuses: bool = False  # whether its own file does not allow the experiment; then it told no number
