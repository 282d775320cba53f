"""What every message's process needs, imported once per site: the fork server begins with it."""

from __future__ import annotations

import importlib

from fed_dp.models import use_one_thread

for name in (
    "dp_accounting.pld.pld_privacy_accountant",
    "fed_dp.clients.app",
    "fed_dp.deploy.supernode",
    "flwr.supernode.runtime.run_clientapp",
    "opendp.prelude",
    "torch._dynamo",  # which torch's optimizers ask for
):
    importlib.import_module(name)
use_one_thread()
