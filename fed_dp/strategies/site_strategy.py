"""What all our strategies share: whom to ask, what to send, and what may come back.

Uploads arrive private (or not) as the trainer made them; the server adds no noise, and everything
it does is post-processing. An upload that is not valid is refused by name and changes nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fed_dp import seeds
from fed_dp.accounting import Event, from_json
from fed_dp.errors import EmptyRound, FedDpError, RunError, UploadRefused
from fed_dp.experiment.plan import ReleasePlan
from fed_dp.models import Evaluator, Vector
from fed_dp.sharing import message as names
from fed_dp.sharing.codec import decode, encode, information_bound
from fed_dp.sharing.message import Upload
from fed_dp.sharing.update import MAX_ABS_VALUE, SparseUpdate
from fed_dp.strategies.failures import ABSENT, MAX_REASON, NO_REPLY, Failure, failure_of
from fed_dp.strategies.sites import Site

State = dict[str, np.ndarray]
Place = tuple[int, int]  # client, round


@dataclass(slots=True)
class RoundStats:
    """What happened in one round."""

    asked: int = 0
    uploads: int = 0
    failed: dict[Place, Failure] = field(default_factory=dict)  # why nothing of it was used
    late: int = 0  # replies that an earlier round had given up, and that were used all the same
    repeated: int = 0  # replies to nothing that was asked, or to what was answered already
    bytes_uploaded: int = 0
    bytes_downloaded: int = 0
    bound_uploaded: float = 0.0  # the fewest bytes that could tell the same
    bound_downloaded: float = 0.0
    staleness: list[int] = field(default_factory=list)  # updates added between download and upload
    events: list[Event] = field(default_factory=list)
    devices: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A message that waits for its reply."""

    message: Message
    site: Site
    server_round: int
    version: int  # of the state that was sent
    copies: list[Message] = field(default_factory=list)  # by which it was asked again

    @property
    def ids(self) -> list[str]:
        """The ids of all messages that ask it."""
        return [message.metadata.message_id for message in (self.message, *self.copies)]

    @property
    def place(self) -> Place:
        """Whose round it is."""
        return self.site.client, self.server_round


