"""The server remembers every site's ledger: an older copy contains too little, another one is not let in."""

from __future__ import annotations

from pathlib import Path

from fed_dp.server.ledger_heads import LedgerHeads
from fed_dp.strategies.sites import Site

OLD = Site(1, 0, 9, ledger="one", name="a")
NEW = Site(1, 0, 9, ledger="two", name="a")
OTHER = Site(2, 1, 9, ledger="three", name="b")


def test_a_new_ledger_under_a_known_name_takes_no_part_until_the_old_one_is_forgotten(tmp_path: Path) -> None:
    """It would begin again at ε = 0, and contain no mark that could tell."""
    ledger_heads = LedgerHeads(tmp_path)
    assert ledger_heads.admitted([OLD, OTHER]) == (OLD, OTHER)
    ledger_heads.keep([OLD, OTHER], ["5:x", "7:y"])
    again = LedgerHeads(tmp_path)
    assert again.admitted([OLD, OTHER]) == (OLD, OTHER)
    refused, kept = again.admitted([NEW, OTHER])
    assert refused.node == 0
    assert "another ledger than in earlier runs: fed-dp deploy forget" in refused.why
    assert kept == OTHER
    assert again.forget("a") == 1
    assert LedgerHeads(tmp_path).admitted([NEW, OTHER]) == (NEW, OTHER)
    assert LedgerHeads(tmp_path).of([NEW, OTHER], ["", ""]) == ["", "7:y"]
    assert LedgerHeads(tmp_path).forget("a") == 0


def test_virtual_clients_have_no_ledgers_to_remember(tmp_path: Path) -> None:
    virtual = Site(3, 0, 9)
    LedgerHeads(tmp_path).keep([virtual], ["5:x"])
    assert LedgerHeads(tmp_path).admitted([virtual]) == (virtual,)
