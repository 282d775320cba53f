"""What all our strategies share: whom to ask, what to send, and what may come back.

Uploads arrive private (or not) as the trainer made them; the server adds no noise, and everything
it does is post-processing. An upload that is not valid is refused by name and changes nothing.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fed_dp import seeds
from fed_dp.accounting import Event, from_json
from fed_dp.errors import EmptyRound, FedDpError, RunError, UploadRefused
from fed_dp.experiment.release import Agreement
from fed_dp.models import Evaluator, Vector
from fed_dp.sharing import message as names
from fed_dp.sharing.codec import decode, encode, information_bound
from fed_dp.sharing.message import Upload
from fed_dp.sharing.update import LARGEST, SparseUpdate
from fed_dp.strategies.sites import Site

State = dict[str, np.ndarray]
Place = tuple[int, int]  # client, turn
NO_REPLY = "no reply in time"
ABSENT = "not there when the run began"
_LONGEST = 300  # characters of a site's reason that are kept


@dataclass(slots=True)
class Tally:
    """What happened in one round."""

    asked: int = 0
    uploads: int = 0
    failed: dict[Place, str] = field(default_factory=dict)  # why nothing of it was used
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
class Question:
    """A message that waits for its reply."""

    message: Message
    site: Site
    turn: int
    version: int  # of the state that was sent
    copies: list[Message] = field(default_factory=list)  # by which it was asked again

    @property
    def ids(self) -> list[str]:
        """The ids of all messages that ask it."""
        return [message.metadata.message_id for message in (self.message, *self.copies)]

    @property
    def place(self) -> Place:
        """Whose turn it is."""
        return self.site.client, self.turn


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
        agreements: Sequence[Agreement | None] = (),
    ) -> None:
        self.weights = weights
        self.sites = tuple(sites)
        self.fraction, self.quorum, self.seed = fraction, quorum, seed
        # Else all weigh the same.
        self.counted = all(site.records for site in self.sites if site.node and not site.refuses)
        self.agreements = agreements or [None] * len(self.sites)
        self.marks = [""] * len(self.sites)  # of each site's ledger, as last seen
        self.booked: set[tuple[int, int, str]] = set()  # whose events of which turn, under which mark
        self.noted: Callable[[str, Sequence[Event]], None] | None = None  # told of releases as they come
        self.tally = Tally()
        self._asked: list[Question] = []
        self._whole: ArrayRecord | None = None

    # ----------------------------------------------------------------- what a strategy decides

    @abstractmethod
    def combine(self, uploads: Sequence[tuple[Question, Upload]]) -> None:
        """Change the server's state by valid uploads, which are in client order."""

    def waves(self, server_round: int) -> Iterable[Sequence[Site]]:
        """Yield the sites that are asked together; a wave sees what the one before uploaded."""
        yield self.chosen(server_round)

    def download(self, server_round: int, site: Site) -> tuple[ArrayRecord, int, int]:
        """Return what a site gets, how many parameters that are, and of which version of the state."""
        return self.whole(), self.weights.size, 0

    def upload_size(self, turn: int) -> int:
        """Return of how many numbers an upload is a part."""
        return self.weights.size

    def allowed(self, site: Site) -> tuple[int, float]:
        """Return how many numbers a site may upload, and within which bound."""
        return self.weights.size, LARGEST

    def scores(self, evaluator: Evaluator) -> dict[str, float]:
        """Return the test scores of the server's state."""
        return evaluator.scores(self.weights)

    def weights_of(self, client: int) -> Vector:
        """Return the model that a client ends with."""
        return self.weights

    def state(self) -> State:
        """Return everything a resumed run needs."""
        return {"weights": self.weights, "marks": np.array(self.marks)}

    def restore(self, state: State) -> None:
        """Take over the state of an earlier run."""
        self.weights = state["weights"]
        if "marks" in state:
            self.marks = state["marks"].tolist()

    # ---------------------------------------------------------------------------- one round

    def chosen(self, server_round: int) -> tuple[Site, ...]:
        """Return this round's sites, drawn without replacement, in client order."""
        count = max(1, round(self.fraction * len(self.sites)))
        if count == len(self.sites):
            return self.sites
        rng = seeds.generator(self.seed, "clients of the round", server_round)
        return tuple(self.sites[i] for i in np.sort(rng.choice(len(self.sites), count, replace=False)))

    def begin(self, server_round: int) -> None:
        """Begin a round."""
        self.tally = Tally()

    def ask(self, server_round: int, sites: Iterable[Site]) -> list[Message]:
        """Return the messages that send each site its download."""
        self._whole = None
        messages = []
        for site in sites:
            if not site.node:
                self.tally.failed[site.client, server_round] = site.why or ABSENT
                continue
            content, count, version = self.download(server_round, site)
            self.tally.asked += 1
            if self.shares:
                self.tally.bytes_downloaded += _bytes(content)
                self.tally.bound_downloaded += information_bound(self.weights.size, count)
            order = ConfigRecord({names.ROUND: server_round, names.MARK: self.marks[site.client]})
            records = RecordDict({names.ARRAYS: content, names.CONFIG: order})
            message = Message(records, site.node, MessageType.TRAIN, group_id=str(server_round))
            self._asked.append(Question(message, site, server_round, version))
            messages.append(message)
        return messages

    def again(self, question: Question) -> Message:
        """Return another message that asks the same: whichever is answered first counts."""
        first = question.message
        copy = Message(
            first.content, question.site.node, first.metadata.message_type, group_id=first.metadata.group_id
        )
        question.copies.append(copy)
        return copy

    def waiting(self, messages: Sequence[Message]) -> list[Question]:
        """Return the questions that these messages ask."""
        wanted = {id(message) for message in messages}
        return [question for question in self._asked if id(question.message) in wanted]

    def receive(self, replies: Iterable[Message]) -> list[Question]:
        """Check every reply, let the valid uploads change the state; return what has been answered.

        A reply counts once, for the message it answers; anything else is counted and dropped.
        """
        answered: list[Question] = []
        waiting = {identity: question for question in self._asked for identity in question.ids}
        valid: list[tuple[Question, Upload]] = []
        for reply in replies:
            identity = reply.metadata.reply_to_message_id or "?"
            question = waiting.get(identity)
            # An error about a dead node comes from the SuperLink: only the message tells whose it is.
            if question is None or not (
                reply.has_error() or reply.metadata.src_node_id == question.site.node
            ):
                self.tally.repeated += 1
                continue
            answered.append(question)
            for each in question.ids:
                waiting.pop(each, None)
            try:
                valid.append((question, self._checked(question, reply)))
            except FedDpError as error:
                self.tally.failed[question.place] = str(error)
        self._asked = list({id(question): question for question in waiting.values()}.values())
        self.tally.uploads += len(valid)
        self.combine(sorted(valid, key=lambda pair: pair[0].site.client))
        return answered

    def abandon(self) -> None:
        """Count every site that has not replied as failed; what it may send later is not used."""
        for question in self._asked:
            self.tally.failed[question.place] = NO_REPLY
        self._asked = []

    def finish(self, server_round: int) -> None:
        """End a round.

        Raises EmptyRound when nobody uploaded: an unchanged model is never passed off as a result. So
        it does when fewer uploaded than the quorum: then nothing of the round is kept.
        """
        if self.tally.uploads < self.quorum:
            failed, uploads = self.tally.failed, self.tally.uploads
            why = "".join(f"; client {client}: {reason}" for (client, _), reason in list(failed.items())[:1])
            told = "none" if not uploads else f"only {uploads} (clients.quorum = {self.quorum})"
            raise EmptyRound(f"round {server_round}: {told} of {uploads + len(failed)} clients uploaded{why}")

    # ------------------------------------------------------------------ Flower's four hooks

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask all of a round's sites at once, as Flower's own loop does."""
        self.begin(server_round)
        return self.ask(server_round, self.chosen(server_round))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Use the replies and end the round."""
        self.receive(replies)
        self.abandon()
        self.finish(server_round)
        metrics = MetricRecord({"uploads": self.tally.uploads, "failed": len(self.tally.failed)})
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

    def _checked(self, question: Question, reply: Message) -> Upload:
        if reply.has_error():
            raise UploadRefused(reason_of(reply.error)[:_LONGEST])
        content, site = reply.content, question.site
        try:
            told = content.config_records[names.CONFIG]
            names.check_round(told[names.ROUND], asked=question.turn)
            mark = str(told.get(names.MARK, ""))[:_LONGEST] or self.marks[site.client]
            self._book(question, str(told[names.EVENTS]), mark)  # the server has it: spent, good or bad
            self.marks[site.client] = mark
            array = content.array_records[names.ARRAYS][names.CHANGE]
            records = content.metric_records[names.METRICS][names.RECORDS]
        except KeyError as error:
            raise UploadRefused(f"not an upload: it has no {error}") from None
        most, bound = self.allowed(site)
        size = self.upload_size(question.turn)
        update = decode(array.data, size=size, most=min(most, size) if self.sparse else size, bound=bound)
        if len(update) < update.size and not self.sparse:
            raise UploadRefused(f"too few: {len(update)} coordinates, all {update.size} are expected")
        told_records = names.check_records(records, announced=site.records)
        upload = Upload(update, told_records if self.counted else 1)
        self.tally.devices.add(str(told.get(names.DEVICE, "unknown"))[:_LONGEST])
        if self.shares:
            self.tally.bytes_uploaded += _bytes(content.array_records[names.ARRAYS])
            self.tally.bound_uploaded += information_bound(update.size, len(update), self.value_bytes)
        return upload

    def _book(self, question: Question, text: str, mark: str) -> None:
        """Put what an upload tells it released into the total, once.

        The same upload comes with the same mark. One of the same turn with another mark is another release:
        the site was asked twice, from other weights. What is told of stages is told in every later turn, too.
        """
        events = from_json(text)
        agreed, client = self.agreements[question.site.client], question.site.client
        if agreed is not None and agreed.stages:
            self._check_stages(question, events, agreed)
        elif len(events) != (agreed is not None):
            raise UploadRefused(f"{len(events)} events: a private upload has one, another has none")
        for event in events:
            once = agreed is not None and agreed.stages
            if event.client != client or not (event.round == question.turn or once):
                raise UploadRefused(
                    f"an event of client {event.client}, round {event.round} in the upload of client "
                    f"{client}, round {question.turn}"
                )
            if agreed is not None and event != (own := agreed.event(turn=event.round, client=client)):
                raise UploadRefused(
                    f"it released {event.release} ({event.guarantee}, {event.noise_source}), agreed was "
                    f"{own.release} ({own.guarantee}, {own.noise_source})"
                )
        which = "" if agreed is not None and agreed.stages else mark
        new = [event for event in events if (client, event.round, which) not in self.booked]
        self.booked |= {(client, event.round, which) for event in new}
        self.tally.events += new
        if new and self.noted is not None:
            self.noted(which, new)

    def _check_stages(self, question: Question, events: Sequence[Event], agreed: Agreement) -> None:
        """Hold a site to telling stages it has released up to now, each once, and its turn's among them."""
        rounds = [event.round for event in events]
        if any(not 0 < turn <= question.turn for turn in rounds) or len(set(rounds)) < len(rounds):
            raise UploadRefused(f"events of rounds {rounds}, asked in round {question.turn}")
        if agreed.stage(question.turn) not in {agreed.stage(turn) for turn in rounds}:
            raise UploadRefused(
                f"no event of stage {agreed.stage(question.turn)}: what the upload rests on was not released"
            )


def reason_of(error: Error) -> str:
    """Return why a site sent an error; Flower wraps what an app raised as <class 'x'>:<'why'>."""
    reason = error.reason or f"error code {error.code}"
    wrapped = re.fullmatch(r"<class '(.*?)'>:<'(.*)'>", reason, re.DOTALL)
    if wrapped is None:
        return reason
    kind, why = wrapped.groups()
    return why if kind.startswith("fed_dp.") else f"{kind.rpartition('.')[2]}: {why}"


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
