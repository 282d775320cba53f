"""What the server remembers of real sites' ledgers over all its runs: the last ledger head of each.

A site that comes back with an older copy of its ledger does not have that entry, and refuses. One that comes
with another ledger would have no known entry: it takes no part until the operator forgets the old one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fed_dp.errors import RunError
from fed_dp.runs.folder import write_atomically
from fed_dp.strategies.sites import Site

FILE = "marks.json"  # beside the run folders
OTHER = "another ledger than in earlier runs"


class LedgerHeads:
    """The last head of every ledger, in a file beside the run folders; virtual clients have none there."""

    def __init__(self, root: Path) -> None:
        self._path = root / FILE
        self._known: dict[str, str] = {}
        if self._path.is_file():
            try:
                self._known = {str(k): str(v) for k, v in json.loads(self._path.read_text()).items()}
            except (OSError, ValueError, AttributeError) as error:
                raise RunError(
                    f"{self._path} cannot be read ({error}): it holds what sites' ledgers must contain; "
                    "put it back, or delete it to forget"
                ) from None

    def of(self, sites: Sequence[Site], otherwise: Sequence[str]) -> list[str]:
        """Return each site's ledger head: the one remembered, or else what the run itself has seen."""
        return [self._known.get(_whose(site), head) for site, head in zip(sites, otherwise, strict=True)]

    def admitted(self, sites: Sequence[Site]) -> tuple[Site, ...]:
        """Return the sites, without those that have another ledger than the one that is remembered."""
        return tuple(
            replace(site, node=0, why=f"it has {OTHER}: fed-dp deploy forget, if that is on purpose")
            if any(key != _whose(site) for key in self._of_name(site.name))
            else site
            for site in sites
        )

    def forget(self, name: str) -> int:
        """Forget all ledgers of a site; return how many they were."""
        old = self._of_name(name)
        for key in old:
            del self._known[key]
        if old:
            write_atomically(self._path, json.dumps(self._known, indent=2).encode())
        return len(old)

    def _of_name(self, name: str) -> list[str]:
        return [key for key in self._known if name and key.startswith(f"{name}:")]

    def keep(self, sites: Sequence[Site], ledger_heads: Sequence[str]) -> None:
        """Remember the ledger heads of real sites."""
        new = {
            _whose(site): head for site, head in zip(sites, ledger_heads, strict=True) if site.ledger and head
        }
        if new and not new.items() <= self._known.items():
            self._known |= new
            write_atomically(self._path, json.dumps(self._known, indent=2).encode())


def _whose(site: Site) -> str:
    """Return whose ledger head it is: a site says which ledger it has, but its name follows from its key."""
    return f"{site.name}:{site.ledger}" if site.name else site.ledger
