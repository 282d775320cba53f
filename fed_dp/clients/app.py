"""The Flower ClientApp: it receives weights, runs the trainer, and sends selected changes back.

Raw records and un-noised values never leave this module's callees. Everything that can go wrong
raises, and then Flower sends an error reply with no arrays in it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from logging import ERROR
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from fed_dp import seeds
from fed_dp.accounting import Account, Event, Unprotected, from_json, to_json
from fed_dp.clients import device
from fed_dp.clients.books import SCORES, Answer, Books, Question, SiteBooks, VirtualBooks
from fed_dp.clients.memory import InContext, Memory, OnDisk
from fed_dp.clients.participant import Participant
from fed_dp.clients.registry import make_trainer
from fed_dp.clients.site_file import SiteFile
from fed_dp.clients.trainer import Fit, Releasing, Site, Task, Together, Trainer
from fed_dp.errors import DataError, FedDpError, PrivacyError, RunError, SiteRefused, UploadRefused
from fed_dp.experiment import Experiment, from_run_config
from fed_dp.experiment.federation import Federation, at_site, federation
from fed_dp.experiment.release import Agreement, agreement, budget_of, promise
from fed_dp.experiment.start import starting_weights
from fed_dp.mechanisms import Noise, SecureNoise, SimulationNoise
from fed_dp.models import Evaluator, Vector, use_one_thread
from fed_dp.sharing import message as names
from fed_dp.sharing.update import LARGEST

Wanted = tuple[Trainer, Task]
Replying = Generator[Wanted, Fit, Message]  # it asks for its training, and ends with a reply
Answering = Generator[Wanted, Fit, Answer]

app = ClientApp()
DIGITS = 2  # of a score
ACCOUNT, NEW, LASTING, BODIES = "account", "new", "lasting", "bodies"  # of a virtual client's books


@dataclass(frozen=True, slots=True)
class _Workplace:
    experiment: Experiment
    federation: Federation
    trainer: Trainer
    size: int  # of the model
    site: SiteFile | None  # of a deployed site

    def memory(self, context: Context, turn: int) -> Memory:
        """Return where it keeps what lasts from turn to turn."""
        if self.site is None or self.site.memory is None:
            return InContext(context)
        promised = promise(self.experiment)
        guarantee = "none" if promised is None else promised.name
        return OnDisk(Path(self.site.memory), self.experiment.digest, turn, guarantee)


@lru_cache(maxsize=1)
def _workplace(
    config: tuple[tuple[str, bool | float | int | str], ...], site: SiteFile | None = None
) -> _Workplace:
    """Read the experiment, the data and the network once per process, not once per message."""
    if site is not None and not dict(config).get("experiment-json"):
        raise SiteRefused("a site takes experiments that are sent whole, and opens no file for a server")
    experiment = from_run_config(dict(config))
    if site is not None:  # before its records are opened
        _permit(site, experiment)
    if site is None or site.data is None:
        if site is not None and experiment.data.path is not None:
            raise SiteRefused(
                "data.path: where a site's records are is not for a server to say; nothing was sent"
            )
        members = federation(experiment)
    else:
        members = at_site(experiment, path=Path(site.data.path), client=site.client)
    trainer, net = make_trainer(experiment, members.dataset)
    return _Workplace(experiment, members, trainer, net.size, site)


def _at_work(context: Context) -> tuple[_Workplace, int]:
    site = _site(context)
    if site is None and names.PARTITION not in context.node_config:
        raise RunError(f"node_config has no {names.PARTITION}: this node does not know which client it is")
    try:
        place = _workplace(tuple(sorted(context.run_config.items())), site)
    except PrivacyError:
        raise
    except Exception as error:
        if _simulated(context) or (site is None and not isinstance(error, DataError)):
            raise
        # It may quote what it found in the records, or which columns there are: no reply and no log does.
        told = f"the data of this site cannot be used ({type(error).__name__}); fed-dp deploy check tells why"
        log(ERROR, told)
        raise DataError(told) from None
    return place, site.client if site is not None else int(context.node_config[names.PARTITION])


def _site(context: Context) -> SiteFile | None:
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


@contextmanager
def _no_paths(context: Context) -> Iterator[None]:
    """Send no path of a deployed site's machine with an error; its own log has it in full."""
    try:
        yield
    except Exception as error:
        if not {names.SITE, names.LEDGER} & context.node_config.keys():
            raise
        if not isinstance(error, FedDpError):
            log(ERROR, "%s: %s", type(error).__name__, error)
            raise PrivacyError(f"the site failed ({type(error).__name__}); nothing was sent") from None
        if (told := without_paths(str(error), *_own_paths(context))) == str(error):
            raise
        log(ERROR, "%s", error)
        raise type(error)(told) from None


