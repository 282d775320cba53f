"""The Flower ClientApp: it receives weights, runs the trainer, and sends selected changes back.

Raw records and un-noised values never leave this module's callees. Everything that can go wrong
raises, and then Flower sends an error reply with no arrays in it.

A message that trains is answered in three steps, for one client and for a batch of virtual clients alike:
`prepare` checks it, charges the release and says what is to be trained; the trainer fits; `finish` selects,
adds noise, keeps what is sent, and writes the reply.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fed_dp import seeds
from fed_dp.accounting import Account, Event, Unprotected, from_json, to_json
from fed_dp.clients import device
from fed_dp.clients.ledger_session import (
    SCORES,
    LedgerSession,
    SiteLedgerSession,
    TrainRequest,
    TrainResponse,
    VirtualLedgerSession,
    exclusive,
)
from fed_dp.clients.memory import Memory
from fed_dp.clients.redaction import kind_only, without_paths, without_site_paths
from fed_dp.clients.site_file import SiteFile
from fed_dp.clients.trainer import (
    ClientBatchTrainer,
    ClientData,
    Fit,
    FitRequest,
    NoisedOnceTrainer,
    StagedTrainer,
    Trainer,
)
from fed_dp.clients.update_exchange import UpdateExchange
from fed_dp.clients.workplace import Workplace, no_weights, simulated, site_of, site_paths, workplace_of
from fed_dp.errors import PrivacyError, RunError, SiteRefused, UploadRefused
from fed_dp.experiment.plan import ReleasePlan, budget_of
from fed_dp.mechanisms import Noise, SecureNoise, SimulationNoise
from fed_dp.models import Evaluator, Vector, use_one_thread
from fed_dp.sharing import message as names
from fed_dp.sharing.update import MAX_ABS_VALUE

app = ClientApp()
SCORE_DIGITS = 2


@app.lifespan()
def lifespan(_: Context) -> Iterator[None]:
    """Keep to one torch thread: more of them make many small clients 10 to 40 times slower."""
    use_one_thread()
    yield


def _redacted(context: Context) -> AbstractContextManager[None]:
    """Redact errors where the node is a real site."""
    paths = site_paths(context)
    return without_site_paths(paths) if paths else nullcontext()


# -------------------------------------------------------------------------------------- query


@app.query()
def describe(message: Message, context: Context) -> Message:
    """Tell the server which client this is, how many records it holds (public), and which ledger it has.

    A site whose file does not allow the experiment says so, and opens no records.
    """
    with _redacted(context):
        return _description(message, context)


def _description(message: Message, context: Context) -> Message:
    metadata: dict[str, str | bool] = {}
    try:
        place, client = workplace_of(context)
        site, records = place.site, place.stated_records(client)
        metadata[names.SCORES] = site is not None and site.share.metrics and place.federation.tested
    except SiteRefused as error:
        if (site := site_of(context)) is None:
            raise
        client, records = site.client, 0
        metadata[names.REFUSED] = without_paths(str(error), *site_paths(context))
    content = RecordDict({names.METRICS: MetricRecord({names.PARTITION: client, names.RECORDS: records})})
    if site is not None:
        metadata[names.LEDGER] = site.opened().read()[0].identity
        content[names.CONFIG] = ConfigRecord(dict(metadata))
    return Message(content, reply_to=message)


# ----------------------------------------------------------------------------------- evaluate


@app.evaluate()
def score(message: Message, context: Context) -> Message:
    """Tell how well a model does on a deployed site's own test records, if its file allows that.

    Scores are computed on the records as they are: no noise protects them. So there is one response for each
    experiment that the site took part in, rounded and entered in its ledger, and no more in all than its
    file says.
    """
    with _redacted(context):
        place, _ = workplace_of(context)
        if place.site is None or not place.site.share.metrics:
            raise SiteRefused("this site tells no scores (share.metrics)")
        if not place.federation.tested:
            raise SiteRefused(
                "this site has no test records (test.csv in its data folder): it tells no scores"
            )
        request = _request(message).for_scores()
        session = SiteLedgerSession(place.site.opened(), place.experiment.digest)
        with exclusive(session.ledger.path):
            response = session.kept(request) or _scores(place, place.site, session, request)
        return Message(RecordDict({names.METRICS: MetricRecord(dict(response.metrics))}), reply_to=message)


def _scores(
    place: Workplace, site: SiteFile, session: SiteLedgerSession, request: TrainRequest
) -> TrainResponse:
    """Enter the scores in the ledger, compute and keep them."""
    slots = session.ledger.slots(experiment=place.experiment.digest)
    if not slots - {SCORES}:
        raise SiteRefused("this site took no part in this experiment: it tells no scores")
    if SCORES in slots:
        raise SiteRefused("this site told the scores of another model of this experiment: it tells no more")
    if (count := session.ledger.read()[0].scores) >= site.share.scores:
        raise SiteRefused(f"this site told scores {count} times: it tells no more (share.scores)")
    data = place.federation.dataset
    weights = UpdateExchange(place.size).download(request.scored_weights, no_weights)
    event = Event(Unprotected("scores"), "none", place.experiment.rounds, site.client, "none")
    account = session.charge(event, request)
    evaluator = Evaluator(place.network, data.inputs(data.test), data.test.y)
    rounded = {key: round(value, SCORE_DIGITS) for key, value in evaluator.scores(weights).items()}
    response = TrainResponse(b"", {**rounded, names.RECORDS: len(data.test)}, {})
    session.keep(account, request, response)
    return response


# -------------------------------------------------------------------------------------- train


@dataclass(frozen=True, slots=True)
class Pending:
    """A message whose release is charged and whose training is still to be done.

    `plan`: what is released, None where nothing is private. `noise`: for what is selected after training.
    `released`: what a staged trainer has released, on which it trains without records; or the noise that a
    trainer has drawn once.
    """

    message: Message
    request: TrainRequest
    place: Workplace
    exchange: UpdateExchange
    fit_request: FitRequest
    memory: Memory
    plan: ReleasePlan | None
    session: LedgerSession | None  # None: nothing is charged
    account: Account | None = None  # as it stood when this round was charged
    events: Sequence[Event] = ()
    noise: Noise | None = None
    released: Vector | None = None

    def fit(self) -> Fit:
        """Train this client by itself."""
        trainer, data = self.place.trainer, self.fit_request.data
        if self.released is not None and isinstance(trainer, StagedTrainer):
            stage = trainer.stage(data.server_round)
            weights = self.fit_request.weights
            return trainer.follow(weights, self.released, stage, records=data.expected_records)
        if self.released is not None and self.released.size and isinstance(trainer, NoisedOnceTrainer):
            return trainer.fit_with(self.released, self.fit_request.weights, data, self.fit_request.state)
        return trainer.fit(self.fit_request.weights, data, self.fit_request.state)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Run one round of the trainer from the weights received."""
    with _redacted(context), _exclusive(context):
        pending = prepare(message, context)
        return pending if isinstance(pending, Message) else finish(pending, _outcome_of(pending))


