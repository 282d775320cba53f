"""What a node works with: the experiment, its records, the trainer; and whether it is a real site.

A node whose own config names a `site` file or a `ledger` is a real site, and its file is consulted before any
record is opened. All of it is read once per process, not once per message.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from logging import ERROR
from pathlib import Path

import numpy as np
from flwr.app import Context
from flwr.common.logger import log

from fed_dp.accounting import Guarantee
from fed_dp.accounting.account import Planned
from fed_dp.clients.building import make_trainer
from fed_dp.clients.memory import InContext, Memory, OnDisk
from fed_dp.clients.site_file import SiteFile
from fed_dp.clients.trainer import Trainer
from fed_dp.clients.update_exchange import UpdateExchange
from fed_dp.errors import DataError, FedDpError, PrivacyError, RunError, SiteRefused
from fed_dp.experiment import Experiment, from_run_config
from fed_dp.experiment.federation import Federation, at_site, make_federation
from fed_dp.experiment.plan import ReleasePlan, guarantee_of, release_plan
from fed_dp.experiment.start import starting_weights
from fed_dp.models import NetworkSpec, Vector
from fed_dp.sharing import message as names

RunConfig = tuple[tuple[str, bool | float | int | str], ...]


@dataclass(frozen=True, slots=True)
class Workplace:
    """A node's experiment with all that it takes to train."""

    experiment: Experiment
    federation: Federation
    network: NetworkSpec
    trainer: Trainer
    size: int  # of the model
    guarantee: Guarantee | None  # None: nothing is private
    site: SiteFile | None  # of a deployed site
    _plans: dict[int, ReleasePlan | None] = field(default_factory=dict)
    _planned: dict[int, Planned] = field(default_factory=dict)

    def plan(self, client: int) -> ReleasePlan | None:
        """Return what a client releases; None where nothing is private."""
        if client not in self._plans:
            self._plans[client] = release_plan(self.experiment, client=client, size=self.size)
        return self._plans[client]

    def planned(self, client: int) -> Planned:
        """Return all that the experiment's rounds charge a client."""
        if client not in self._planned:
            plan = self.plan(client)
            charges = {} if plan is None else plan.charges(self.experiment.rounds)
            self._planned[client] = tuple(charges.items())
        return self._planned[client]

    def exchange(self, client: int) -> UpdateExchange:
        """Return a client's side of the exchange."""
        plan = self.plan(client)
        return UpdateExchange.of(self.experiment, client, self.size, None if plan is None else plan.release)

    def memory(self, context: Context, server_round: int) -> Memory:
        """Return where it keeps what lasts from round to round."""
        if self.site is None or self.site.memory is None:
            return InContext(context)
        guarantee = "none" if self.guarantee is None else self.guarantee.name
        return OnDisk(Path(self.site.memory), self.experiment.digest, server_round, guarantee)

    def stated_records(self, client: int) -> int:
        """Return the number of records; 0 where it is not shared, and a declared number in its place.

        Where all of a site's records are protected together, their number is, too.
        """
        if (expected := self.experiment.data.expected(client)) is not None:
            return expected
        protected = self.guarantee is not None and self.guarantee.unit == "participant"
        shared = not protected and (self.site is None or self.site.share.records)
        return len(self.federation.rows(client)) if shared else 0

    def own_weights(self, memory: Memory) -> Vector:
        """Return the client's own parameters; before its first round, those that everybody begins with."""
        if (own := memory.own()) is not None:
            return own
        if self.experiment.fits_to_public:  # by schema, all of it comes from the server
            raise PrivacyError(
                "a site fits no encoder to records, and part of the model is missing; nothing was sent"
            )
        return starting_weights(self.experiment, self.federation)


@lru_cache(maxsize=1)
def read_workplace(config: RunConfig, site: SiteFile | None = None) -> Workplace:
    """Read the experiment, the data and the network."""
    if site is not None and not dict(config).get("experiment-json"):
        raise SiteRefused("a site takes experiments that are sent whole, and opens no file for a server")
    if site is not None:  # before any code that it names is imported
        site.permit_code(json.loads(str(dict(config)["experiment-json"])))
    experiment = from_run_config(dict(config))
    if site is not None:  # before its records are opened
        _permit(site, experiment)
    if site is None or site.data is None:
        if site is not None and experiment.data.path is not None:
            raise SiteRefused(
                "data.path: where a site's records are is not for a server to say; nothing was sent"
            )
        federation = make_federation(experiment)
    else:
        federation = at_site(experiment, path=Path(site.data.path), client=site.client)
    trainer, net = make_trainer(experiment, federation.dataset)
    return Workplace(experiment, federation, net.spec, trainer, net.size, guarantee_of(experiment), site)


def workplace_of(context: Context) -> tuple[Workplace, int]:
    """Return a node's workplace and which client it is."""
    site = site_of(context)
    if site is None and names.PARTITION not in context.node_config:
        raise RunError(f"node_config has no {names.PARTITION}: this node does not know which client it is")
    try:
        place = read_workplace(tuple(sorted(context.run_config.items())), site)
    except PrivacyError:
        raise
    except Exception as error:
        if simulated(context) or (site is None and not isinstance(error, DataError)):
            raise
        # It may quote what it found in the records, or which columns there are: no reply and no log does.
        redacted = (
            f"the data of this site cannot be used ({type(error).__name__}); fed-dp deploy check tells why"
        )
        log(ERROR, redacted)
        raise DataError(redacted) from None
    return place, site.client if site is not None else int(context.node_config[names.PARTITION])


def site_of(context: Context) -> SiteFile | None:
    """Return what a deployed site's own file says. One that names a ledger alone has a file of defaults."""
    node = context.node_config
    if path := node.get(names.SITE):
        try:
            return SiteFile.read(Path(str(path)))
        except FedDpError as error:
            log(ERROR, "this site's own file cannot be used: %s", error)
            raise SiteRefused("this site's own file cannot be used; nothing was sent") from None
    if path := node.get(names.LEDGER):
        return SiteFile(client=int(node.get(names.PARTITION, 0)), ledger=str(path))
    return None


def site_paths(context: Context) -> list[str]:
    """Return the paths that a site's own configuration names; a virtual client has none."""
    named = [
        str(context.node_config[key]) for key in (names.SITE, names.LEDGER) if key in context.node_config
    ]
    if not named:
        return []
    try:
        site = site_of(context)
    except FedDpError:
        site = None
    if site is not None:
        named += [site.ledger, site.key, site.authority]
        named += [path for path in (site.memory, site.witness, site.data and site.data.path) if path]
    return named


def simulated(context: Context) -> bool:
    """Return whether our Grid says so, or this is a Ray worker, where Flower's own simulation runs."""
    ray = sys.modules.get("ray")
    return names.SIMULATED in context.node_config or (ray is not None and ray.is_initialized())


def _permit(site: SiteFile, experiment: Experiment) -> None:
    """Hold the server to the site's own file; what is refused is logged."""
    try:
        site.permit(experiment)
    except FedDpError as error:
        log(ERROR, "refused: %s", error)
        raise


def no_weights() -> Vector:
    """Stand for parameters of which the server sends all."""
    return np.zeros(0, np.float32)