def _own_paths(context: Context) -> list[str]:
    """Return the paths that a site's own configuration names."""
    named = [
        str(context.node_config[key]) for key in (names.SITE, names.LEDGER) if key in context.node_config
    ]
    try:
        site = _site(context)
    except FedDpError:
        site = None
    if site is not None:
        named += [site.ledger, site.key, site.authority]
        named += [path for path in (site.memory, site.witness, site.data and site.data.path) if path]
    return named


def without_paths(text: str, *known: str) -> str:
    """Return a text in which of every absolute path, and of every known one, the last part is left."""
    folders = {
        folder for path in known for folder in (path, str(Path(path).parent), str(Path(path).absolute()))
    }
    for folder in sorted(folders, key=len, reverse=True):
        if len(folder) > 1:
            text = text.replace(f"{folder}/", "").replace(folder, Path(folder).name)
    return re.sub(r"(?<![^\s'\"(=\[])/(?:[^/:;,'\"()\n]+/)*", "", text)


@app.lifespan()
def lifespan(_: Context) -> Iterator[None]:
    """Keep to one torch thread: more of them make many small clients 10 to 40 times slower."""
    use_one_thread()
    yield


@app.query()
def describe(message: Message, context: Context) -> Message:
    """Tell the server which client this is, how many records it holds (public), and which ledger it has.

    A site whose file does not allow the experiment says so, and opens no records.
    """
    with _no_paths(context):
        return _described(message, context)


def _described(message: Message, context: Context) -> Message:
    told: dict[str, str | bool] = {}
    try:
        place, client = _at_work(context)
        site, records = place.site, _told_records(place, client)
        told[names.SCORES] = site is not None and site.share.metrics and place.federation.tested
    except SiteRefused as error:
        if (site := _site(context)) is None:
            raise
        client, records = site.client, 0
        told[names.REFUSED] = without_paths(str(error), *_own_paths(context))
    content = RecordDict({names.METRICS: MetricRecord({names.PARTITION: client, names.RECORDS: records})})
    if site is not None:
        told[names.LEDGER] = site.opened().read()[0].identity
        content[names.CONFIG] = ConfigRecord(dict(told))
    return Message(content, reply_to=message)


@app.evaluate()
def score(message: Message, context: Context) -> Message:
    """Tell how well a model does on a deployed site's own test records, if its file allows that.

    Scores are computed on the records as they are: no noise protects them. So there is one answer for each
    experiment that the site took part in, rounded and entered in its ledger, and no more in all than its
    file says.
    """
    with _no_paths(context):
        place, _ = _at_work(context)
        if place.site is None or not place.site.share.metrics:
            raise SiteRefused("this site tells no scores (share.metrics)")
        if not place.federation.tested:
            raise SiteRefused(
                "this site has no test records (test.csv in its data folder): it tells no scores"
            )
        question = _question(message).scores()
        books = SiteBooks(place.site.opened(), place.experiment.digest)
        with books.alone():
            answer = books.kept(question) or _scored(place, place.site, books, question)
        return Message(RecordDict({names.METRICS: MetricRecord(dict(answer.metrics))}), reply_to=message)


def _scored(place: _Workplace, site: SiteFile, books: SiteBooks, question: Question) -> Answer:
    """Enter the scores in the ledger, compute and keep them."""
    slots = books.ledger.slots(experiment=place.experiment.digest)
    if not slots - {SCORES}:
        raise SiteRefused("this site took no part in this experiment: it tells no scores")
    if SCORES in slots:
        raise SiteRefused("this site told the scores of another model of this experiment: it tells no more")
    if (told := books.ledger.read()[0].scores) >= site.share.scores:
        raise SiteRefused(f"this site told scores {told} times: it tells no more (share.scores)")
    data, experiment = place.federation.dataset, place.experiment
    whole = question.data.removeprefix(b"scores of ")
    weights = Participant(place.size).download(whole, lambda: np.zeros(0, np.float32))
    account = books.charge(
        Event(Unprotected("scores"), "none", experiment.rounds, site.client, "none"), question, ahead=1
    )
    evaluator = Evaluator(
        experiment.model.name,
        data.shape,
        data.classes,
        data.inputs(data.test),
        data.test.y,
        experiment.network,
    )
    rounded = {key: round(value, DIGITS) for key, value in evaluator.scores(weights).items()}
    answer = Answer(b"", {**rounded, names.RECORDS: len(data.test)}, {})
    books.keep(account, question, answer)
    return answer