class SiteStrategy(Strategy):
    """A Flower strategy over named sites. Subclasses say what is sent and what uploads do.

    A round is `begin`, then for each of its waves `ask`, `receive`, `abandon`, then `finish`.
    The server's state lives here, not in the ArrayRecord that Flower's loop hands around, because
    some strategies keep more than one vector; `state` and `restore` make it resumable.
    """

    shares = True  # a baseline that shares nothing sends no bytes, whatever the simulation moves
    sparse = False  # whether an upload may hold a part of the parameters
    value_bytes = 4  # of an uploaded value on the wire

    def __init__(
        self,
        weights: Vector,
        sites: Sequence[Site],
        *,
        fraction: float = 1.0,
        quorum: int = 1,
        seed: int = 0,
        plans: Sequence[ReleasePlan | None] = (),
    ) -> None:
        self.weights = weights
        self.sites = tuple(sites)
        self.fraction, self.quorum, self.seed = fraction, quorum, seed
        # Else all weigh the same.
        self.counted = all(site.records for site in self.sites if site.node and not site.refuses)
        self.plans = plans or [None] * len(self.sites)
        self.ledger_heads = [""] * len(self.sites)  # of each site's ledger, as last seen
        self.accounted: set[tuple[int, int, str]] = (
            set()
        )  # whose events of which round, under which ledger head
        self.on_failure: Callable[[int, Failure], None] | None = None  # told of clients that send an error
        self.on_release: Callable[[str, Sequence[Event]], None] | None = None  # told of releases as they come
        self.stats = RoundStats()
        self.rounds_done = np.zeros(
            len(self.sites), np.int64
        )  # by each site; only where nobody waits they differ
        self._pending: list[PendingRequest] = []
        self._whole: ArrayRecord | None = None

    # ----------------------------------------------------------------- what a strategy decides

    @abstractmethod
    def combine(self, uploads: Sequence[tuple[PendingRequest, Upload]]) -> None:
        """Change the server's state by valid uploads, which are in client order."""

    def waves(self, server_round: int) -> Iterable[Sequence[Site]]:
        """Yield the sites that are asked together; a wave sees what the one before uploaded."""
        yield self.sample_clients(server_round)

    def download(self, server_round: int, site: Site) -> tuple[ArrayRecord, int, int]:
        """Return what a site gets, how many parameters that are, and of which version of the state."""
        return self.whole(), self.weights.size, 0

    def upload_size(self, server_round: int) -> int:
        """Return of how many numbers an upload is a part."""
        return self.weights.size

    def allowed(self, site: Site) -> tuple[int, float]:
        """Return how many numbers a site may upload, and within which bound."""
        return self.weights.size, MAX_ABS_VALUE

    def scores(self, evaluator: Evaluator) -> dict[str, float]:
        """Return the test scores of the server's state."""
        return evaluator.scores(self.weights)

    def weights_of(self, client: int) -> Vector:
        """Return the model that a client ends with."""
        return self.weights

    def state(self) -> State:
        """Return everything a resumed run needs."""
        return {"weights": self.weights, "marks": np.array(self.ledger_heads)}

    def restore(self, state: State) -> None:
        """Take over the state of an earlier run."""
        self.weights = state["weights"]
        if "marks" in state:
            self.ledger_heads = state["marks"].tolist()

    # ---------------------------------------------------------------------------- one round

    def sample_clients(self, server_round: int) -> tuple[Site, ...]:
        """Return this round's sites, drawn without replacement, in client order."""
        count = max(1, round(self.fraction * len(self.sites)))
        if count == len(self.sites):
            return self.sites
        rng = seeds.generator(self.seed, "clients of the round", server_round)
        return tuple(self.sites[i] for i in np.sort(rng.choice(len(self.sites), count, replace=False)))

    def begin(self, server_round: int) -> None:
        """Begin a round."""
        self.stats = RoundStats()

    def ask(self, server_round: int, sites: Iterable[Site]) -> list[Message]:
        """Return the messages that send each site its download."""
        self._whole = None
        messages = []
        for site in sites:
            if not site.node:
                self.stats.failed[site.client, server_round] = (
                    Failure(ABSENT.code, site.why) if site.why else ABSENT
                )
                continue
            content, count, version = self.download(server_round, site)
            self.stats.asked += 1
            if self.shares:
                self.stats.bytes_downloaded += _bytes(content)
                self.stats.bound_downloaded += information_bound(self.weights.size, count)
            config = ConfigRecord(
                {names.ROUND: server_round, names.LEDGER_HEAD: self.ledger_heads[site.client]}
            )
            records = RecordDict({names.ARRAYS: content, names.CONFIG: config})
            message = Message(records, site.node, MessageType.TRAIN, group_id=str(server_round))
            self._pending.append(PendingRequest(message, site, server_round, version))
            messages.append(message)
        return messages

    def again(self, request: PendingRequest) -> Message:
        """Return another message that asks the same: whichever is answered first counts."""
        first = request.message
        copy = Message(
            first.content, request.site.node, first.metadata.message_type, group_id=first.metadata.group_id
        )
        request.copies.append(copy)
        return copy

    def waiting(self, messages: Sequence[Message]) -> list[PendingRequest]:
        """Return the requests that these messages make."""
        wanted = {id(message) for message in messages}
        return [request for request in self._pending if id(request.message) in wanted]

    def receive(self, replies: Iterable[Message]) -> list[PendingRequest]:
        """Check every reply, let the valid uploads change the state; return what has been answered.

        A reply counts once, for the message it answers; anything else is counted and dropped.
        """
        answered: list[PendingRequest] = []
        waiting = {identity: request for request in self._pending for identity in request.ids}
        valid: list[tuple[PendingRequest, Upload]] = []
        for reply in replies:
            identity = reply.metadata.reply_to_message_id or "?"
            request = waiting.get(identity)
            # An error about a dead node comes from the SuperLink: only the message tells whose it is.
            if request is None or not (reply.has_error() or reply.metadata.src_node_id == request.site.node):
                self.stats.repeated += 1
                continue
            answered.append(request)
            for each in request.ids:
                waiting.pop(each, None)
            if reply.has_error():
                failure = self.stats.failed[request.place] = failure_of(reply.error)
                if self.on_failure is not None:
                    self.on_failure(request.site.client, failure)
                continue
            try:
                valid.append((request, self._checked(request, reply)))
            except FedDpError as error:
                self.stats.failed[request.place] = Failure.of(error)
        self._pending = list({id(request): request for request in waiting.values()}.values())
        self.stats.uploads += len(valid)
        self.combine(sorted(valid, key=lambda pair: pair[0].site.client))
        return answered

    def abandon(self) -> None:
        """Count every site that has not replied as failed; what it may send later is not used."""
        for request in self._pending:
            self.stats.failed[request.place] = NO_REPLY
        self._pending = []

    def finish(self, server_round: int) -> None:
        """End a round.

        Raises EmptyRound when nobody uploaded: an unchanged model is never passed off as a result. So
        it does when fewer uploaded than the quorum: then nothing of the round is kept.
        """
        if self.stats.uploads < self.quorum:
            failed, uploads = self.stats.failed, self.stats.uploads
            why = "".join(
                f"; client {client}: {each.reason}" for (client, _), each in list(failed.items())[:1]
            )
            count = "none" if not uploads else f"only {uploads} (clients.quorum = {self.quorum})"
            raise EmptyRound(
                f"round {server_round}: {count} of {uploads + len(failed)} clients uploaded{why}"
            )

    # ------------------------------------------------------------------ Flower's four hooks

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask all of a round's sites at once, as Flower's own loop does."""
        self.begin(server_round)
        return self.ask(server_round, self.sample_clients(server_round))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Use the replies and end the round."""
        self.receive(replies)
        self.abandon()
        self.finish(server_round)
        metrics = MetricRecord({"uploads": self.stats.uploads, "failed": len(self.stats.failed)})
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

    # ----------------------------------------------------------------------------- messages

    def whole(self) -> ArrayRecord:
        """Return the whole model as a record; the sites of one wave share it."""
        if self._whole is None:
            self._whole = record(self.weights)
        return self._whole

    def _checked(self, request: PendingRequest, reply: Message) -> Upload:
        content, site = reply.content, request.site
        try:
            metadata = content.config_records[names.CONFIG]
            names.check_round(metadata[names.ROUND], asked=request.server_round)
            head = str(metadata.get(names.LEDGER_HEAD, ""))[:MAX_REASON] or self.ledger_heads[site.client]
            self._account_for(
                request, str(metadata[names.EVENTS]), head
            )  # the server has it: spent, good or bad
            self.ledger_heads[site.client] = head
            array = content.array_records[names.ARRAYS][names.CHANGE]
            records = content.metric_records[names.METRICS][names.RECORDS]
        except KeyError as error:
            raise UploadRefused(f"not an upload: it has no {error}") from None
        most, bound = self.allowed(site)
        size = self.upload_size(request.server_round)
        update = decode(array.data, size=size, most=min(most, size) if self.sparse else size, bound=bound)
        if len(update) < update.size and not self.sparse:
            raise UploadRefused(f"too few: {len(update)} coordinates, all {update.size} are expected")
        stated_records = names.check_records(records, announced=site.records)
        upload = Upload(update, stated_records if self.counted else 1)
        self.stats.devices.add(str(metadata.get(names.DEVICE, "unknown"))[:MAX_REASON])
        if self.shares:
            self.stats.bytes_uploaded += _bytes(content.array_records[names.ARRAYS])
            self.stats.bound_uploaded += information_bound(update.size, len(update), self.value_bytes)
        return upload

    def _account_for(self, request: PendingRequest, text: str, head: str) -> None:
        """Put what an upload tells it released into the total, once.

        The same upload comes with the same ledger head. One of the same round with another head is another
        release: the site was asked twice, from other weights. Events of stages come in every later round.
        """
        events = from_json(text)
        plan, client = self.plans[request.site.client], request.site.client
        if plan is not None and plan.stages:
            self._check_stages(request, events, plan)
        elif len(events) != (plan is not None):
            raise UploadRefused(f"{len(events)} events: a private upload has one, another has none")
        for event in events:
            once = plan is not None and plan.stage(event.round)
            if event.client != client or not (event.round == request.server_round or once):
                raise UploadRefused(
                    f"an event of client {event.client}, round {event.round} in the upload of client "
                    f"{client}, round {request.server_round}"
                )
            if plan is not None and event != (own := plan.event(server_round=event.round, client=client)):
                raise UploadRefused(
                    f"it released {event.release} ({event.guarantee}, {event.noise_source}), planned was "
                    f"{own.release} ({own.guarantee}, {own.noise_source})"
                )
        for event in events:
            which = "" if plan is not None and plan.stage(event.round) else head
            if (client, event.round, which) in self.accounted:
                continue
            self.accounted.add((client, event.round, which))
            self.stats.events.append(event)
            if self.on_release is not None:
                self.on_release(which, [event])

    def _check_stages(self, request: PendingRequest, events: Sequence[Event], plan: ReleasePlan) -> None:
        """Hold a site to telling stages it has released up to now, each once, and its round's among them."""
        rounds = [event.round for event in events]
        if any(not 0 < server_round <= request.server_round for server_round in rounds) or len(
            set(rounds)
        ) < len(rounds):
            raise UploadRefused(f"events of rounds {rounds}, asked in round {request.server_round}")
        if plan.stage(request.server_round) not in {plan.stage(server_round) for server_round in rounds}:
            raise UploadRefused(
                f"no event of stage {plan.stage(request.server_round)}: the upload rests on what was not "
                "released"
            )


def record(download: Vector | SparseUpdate) -> ArrayRecord:
    """Write a download for the wire; a model that has left the bounds is not sent any more."""
    try:
        update = download if isinstance(download, SparseUpdate) else SparseUpdate.dense(download)
    except UploadRefused as error:
        raise RunError(
            f"the model diverges ({error}): lower trainer.learning_rate, or, under dssgd, share less "
            "(strategy.upload_fraction), bound it (strategy.bound), or exchange in turn (round_robin)"
        ) from None
    data = encode(update)
    return ArrayRecord({names.WEIGHTS: Array("uint8", (len(data),), names.WIRE, data)})


def _bytes(arrays: ArrayRecord) -> int:
    return sum(len(array.data) for array in arrays.values())