def train_client_batch(jobs: Sequence[tuple[Message, Context]]) -> list[Message | Exception]:
    """Run one round of several virtual clients, all that can be trained at once in one go.

    Each is charged before the common training begins, and has its own noise. One that fails does so alone,
    unless the common training does.
    """
    prepared: list[Pending | Message | Exception] = []
    for message, context in jobs:
        try:
            prepared.append(prepare(message, context))
        except Exception as error:
            prepared.append(error)
    pending = [each for each in prepared if isinstance(each, Pending)]
    outcomes = iter(_outcomes_of(pending))
    return [_finished(each, next(outcomes)) if isinstance(each, Pending) else each for each in prepared]


def _outcome_of(pending: Pending) -> Fit | Exception:
    try:
        return pending.fit()
    except Exception as error:
        return error


def _outcomes_of(pending: Sequence[Pending]) -> Sequence[Fit | Exception]:
    """Train several clients: in one go where the trainer can, and nothing is released in stages."""
    trainer: object = pending[0].place.trainer if pending else None  # the same for all of an experiment
    if isinstance(trainer, ClientBatchTrainer) and all(each.released is None for each in pending):
        try:
            return trainer.fit_batch([each.fit_request for each in pending])
        except Exception as error:
            return [error] * len(pending)
    return [_outcome_of(each) for each in pending]