def _told_records(place: _Workplace, client: int) -> int:
    """Return the number of records; 0 where it is not told, and a declared number in its place.

    Where all of a site's records are protected together, their number is, too.
    """
    if (expected := place.experiment.data.expected(client)) is not None:
        return expected
    promised = promise(place.experiment)
    protected = promised is not None and promised.unit == "participant"
    told = not protected and (place.site is None or place.site.share.records)
    return len(place.federation.rows(client)) if told else 0


@app.train()
def train(message: Message, context: Context) -> Message:
    """Run one round of the trainer from the weights received."""
    with (
        _no_paths(context),
        closing(_train(message, context)) as replying,
    ):  # whatever happens, it lets go of what it holds
        try:
            trainer, task = next(replying)
        except StopIteration as over:
            reply: Message = over.value
            return reply
        fit: Fit | Exception
        try:
            fit = trainer.fit(task.weights, task.site, task.state)
        except Exception as error:
            fit = error
        return _told_fit(replying, fit)


def train_together(jobs: Sequence[tuple[Message, Context]]) -> list[Message | Exception]:
    """Run one round of several virtual clients, all that can be trained at once in one go.

    Everything else is as in `train`, one client after the other: each is charged before its training
    begins, and has its own noise. One that fails does so alone, unless the common training does.
    """
    replies: dict[int, Message | Exception] = {}
    waiting: list[tuple[int, Replying, Task]] = []
    for place, (message, context) in enumerate(jobs):
        replying = _train(message, context)
        try:
            trainer, task = next(replying)
            waiting.append((place, replying, task))
        except StopIteration as over:
            replies[place] = over.value
        except Exception as error:
            replies[place] = error
    fits: Sequence[Fit | Exception] = []
    if waiting:
        assert isinstance(trainer, Together)  # the same for all of an experiment; these have no lock to hold
        try:
            fits = trainer.fit_together([task for *_, task in waiting])
        except Exception as error:
            fits = [error] * len(waiting)
    for (place, replying, _), fit in zip(waiting, fits, strict=True):
        try:
            replies[place] = _told_fit(replying, fit)
        except Exception as error:
            replies[place] = error
    return [replies[place] for place in range(len(jobs))]


def _told_fit(replying: Replying, fit: Fit | Exception) -> Message:
    """Tell a turn its fit, or what went wrong with it; return its reply."""
    try:
        replying.throw(fit) if isinstance(fit, Exception) else replying.send(fit)
    except StopIteration as over:
        reply: Message = over.value
        return reply
    raise AssertionError("a turn is trained once")


def _train(message: Message, context: Context) -> Replying:
    """Answer one message; where training is needed, ask for it and take the fit.

    The weights are checked first: weights from which a network overflows for some records and not
    for others would turn an error reply into an answer about the records.
    Where the round is private: what was sent in answer to the same question is sent again, as it
    was; otherwise the round is charged, then trained, noised, kept, and sent. Any fault on the
    way raises, and then nothing is sent; what was charged stays charged.
    """
    place, client = _at_work(context)
    question = _question(message)
    experiment, size = place.experiment, place.size
    if place.site is not None and question.turn > experiment.rounds:
        raise RunError(f"{names.ROUND} = {question.turn}: the experiment has {experiment.rounds} rounds")
    agreed = agreement(experiment, client=client, size=size)
    participant = Participant.of(experiment, client, size, None if agreed is None else agreed.release)
    memory = place.memory(context, question.turn)
    weights = participant.download(question.data, lambda: _local(memory, place))
    x, y = place.federation.client(client)
    site = Site(x, y, client, question.turn, experiment.seed, experiment.data.expected(client) or 0)
    turn = _Turn(place, participant, weights, site, memory)
    if agreed is None and place.site is None:
        return _reply((yield from _work(turn, None)), message)
    books = _books(context, place, client)
    with books.alone():
        answer = yield from _answer(turn, context, books, question, agreed)
    return _reply(answer, message)


@dataclass(frozen=True, slots=True)
class _Turn:
    """What a client trains with in one turn."""

    place: _Workplace
    participant: Participant
    weights: Vector
    site: Site
    memory: Memory


