"""A mod for any ClientApp: its change leaves with noise, charged to a durable ledger before that is drawn.

What is protected is all of a site's records at once (unit: participant): the change is bounded as a whole,
whatever the app's training does with them, so that no proof about the app is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from logging import ERROR
from pathlib import Path
from typing import Literal

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.common.logger import log

from fed_dp.accounting import Budget, Event, Gaussian, Release, SparseVector
from fed_dp.clients.redaction import kind_only, without_site_paths
from fed_dp.errors import ConfigError, RunError
from fed_dp.flower.arrays import update_record
from fed_dp.flower.mods import TRAIN, App, Download, Mod, category, precision_of
from fed_dp.flower.site_ledger import (
    Charges,
    client_of,
    cost_metrics,
    keep_reply,
    kept_reply,
    only_scores,
    request_of,
)
from fed_dp.mechanisms import Noise
from fed_dp.sharing.codec import Precision, encode
from fed_dp.sharing.private_selection import RandomMask, SparseVectorSelector
from fed_dp.sharing.selection import share
from fed_dp.sharing.update import MAX_ABS_VALUE, Vector
from fed_dp.strategies.dssgd import RANDOM_MASK, SPARSE_VECTOR

MIN_BOUND = 1e-9  # below, float32 cannot tell values from 0


def private_upload(
    *,
    clip: float | None = None,
    noise_multiplier: float | None = None,
    selection: Literal["random_mask", "sparse_vector"] = "random_mask",
    upload_fraction: float = 1.0,
    epsilon: float | None = None,
    threshold: float = 1e-4,
    bound: float | None = None,
    ledger: str | Path | None = None,
    witness: str | Path | None = None,
    budget: Budget | None = None,
    records: int = 1,
    weight_key: str = "num-examples",
    evaluate: bool = False,
    seed: int | None = None,
) -> Mod:
    """Return a mod under which an app's change is bounded, charged, noised, kept and then sent.

    The reply holds the noised model (or, for `Dssgd`, the noised part of the change), the site's weight and
    its total ε; whatever else the app replied with (its loss, its configs) stays at the site. With a ledger
    on disk, a request that comes again gets the same bytes and costs nothing. Whatever the app's training
    comes to, noise is sent: where it raises or returns other arrays, the change counts as 0, and the site's
    log has the error. How long it trains is not hidden. The app must be the operator's own: one that a
    server hands out could leave the mod out.

    Parameters
    ----------
    clip
        L2 norm that the uploaded change is cut to (`random_mask`). Its sensitivity is 2 · clip.
    noise_multiplier
        σ over that sensitivity (`random_mask`).
    selection
        "random_mask": coordinates drawn without looking, with Gaussian noise. "sparse_vector": at most that
        share of the coordinates, those that noisily reach `threshold`, with Laplace noise.
    upload_fraction
        θ_u, the share of the coordinates that is uploaded; of what `Dssgd` asks, the smaller.
    epsilon
        ε of one round (`sparse_vector`).
    threshold, bound
        τ and γ of `sparse_vector`, which needs a bound. With `random_mask` values are cut to the bound
        after noise.
    ledger
        The site's ledger on disk (`fed-dp ledger create`), which holds its budget. By default the one that
        `ledger` in the node config names. A simulation has `budget` in its place.
    witness
        Where the last ledger head is kept a second time, to find a ledger that was rolled back. By default
        beside the ledger.
    budget
        Of each simulated client.
    records
        The weight of this site for strategies that average. It is sent as it is: a public number.
    weight_key
        What the strategy calls it (FedAvg: "num-examples").
    evaluate
        Whether messages other than those that train are let through. Every one is entered in the ledger as
        released without noise.
    seed
        Of simulated noise, which is not secure. Without it, noise comes from the operating system (OpenDP).

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> import fed_dp
    >>> mod = fed_dp.flower.private_upload(
    ...     clip=1.0, noise_multiplier=4.0, budget=fed_dp.Budget(epsilon=8, delta=1e-5), seed=1
    ... )
    >>> app = ClientApp(mods=[mod])

    """
    mechanism = _Mechanism(
        selection, upload_fraction, bound, clip, noise_multiplier, epsilon, threshold, records
    )
    mechanism.check()
    charges = Charges.of(ledger, witness, budget, seed)

    def mod(message: Message, context: Context, app: App) -> Message:
        with without_site_paths([str(charges.path(context) or "")]), charges.session(context) as session:
            if category(message) != TRAIN:
                return only_scores(message, context, app, session, allowed=evaluate)
            download, request = Download.of(message, context), request_of(message)
            upload = mechanism.upload_for(download)
            if (before := kept_reply(session, request, message)) is not None:
                return before
            client, source = client_of(context), charges.source(context)
            event = Event(upload.release, upload.guarantee, request.server_round, client, source)
            charges.check_noise(context)
            account = session.charge(event, request)
            change = _change(download, app, message, context)
            with kind_only():
                content = upload.content(change, download, noise=charges.noise(context, request, account))
            costs = MetricRecord({weight_key: records, **cost_metrics(account)})
            reply = Message(RecordDict({download.name: content, "metrics": costs}), reply_to=message)
            keep_reply(session, account, request, reply)
            return reply

    return mod


@dataclass(frozen=True, slots=True)
class _Upload:
    """How one round's change leaves."""

    selector: RandomMask | SparseVectorSelector
    release: Release
    guarantee: str
    precision: Precision

    def content(self, change: Vector, download: Download, *, noise: Noise) -> ArrayRecord:
        """Select with noise, and write it as the strategy takes it."""
        update = self.selector.select(change, noise=noise)
        if download.terms is not None:
            return update_record(encode(update, precision=self.precision))
        whole = np.zeros_like(download.weights)
        update.overwrite(whole)
        return download.layout.fill(download.template, download.weights + whole)


