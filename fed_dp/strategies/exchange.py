"""What all our strategies share: whom to ask, what to send, and what may come back.

Uploads arrive private (or not) as the trainer made them; the server adds no noise, and everything
it does is post-processing. An upload that is not valid is refused by name and changes nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fed_dp import seeds
from fed_dp.accounting import Event, from_json
from fed_dp.errors import EmptyRound, FedDpError, UploadRefused
from fed_dp.models import Evaluator, Vector
from fed_dp.sharing import message as names
from fed_dp.sharing.message import Upload
from fed_dp.strategies.sites import Site

State = dict[str, np.ndarray]
NO_REPLY = "no reply in time"


@dataclass(slots=True)
class Tally:
    """What happened in one round."""

    asked: int = 0
    uploads: int = 0
    failed: dict[int, str] = field(default_factory=dict)  # client -> why nothing of it was used
    bytes_uploaded: int = 0
    bytes_downloaded: int = 0
    events: list[Event] = field(default_factory=list)
    devices: set[str] = field(default_factory=set)


class SiteStrategy(Strategy):
    """A Flower strategy over named sites. Subclasses say what is sent and what uploads do.

    The server's state lives here, not in the ArrayRecord that Flower's loop hands around, because
    some strategies keep more than one vector; `state` and `restore` make it resumable.
    """

    shares = True  # a baseline that shares nothing sends no bytes, whatever the simulation moves

    def __init__(
        self,
        weights: Vector,
        sites: Sequence[Site],
        *,
        fraction: float = 1.0,
        seed: int = 0,
        private: bool = False,
    ) -> None:
        self.weights = weights
        self.sites = tuple(sites)
        self.fraction, self.seed, self.private = fraction, seed, private
        self.tally = Tally()
        self._asked: list[tuple[Message, Site]] = []

    @abstractmethod
    def combine(self, uploads: Sequence[tuple[Site, Upload]]) -> None:
        """Change the server's state by this round's valid uploads, in client order."""

    def download(self, site: Site, whole: ArrayRecord) -> ArrayRecord:
        """Return what a site gets: the global model, unless a strategy says otherwise."""
        return whole

    def scores(self, evaluator: Evaluator) -> dict[str, float]:
        """Return the test scores of the server's state."""
        return evaluator.scores(self.weights)

    def state(self) -> State:
        """Return everything a resumed run needs."""
        return {"weights": self.weights}

    def restore(self, state: State) -> None:
        """Take over the state of an earlier run."""
        self.weights = state["weights"]

    def chosen(self, server_round: int) -> tuple[Site, ...]:
        """Return this round's sites, drawn without replacement, in client order."""
        count = max(1, round(self.fraction * len(self.sites)))
        if count == len(self.sites):
            return self.sites
        rng = seeds.generator(self.seed, "clients of the round", server_round)
        return tuple(self.sites[i] for i in np.sort(rng.choice(len(self.sites), count, replace=False)))

    # ------------------------------------------------------------------ Flower's four hooks

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send each chosen site its download."""
        self.tally, self._asked = Tally(), []
        whole = ArrayRecord({names.WEIGHTS: Array(self.weights)})
        order = ConfigRecord({**config, names.ROUND: server_round})
        for site in self.chosen(server_round):
            content = self.download(site, whole)
            self.tally.asked += 1
            self.tally.bytes_downloaded += _bytes(content) if self.shares else 0
            records = RecordDict({names.ARRAYS: content, names.CONFIG: order})
            message = Message(records, site.node, MessageType.TRAIN, group_id=str(server_round))
            self._asked.append((message, site))
        return [message for message, _ in self._asked]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check every reply, then let the valid uploads change the state.

        Raises EmptyRound when there is none: an unchanged model is never passed off as a result.
        """
        uploads = self._received(server_round, replies)
        if not uploads:
            reasons = list(self.tally.failed.items())
            why = f"; client {reasons[0][0]}: {reasons[0][1]}" if reasons else ""
            raise EmptyRound(f"round {server_round}: none of {self.tally.asked} clients uploaded{why}")
        self.combine(uploads)
        metrics = MetricRecord({"uploads": len(uploads), "failed": len(self.tally.failed)})
        return ArrayRecord({names.WEIGHTS: Array(self.weights)}), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask nobody: sites' records are for training only, and test records are the server's."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return nothing, as nobody was asked."""
        return None

    def summary(self) -> None:
        """Say nothing here: the run folder's summary tells it all."""

    # ------------------------------------------------------------------------------- replies

    def _received(self, server_round: int, replies: Iterable[Message]) -> list[tuple[Site, Upload]]:
        by_message = {message.metadata.message_id: site for message, site in self._asked}
        by_node = {site.node: site for _, site in self._asked}
        uploads: dict[int, tuple[Site, Upload]] = {}
        for reply in replies:
            # An error about a dead node comes from the SuperLink: only the message tells whose it is.
            site = by_message.get(reply.metadata.reply_to_message_id or "?")
            site = site or by_node.get(reply.metadata.src_node_id)
            if site is None or site.client in uploads:
                continue  # nobody we asked in this round, or a second upload: neither counts
            try:
                uploads[site.client] = site, self._checked(server_round, site, reply)
            except FedDpError as error:
                self.tally.failed[site.client] = str(error)
        for _, site in self._asked:
            if site.client not in uploads:
                self.tally.failed.setdefault(site.client, NO_REPLY)
        for client in uploads:
            self.tally.failed.pop(client, None)
        self.tally.uploads = len(uploads)
        return [uploads[client] for client in sorted(uploads)]

    def _checked(self, server_round: int, site: Site, reply: Message) -> Upload:
        if reply.has_error():
            raise UploadRefused(reply.error.reason or f"error code {reply.error.code}")
        content = reply.content
        try:
            array = content.array_records[names.ARRAYS][names.CHANGE]
            records = content.metric_records[names.METRICS][names.RECORDS]
            told = content.config_records[names.CONFIG]
            text = str(told[names.EVENTS])
        except KeyError as error:
            raise UploadRefused(f"not an upload: it has no {error}") from None
        self._book(server_round, site, text)  # the server has it, so it is spent, good or bad
        upload = Upload(
            change=names.check_vector(names.from_npy(array.data), size=self.weights.size, what=names.CHANGE),
            records=names.check_records(records, announced=site.records),
        )
        self.tally.devices.add(str(told.get(names.DEVICE, "unknown")))
        self.tally.bytes_uploaded += _bytes(content.array_records[names.ARRAYS]) if self.shares else 0
        return upload

    def _book(self, server_round: int, site: Site, text: str) -> None:
        events = from_json(text)
        for event in events:
            if (event.client, event.round) != (site.client, server_round):
                raise UploadRefused(
                    f"an event of client {event.client}, round {event.round} in the upload of client "
                    f"{site.client}, round {server_round}"
                )
        if bool(events) != self.private:
            raise UploadRefused("a private upload needs events, another may have none")
        self.tally.events += events


def _bytes(arrays: ArrayRecord) -> int:
    return sum(len(array.data) for array in arrays.values())