def _answer(
    turn: _Turn, context: Context, books: Books, question: Question, agreed: Agreement | None
) -> Answering:
    """Return what was sent before, or charge, train, noise and keep."""
    if (before := books.kept(question)) is not None:
        return before
    if agreed is None:  # a deployed site that allows it: its ledger tells so
        without = Event(Unprotected("upload"), "none", question.turn, turn.site.client, "none")
        account = books.charge(without, question, ahead=1)
        answer = yield from _work(turn, None)
        answer.told[names.MARK] = account.mark
        books.keep(account, question, answer)
        return answer
    if agreed.stages:
        return (yield from _staged(turn, context, books, question, agreed))
    noise = _noise(agreed, turn.site)
    event = agreed.event(turn=question.turn, client=turn.site.client)
    account = books.charge(event, question, ahead=turn.place.experiment.rounds)
    if isinstance(books, VirtualBooks):
        keep_books(context, books)
    answer = yield from _work(turn, noise)
    answer.told.update({names.EVENTS: to_json([event]), names.MARK: account.mark})
    books.keep(account, question, answer)
    return answer


def _permit(site: SiteFile, experiment: Experiment) -> None:
    """Hold the server to the site's own file; what is refused is logged."""
    try:
        site.permit(experiment)
    except FedDpError as error:
        log(ERROR, "refused: %s", error)
        raise


def _staged(turn: _Turn, context: Context, books: Books, question: Question, agreed: Agreement) -> Answering:
    """Train on what this turn's stage has released. Only if it has not yet is it charged and released.

    What a stage released is kept; under the same encoder it is used again, in this turn and in all
    later ones. The answer tells the events of all stages, for a reply of an earlier turn may be lost.
    """
    trainer, last = turn.place.trainer, agreed.stage(question.turn)
    weights, site = turn.weights, turn.site
    held, events = b"", list[Event]()
    for stage in range(1, last + 1):
        frozen = trainer.frozen(weights, stage).tobytes() if isinstance(trainer, Releasing) else b""
        about = question.about(stage, frozen)
        before = books.kept(about)
        if before is None and stage == last:
            event = agreed.event(turn=question.turn, client=site.client)
            noise = _noise(agreed, site)
            account = books.charge(event, question, ahead=1)
            if isinstance(books, VirtualBooks):
                keep_books(context, books)
            data = _released(trainer, weights, site, stage, noise)
            before = Answer(data, {}, {names.EVENTS: to_json([event])})
            books.keep(account, about, before)
            if isinstance(books, VirtualBooks):
                keep_books(context, books)
        if before is not None:
            held, events = before.data, [*events, *from_json(before.told[names.EVENTS])]
    answer = yield from _work(turn, None, np.frombuffer(held, np.float32))
    answer.told.update({names.EVENTS: to_json(events), names.MARK: books.mark})
    return answer


def _released(trainer: Trainer, weights: Vector, site: Site, stage: int, noise: Noise) -> bytes:
    """Release a stage's statistic; a paper's trainer draws its own noise and looks at records again."""
    if not isinstance(trainer, Releasing):
        return b""
    with _told_by_kind():
        return trainer.release(weights, site, stage, noise).tobytes()


def _question(message: Message) -> Question:
    arrays, config = message.content.array_records, message.content.config_records
    if names.ARRAYS not in arrays or names.CONFIG not in config:
        raise RunError(f"a train message needs the records {names.ARRAYS} and {names.CONFIG}")
    turn = config[names.CONFIG].get(names.ROUND)
    if type(turn) is not int or not 0 < turn < 2**60:  # bool is an int, too
        raise RunError(f"{names.ROUND} = {turn!r}: expected a whole number from 1")
    known = str(config[names.CONFIG].get(names.MARK, "")) or None
    return Question(turn, arrays[names.ARRAYS][names.WEIGHTS].data, known)


def _reply(answer: Answer, message: Message) -> Message:
    data = answer.data
    content = RecordDict(
        {
            names.ARRAYS: ArrayRecord({names.CHANGE: Array("uint8", (len(data),), names.WIRE, data)}),
            names.METRICS: MetricRecord(dict(answer.metrics)),
            names.CONFIG: ConfigRecord(dict(answer.told)),
        }
    )
    return Message(content, reply_to=message)