@dataclass(frozen=True, slots=True)
class _Mechanism:
    """What the operator chose."""

    selection: str
    upload_fraction: float
    bound: float | None
    clip: float | None
    noise_multiplier: float | None
    epsilon: float | None
    threshold: float
    records: int

    def check(self) -> None:
        """Refuse options that are missing, out of range, or would not be used."""
        used = {"random_mask": ("clip", "noise_multiplier"), "sparse_vector": ("epsilon", "bound")}
        if self.selection not in used:
            raise ConfigError(f"selection = {self.selection!r}: expected 'random_mask' or 'sparse_vector'")
        for key in used[self.selection]:
            value = getattr(self, key)
            if not isinstance(value, float | int) or not 0 < value < float("inf"):
                raise ConfigError(f"{key} = {value!r}: selection = {self.selection!r} needs a number above 0")
        for other in set(used) - {self.selection}:
            for key in set(used[other]) - {"bound"}:
                if getattr(self, key) is not None:
                    raise ConfigError(
                        f"{key} = {getattr(self, key)!r} is not used by selection = {self.selection!r}"
                    )
        if self.bound is not None and not MIN_BOUND <= self.bound <= MAX_ABS_VALUE:
            raise ConfigError(f"bound = {self.bound!r}: expected from {MIN_BOUND:g} to {MAX_ABS_VALUE:g}")
        if not 0 < self.upload_fraction <= 1:
            raise ConfigError(f"upload_fraction = {self.upload_fraction!r}: expected above 0, at most 1")
        if not 0 <= self.threshold < float("inf"):
            raise ConfigError(f"threshold = {self.threshold!r}: expected 0 or above")
        if type(self.records) is not int or self.records < 1:
            raise ConfigError(f"records = {self.records!r}: expected a whole number from 1")
        self._release(1)  # a release out of range

    def upload_for(self, download: Download) -> _Upload:
        """Return how this round's change leaves: as the strategy asks, within what the operator chose."""
        terms = {} if download.terms is None else dict(download.terms)
        asked = {"upload_fraction": self.upload_fraction, "bound": self.bound or MAX_ABS_VALUE}
        for key, own in asked.items():
            value = terms.get(key, own)
            if not isinstance(value, float | int) or not MIN_BOUND <= value <= MAX_ABS_VALUE:
                raise RunError(f"{key} = {value!r} from the server: expected a number above 0")
            asked[key] = min(own, float(value))
        precision = precision_of(terms)
        count = share(min(1.0, asked["upload_fraction"]), download.layout.size)
        release = self._release(count)
        if isinstance(release, Gaussian):
            assert self.clip is not None  # by check
            mask = RandomMask(count, self.clip, release.noise_multiplier, asked["bound"])
            return _Upload(mask, release, RANDOM_MASK.name, precision)
        assert self.epsilon is not None  # by check
        sparse = SparseVectorSelector(count, asked["bound"], self.threshold, self.epsilon)
        return _Upload(sparse, release, SPARSE_VECTOR.name, precision)

    def _release(self, count: int) -> Release:
        if self.selection == "random_mask":
            assert self.noise_multiplier is not None  # by check
            return Gaussian(float(self.noise_multiplier))
        assert self.epsilon is not None  # by check
        return SparseVector(float(self.epsilon), count)


def _change(download: Download, app: App, message: Message, context: Context) -> Vector:
    """Train, and return the change; 0 where training failed: whether a site answers tells nothing."""
    try:
        reply = download.train(app, message, context)
        if reply.has_error():
            raise RunError(reply.error.reason)
        _, trained = download.trained(reply)
    except (Exception, SystemExit) as error:
        log(
            ERROR,
            "training failed, and a change of 0 is sent with noise: %s: %s",
            type(error).__name__,
            error,
        )
        trained = download.weights
    download.keep_own(context, np.nan_to_num(trained, posinf=0.0, neginf=0.0))
    return trained - download.weights
