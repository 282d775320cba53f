"""A mod for any ClientApp: upload a chosen small part of the changes (Shokri and Shmatikov 2015, Fig. 3)."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
from flwr.app import Context, Message

from fed_dp.errors import ConfigError, RunError
from fed_dp.flower.arrays import update_record
from fed_dp.flower.mods import TRAIN, App, Download, Mod, category, precision_of
from fed_dp.sharing.codec import Precision, encode
from fed_dp.sharing.selection import Selection, Selector, share
from fed_dp.sharing.update import MAX_ABS_VALUE


def selective_upload(
    *, upload_fraction: float = 1.0, bound: float | None = None, seed: int | None = None
) -> Mod:
    """Return a mod under which an app gets the whole model, and uploads the part that `Dssgd` asks for.

    No privacy: the selected changes, and which they are, depend on the records (see `private_upload`).

    Parameters
    ----------
    upload_fraction
        The largest share of its changes that this site uploads; a strategy that asks for more is refused.
    bound
        The largest value that this site uploads; a strategy that allows larger ones is refused.
    seed
        For simulations that are to be repeated; without it, random choices come from the operating system.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from fed_dp.flower import selective_upload
    >>> app = ClientApp(mods=[selective_upload(upload_fraction=0.1)])

    """
    if not 0 < upload_fraction <= 1:
        raise ConfigError(f"upload_fraction = {upload_fraction!r}: expected above 0, at most 1")
    if bound is not None and not 0 < bound <= MAX_ABS_VALUE:
        raise ConfigError(f"bound = {bound!r}: expected above 0, at most {MAX_ABS_VALUE:g}")

    def mod(message: Message, context: Context, app: App) -> Message:
        if category(message) != TRAIN:
            return app(message, context)
        download = Download.of(message, context)
        if download.terms is None:
            raise RunError(
                "selective_upload: the strategy takes no parts of a model: use fed_dp.flower.Dssgd"
            )
        selector, precision = _asked(dict(download.terms), download.layout.size, upload_fraction, bound)
        reply = download.train(app, message, context)
        if reply.has_error():
            return reply
        name, trained = download.trained(reply)
        change = trained - download.weights
        chosen = selector.select(change, rng=np.random.default_rng(seed))
        download.keep_own(context, trained)
        reply.content[name] = update_record(encode(chosen, precision=precision))
        return reply

    return mod


def _asked(terms: dict[str, Any], size: int, most: float, bound: float | None) -> tuple[Selector, Precision]:
    """Return what selects the upload, as the strategy asks; refuse what this site does not share."""
    limits = (("upload_fraction", most), ("bound", MAX_ABS_VALUE if bound is None else bound))
    for key, limit in limits:
        value = terms.get(key)
        if not isinstance(value, float | int) or not 0 < value <= limit:
            raise RunError(
                f"{key} = {value!r}: this site uploads at most {key} = {limit:g}; nothing was sent"
            )
    known: tuple[Selection, ...] = get_args(Selection)
    selection = next((each for each in known if each == terms.get("selection")), None)
    threshold = terms.get("threshold")
    if selection is None or not isinstance(threshold, float | int) or not threshold >= 0:
        raise RunError(
            f"selection = {terms.get('selection')!r}, threshold = {threshold!r} from the server: expected "
            f"{' or '.join(known)}, and a number"
        )
    count = share(float(terms["upload_fraction"]), size)
    return Selector(count, selection, float(threshold), float(terms["bound"])), precision_of(terms)