def _work(turn: _Turn, noise: Noise | None, released: Vector | None = None) -> Answering:
    """Train and select. What goes wrong in a private round is told by its kind alone.

    `noise` is for what is selected; a trainer that has released a statistic trains on `released`.
    """
    private = noise is not None or released is not None
    place, weights, site, memory = turn.place, turn.weights, turn.site, turn.memory
    trainer, participant = place.trainer, turn.participant
    with _told_by_kind() if private or place.site is not None else nullcontext():
        if released is not None and isinstance(trainer, Releasing):
            fit = trainer.follow(weights, released, trainer.stage(site.round), records=site.expected_records)
        else:
            fit = yield from _fit(trainer, Task(weights, site, memory.state()), noise)
        data = participant.upload(
            fit.change, seed=site.seed, turn=site.round, client=site.client, noise=noise
        )
    # Of the change, all stays here, uploaded or not.
    own = np.clip(weights + fit.change, -LARGEST, LARGEST) if participant.keeps_local else None
    memory.keep(fit.state, own)
    # A trainer without noise of its own computes its metrics from the records as they are.
    telling = place.site is None or place.site.share.metrics
    metrics = dict(fit.metrics) if telling and (not private or trainer.spends) else {}
    told = {
        names.ROUND: site.round,
        names.EVENTS: "[]",
        names.DEVICE: device.choose(place.experiment.clients.gpus).type,
    }
    return Answer(data, {**metrics, names.RECORDS: _told_records(place, site.client)}, told)


@contextmanager
def _told_by_kind() -> Iterator[None]:
    """Tell of what goes wrong by its kind alone: its words may hold records, and an error reply is sent."""
    try:
        yield
    except PrivacyError:
        raise
    except Exception as error:
        raise PrivacyError(f"training failed ({type(error).__name__}); nothing was sent") from None


def _fit(trainer: Trainer, task: Task, noise: Noise | None) -> Generator[Wanted, Fit, Fit]:
    """Train. Where noise comes after it, a training that diverged is a change like any other."""
    try:
        return (yield trainer, task)
    except UploadRefused:
        if noise is None or trainer.spends:
            raise
        return Fit(np.zeros_like(task.weights))


def _noise(agreed: Agreement, site: Site) -> Noise:
    if agreed.noise_source == "secure":
        return SecureNoise()
    return SimulationNoise(seeds.generator(site.seed, "privacy noise", site.round, site.client))


def _simulated(context: Context) -> bool:
    """Return whether our Grid says so, or this is a Ray worker, where Flower's own simulation runs."""
    ray = sys.modules.get("ray")
    return names.SIMULATED in context.node_config or (ray is not None and ray.is_initialized())


def _books(context: Context, place: _Workplace, client: int) -> Books:
    """Return where this node charges, and keeps what it sent."""
    if place.site is not None:
        return SiteBooks(place.site.opened(), place.experiment.digest)
    if not _simulated(context):
        raise PrivacyError(
            f"node_config has no {names.LEDGER}: a site that trains privately needs one (fed-dp ledger "
            "create FILE), named in its node config. Nothing was sent"
        )
    if (books := virtual_books(context)) is not None:
        return books
    budget = budget_of(place.experiment)
    assert budget is not None  # there is an agreement
    return VirtualBooks.open(client, place.experiment.digest, budget)


def virtual_books(context: Context) -> VirtualBooks | None:
    """Return a virtual client's books from its state, if it has any."""
    record = context.state.get(names.LEDGER)
    if not isinstance(record, ConfigRecord):
        return None
    new = [str(entry) for entry in record[NEW]]  # type: ignore[union-attr]
    identities, bodies = record.get(LASTING, []), record.get(BODIES, [])
    lasting = dict(zip(identities, bodies, strict=True))  # type: ignore[arg-type]
    return VirtualBooks(Account.from_json(str(record[ACCOUNT])), new, lasting)  # type: ignore[arg-type]


def keep_books(context: Context, books: VirtualBooks) -> None:
    """Put a virtual client's books into its state."""
    context.state[names.LEDGER] = ConfigRecord(
        {
            ACCOUNT: books.account.to_json(),
            NEW: list(books.new),
            LASTING: list(books.lasting),
            BODIES: list(books.lasting.values()),
        }
    )


def _local(memory: Memory, place: _Workplace) -> Vector:
    """Return the client's own parameters; before its first turn, those that everybody begins with."""
    if (own := memory.own()) is not None:
        return own
    if place.experiment.fits_to_public:  # by schema, all of it comes from the server
        raise PrivacyError(
            "a site fits no encoder to records, and part of the model is missing; nothing was sent"
        )
    return starting_weights(place.experiment, place.federation)
