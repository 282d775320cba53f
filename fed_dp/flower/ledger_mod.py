"""A mod for apps with noise of their own: what they say they release is charged before they train."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Message

from fed_dp.accounting import Budget, Event, Release
from fed_dp.accounting.guarantee import BY_AUTHOR
from fed_dp.clients.redaction import without_site_paths
from fed_dp.errors import RunError
from fed_dp.flower.mods import TRAIN, App, Mod, category
from fed_dp.flower.site_ledger import (
    Charges,
    client_of,
    cost_metrics,
    keep_reply,
    kept_reply,
    only_scores,
    request_of,
)


def ledger(
    release: Release,
    *,
    ledger: str | Path | None = None,
    witness: str | Path | None = None,
    budget: Budget | None = None,
    evaluate: bool = False,
) -> Mod:
    """Return a mod that charges `release` for every message that trains, and refuses over budget.

    The app adds its own noise (through Opacus, say); that it does is its author's claim, and the ledger says
    so. The charge is on disk before the app is called. What it replies is kept, and a request that comes
    again gets the same bytes. The reply's metrics get `epsilon` and `delta`: the site's total so far.

    Parameters
    ----------
    release
        What one round releases: `fed_dp.accounting.SampledGaussian(noise_multiplier, sample_rate, steps)`,
        `Gaussian`, `Laplace` or `SparseVector`.
    ledger, witness, budget, evaluate
        As of `private_upload`.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> import fed_dp
    >>> from fed_dp.accounting import SampledGaussian
    >>> one_round = SampledGaussian(noise_multiplier=1.1, sample_rate=0.05, steps=20)
    >>> app = ClientApp(mods=[fed_dp.flower.ledger(one_round, ledger="site.sqlite")])

    """
    charges = Charges.of(ledger, witness, budget, None)

    def mod(message: Message, context: Context, app: App) -> Message:
        with without_site_paths([str(charges.path(context) or "")]), charges.session(context) as session:
            if category(message) != TRAIN:
                return only_scores(message, context, app, session, allowed=evaluate)
            request = request_of(message)
            if (before := kept_reply(session, request, message)) is not None:
                return before
            event = Event(
                release, BY_AUTHOR.name, request.server_round, client_of(context), charges.source(context)
            )
            account = session.charge(event, request)
            reply = app(message, context)
            if reply.has_error():
                raise RunError("the app failed; nothing was sent")  # its words may hold records
            if (metrics := next(iter(reply.content.metric_records.values()), None)) is None:
                raise RunError("the app's reply has no metrics: there is nowhere to tell the site's ε")
            metrics.update(cost_metrics(account))
            keep_reply(session, account, request, reply)
            return reply

    return mod
