"""How well the model does at each real site: on its own test records, if its file allows that."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fed_dp.server.replies import collected
from fed_dp.sharing import message as names
from fed_dp.strategies.site_strategy import SiteStrategy, record
from fed_dp.tasks import Metric

TIMEOUT = 120.0  # seconds; a site that does not answer by then has no line


def scores_of_sites(
    grid: Grid, strategy: SiteStrategy, metrics: Sequence[Metric]
) -> dict[str, dict[str, float]]:
    """Ask every site that is there and tells.

    Nothing that comes is used but finite numbers, and only to be shown.
    """
    there = {site.node: site for site in strategy.sites if site.node and site.scores}
    order = ConfigRecord({names.ROUND: 1})
    requests = [
        Message(
            RecordDict({names.ARRAYS: record(strategy.weights_of(site.client)), names.CONFIG: order}),
            site.node,
            MessageType.EVALUATE,
            group_id="scores",
        )
        for site in there.values()
    ]
    found: dict[str, dict[str, float]] = {}
    for reply in collected(grid, requests, timeout=TIMEOUT):
        site = there.get(reply.metadata.src_node_id)
        if site is None or reply.has_error():
            continue
        told = reply.content.metric_records.get(names.METRICS, MetricRecord())
        scores = {
            key: float(value)
            for key in (*(metric.name for metric in metrics), "loss")
            if isinstance(value := told.get(key), int | float) and math.isfinite(value)
        }
        if (
            any(metric.name in scores for metric in metrics)
            and isinstance(count := told.get(names.RECORDS), int)
            and count > 0
        ):
            found[site.name or str(site.client)] = {**scores, "test": count}
    return dict(sorted(found.items()))