def _finished(pending: Pending, outcome: Fit | Exception) -> Message | Exception:
    try:
        return finish(pending, outcome)
    except Exception as error:
        return error


def prepare(message: Message, context: Context) -> Pending | Message:
    """Check a message, charge what it releases, and return what is to be trained; or what was sent before.

    The weights are checked first: weights from which a network overflows for some records and not
    for others would turn an error reply into an answer about the records.
    Where the round is private: what was sent in response to the same request is sent again, as it
    was; otherwise the round is charged, then trained, noised, kept, and sent. Any fault on the
    way raises, and then nothing is sent; what was charged stays charged.
    """
    place, client = workplace_of(context)
    request = _request(message)
    experiment = place.experiment
    if place.site is not None and request.server_round > experiment.rounds:
        raise RunError(
            f"{names.ROUND} = {request.server_round}: the experiment has {experiment.rounds} rounds"
        )
    plan, exchange, memory = (
        place.plan(client),
        place.exchange(client),
        place.memory(context, request.server_round),
    )
    weights = exchange.download(request.data, lambda: place.own_weights(memory))
    x, y = place.federation.client(client)
    expected = experiment.data.expected(client) or 0
    data = ClientData(x, y, client, request.server_round, experiment.seed, expected)
    fit_request = FitRequest(weights, data, memory.state())
    session = None if plan is None and place.site is None else _session(context, place, client)
    pending = Pending(message, request, place, exchange, fit_request, memory, plan, session)
    if session is None:
        return pending
    if (before := session.kept(request)) is not None:
        return _reply(before, message)
    if plan is not None and plan.noise_source == "secure" and isinstance(place.trainer, NoisedOnceTrainer):
        return _noised_once(pending, session, plan, place.trainer)
    if plan is not None and plan.stage(request.server_round):
        return _released(pending, session, plan)
    return _charged(pending, session)


def _charged(pending: Pending, session: LedgerSession) -> Pending:
    """Charge what this round releases; only then is there noise."""
    plan, request, data = pending.plan, pending.request, pending.fit_request.data
    if plan is None:  # a deployed site that allows it: its ledger says so
        event = Event(Unprotected("upload"), "none", request.server_round, data.client, "none")
        return replace(pending, account=session.charge(event, request))
    event = plan.event(server_round=request.server_round, client=data.client)
    stages = _released_before(pending, session, last=len(plan.stages))
    account = session.charge(event, request, planned=pending.place.planned(data.client))
    # A trainer with noise of its own draws it itself; else it is added to what is selected.
    noise = None if pending.place.trainer.is_private else _noise(plan, data)
    told = [event for response in stages for event in from_json(response.metadata[names.EVENTS])]
    return replace(pending, account=account, events=[*told, event], noise=noise)


def _released(pending: Pending, session: LedgerSession, plan: ReleasePlan) -> Pending:
    """Train on what this round's stage has released. Only if it has not yet is it charged and released.

    What a stage released is kept; under the same encoder it is used again, in this round and in all
    later ones. The response tells the events of all stages, for a reply of an earlier round may be lost.
    """
    trainer, request, data = pending.place.trainer, pending.request, pending.fit_request.data
    stage = plan.stage(request.server_round)
    told = _released_before(pending, session, last=stage - 1)
    about = _about(pending, stage)
    response = session.kept(about)
    if response is None:
        event = plan.event(server_round=request.server_round, client=data.client)
        account = session.charge(event, request)
        with kind_only() if pending.place.site is not None else nullcontext():
            released = _release(trainer, pending.fit_request, stage, plan)
        response = TrainResponse(released, {}, {names.EVENTS: to_json([event])})
        session.keep(account, about, response)
    events = [event for each in [*told, response] for event in from_json(each.metadata[names.EVENTS])]
    return replace(pending, events=events, released=np.frombuffer(response.data, np.float32))


def _released_before(pending: Pending, session: LedgerSession, *, last: int) -> list[TrainResponse]:
    """Return what stages up to `last` released under this encoder, where this client took part in them."""
    kept = [session.kept(_about(pending, stage)) for stage in range(1, last + 1)]
    return [response for response in kept if response is not None]


def _about(pending: Pending, stage: int) -> TrainRequest:
    """Return the request for a stage's statistic that this message comes down to."""
    trainer, weights = pending.place.trainer, pending.fit_request.weights
    frozen = trainer.frozen(weights, stage).tobytes() if isinstance(trainer, StagedTrainer) else b""
    return pending.request.about(stage, frozen)


def _release(trainer: Trainer, request: FitRequest, stage: int, plan: ReleasePlan) -> bytes:
    """Release a stage's statistic; in a simulation, a paper's trainer draws its own noise from the seed."""
    if not isinstance(trainer, StagedTrainer):
        return b""
    return trainer.release(request.weights, request.data, stage, _noise(plan, request.data)).tobytes()


def _noised_once(
    pending: Pending, session: LedgerSession, plan: ReleasePlan, trainer: NoisedOnceTrainer
) -> Pending:
    """Train under noise that is charged and drawn once, for these records alone.

    Every round looks at the records again, under the same noise: so a round is answered for one set of
    weights, and its answer is kept. Other weights or records would be another question to the same noise.
    """
    request, data = pending.request, pending.fit_request.data
    slot = f"round {request.server_round}"
    if slot in session.slots():
        raise PrivacyError(
            f"{slot} was answered for other weights: what is only claimed to be private is answered once a "
            "round; nothing was sent"
        )
    records = hashlib.sha256(data.x.tobytes() + data.y.tobytes()).hexdigest()
    about = request.about(1, b"")
    before = session.kept(about)
    if before is None:
        event = plan.event(server_round=request.server_round, client=data.client)
        account = session.charge(event, request)
        with kind_only() if pending.place.site is not None else nullcontext():
            drawn = trainer.draw(pending.fit_request.weights, data, _noise(plan, data))
        metadata = {names.EVENTS: to_json([event]), names.RECORDS: records}
        before = TrainResponse(drawn.astype(np.float32).tobytes(), {}, metadata)
        session.keep(account, about, before)
    if before.metadata[names.RECORDS] != records:
        raise PrivacyError("the records have changed since their noise was drawn; nothing was sent")
    return replace(
        pending,
        request=replace(request, slot=slot),
        account=session.account,
        events=from_json(before.metadata[names.EVENTS]),
        released=np.frombuffer(before.data, np.float32),
    )


def finish(pending: Pending, outcome: Fit | Exception) -> Message:
    """Select what is uploaded, with noise where that is private; keep it; return the reply.

    What goes wrong at a real site is told by its kind alone.
    """
    place, data, plan, session = pending.place, pending.fit_request.data, pending.plan, pending.session
    private = plan is not None
    with kind_only() if place.site is not None else nullcontext():
        fit = _fit_of(pending, outcome)
        upload = pending.exchange.upload(
            fit.change,
            seed=data.seed,
            server_round=data.server_round,
            client=data.client,
            noise=pending.noise,
        )
    # Of the change, all stays here, uploaded or not. What is no number counts as no change, as it does in the
    # upload: the next round must not fail by what stands in a record.
    own = None
    if pending.exchange.keeps_local:
        change = np.nan_to_num(fit.change, nan=0.0)
        own = np.clip(pending.fit_request.weights + change, -MAX_ABS_VALUE, MAX_ABS_VALUE)
    pending.memory.keep(fit.state, own)
    # A trainer without noise of its own computes its metrics from the records as they are.
    telling = place.site is None or place.site.share.metrics
    metrics = dict(fit.metrics) if telling and (not private or place.trainer.is_private) else {}
    metadata: dict[str, str | int] = {
        names.ROUND: data.server_round,
        names.EVENTS: to_json(pending.events),
        names.DEVICE: device.choose(place.experiment.clients.gpus).type,
    }
    if session is not None:
        metadata[names.LEDGER_HEAD] = session.head if pending.account is None else pending.account.ledger_head
    response = TrainResponse(upload, {**metrics, names.RECORDS: place.stated_records(data.client)}, metadata)
    if session is not None and pending.account is not None:
        session.keep(pending.account, pending.request, response)
    return _reply(response, pending.message)


def _fit_of(pending: Pending, outcome: Fit | Exception) -> Fit:
    """Return the fit. Where noise comes after it, a training that diverged is a change like any other."""
    if isinstance(outcome, Fit):
        return outcome
    diverged = isinstance(outcome, UploadRefused | ArithmeticError | np.linalg.LinAlgError)
    if diverged and pending.noise is not None:
        return Fit(np.zeros_like(pending.fit_request.weights))
    raise outcome


def _noise(plan: ReleasePlan, data: ClientData) -> Noise:
    if plan.noise_source == "secure":
        return SecureNoise()
    return SimulationNoise(seeds.generator(data.seed, "privacy noise", data.server_round, data.client))


# ----------------------------------------------------------------------------------- messages


def _request(message: Message) -> TrainRequest:
    arrays, config = message.content.array_records, message.content.config_records
    if names.ARRAYS not in arrays or names.CONFIG not in config:
        raise RunError(f"a train message needs the records {names.ARRAYS} and {names.CONFIG}")
    server_round = config[names.CONFIG].get(names.ROUND)
    if type(server_round) is not int or not 0 < server_round < 2**60:  # bool is an int, too
        raise RunError(f"{names.ROUND} = {server_round!r}: expected a whole number from 1")
    known = str(config[names.CONFIG].get(names.LEDGER_HEAD, "")) or None
    return TrainRequest(server_round, arrays[names.ARRAYS][names.WEIGHTS].data, known)


def _reply(response: TrainResponse, message: Message) -> Message:
    data = response.data
    content = RecordDict(
        {
            names.ARRAYS: ArrayRecord({names.CHANGE: Array("uint8", (len(data),), names.WIRE, data)}),
            names.METRICS: MetricRecord(dict(response.metrics)),
            names.CONFIG: ConfigRecord(dict(response.metadata)),
        }
    )
    return Message(content, reply_to=message)


@contextmanager
def _exclusive(context: Context) -> Iterator[None]:
    """Answer one message at a time at a real site: two copies of one must not both be charged."""
    site = site_of(context)
    if site is None:
        yield
        return
    with exclusive(Path(site.ledger)):
        yield


def _session(context: Context, place: Workplace, client: int) -> LedgerSession:
    """Return where this node charges, and keeps what it sent."""
    if place.site is not None:
        return SiteLedgerSession(place.site.opened(), place.experiment.digest)
    if not simulated(context):
        raise PrivacyError(
            f"node_config has no {names.LEDGER}: a site that trains privately needs one (fed-dp ledger "
            "create FILE), named in its node config. Nothing was sent"
        )
    if (session := VirtualLedgerSession.of(context)) is not None:
        return session
    budget = budget_of(place.experiment)
    assert budget is not None  # there is a plan
    return VirtualLedgerSession.open(client, place.experiment.digest, budget, context)
