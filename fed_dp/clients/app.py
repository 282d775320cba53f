"""The Flower ClientApp: it receives weights, runs the trainer, and sends selected changes back.

Raw records and un-noised values never leave this module's callees. Everything that can go wrong
raises, and then Flower sends an error reply with no arrays in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fed_dp.accounting import to_json
from fed_dp.clients import device
from fed_dp.clients.participant import Participant
from fed_dp.clients.registry import make_trainer
from fed_dp.clients.trainer import Site, State, Trainer
from fed_dp.errors import PrivacyError, RunError
from fed_dp.experiment import Experiment, from_run_config
from fed_dp.experiment.federation import Federation, federation
from fed_dp.models import Vector, initial_weights, use_one_thread
from fed_dp.sharing import message as names

app = ClientApp()
STATE, LOCAL = "trainer", "local"  # the records of Context.state: a trainer's state, own parameters


@dataclass(frozen=True, slots=True)
class _Workplace:
    experiment: Experiment
    federation: Federation
    trainer: Trainer
    start: Vector  # the parameters that everybody begins with


@lru_cache(maxsize=1)
def _workplace(config: tuple[tuple[str, bool | float | int | str], ...]) -> _Workplace:
    """Read the experiment, the data and the network once per process, not once per message."""
    experiment = from_run_config(dict(config))
    members = federation(experiment)
    trainer, net = make_trainer(experiment, members.dataset)
    data = members.dataset
    start = initial_weights(net.name, data.shape, data.classes, seed=experiment.seed)
    return _Workplace(experiment, members, trainer, start)


def _at_work(context: Context) -> tuple[_Workplace, int]:
    if names.PARTITION not in context.node_config:
        raise RunError(f"node_config has no {names.PARTITION}: this node does not know which client it is")
    place = _workplace(tuple(sorted(context.run_config.items())))
    return place, int(context.node_config[names.PARTITION])


@app.lifespan()
def lifespan(_: Context) -> Iterator[None]:
    """Keep to one torch thread: more of them make many small clients 10 to 40 times slower."""
    use_one_thread()
    yield


@app.query()
def describe(message: Message, context: Context) -> Message:
    """Tell the server which client this is and how many records it holds (public)."""
    place, client = _at_work(context)
    metrics = MetricRecord({names.PARTITION: client, names.RECORDS: len(place.federation.rows(client))})
    return Message(RecordDict({names.METRICS: metrics}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Run one round of the trainer from the weights received.

    The weights are checked first: weights from which a network overflows for some records and not
    for others would turn an error reply into an answer about the records. What a private trainer
    raises unexpectedly is told by its kind alone, for the same reason.
    """
    place, client = _at_work(context)
    arrays, config = message.content.array_records, message.content.config_records
    if names.ARRAYS not in arrays or names.CONFIG not in config:
        raise RunError(f"a train message needs the records {names.ARRAYS} and {names.CONFIG}")
    participant = Participant.of(place.experiment, client, place.start.size)
    weights = participant.download(arrays[names.ARRAYS][names.WEIGHTS].data, _local(context, place.start))
    turn = config[names.CONFIG].get(names.ROUND)
    if not isinstance(turn, int):
        raise RunError(f"{names.ROUND} = {turn!r}: expected a whole number")
    x, y = place.federation.client(client)
    site = Site(x, y, client, turn, place.experiment.seed)
    try:
        fit = place.trainer.fit(weights, site, _load_state(context))
        data = participant.upload(fit.change, seed=place.experiment.seed, turn=turn, client=client)
    except Exception as error:
        if place.trainer.spends and not isinstance(error, PrivacyError):
            raise PrivacyError(f"training failed ({type(error).__name__}); nothing was sent") from None
        raise
    _keep_state(context, fit.state)
    if participant.keeps_local:
        own = weights + fit.change  # all of the change stays here, uploaded or not
        context.state[LOCAL] = ArrayRecord({LOCAL: Array(own)})
    told = {
        names.ROUND: turn,
        names.EVENTS: to_json(fit.events),
        names.DEVICE: device.choose(place.experiment.clients.gpus).type,
    }
    content = RecordDict(
        {
            names.ARRAYS: ArrayRecord({names.CHANGE: Array("uint8", (len(data),), names.WIRE, data)}),
            names.METRICS: MetricRecord({**fit.metrics, names.RECORDS: len(y)}),
            names.CONFIG: ConfigRecord(told),  # type: ignore[arg-type]
        }
    )
    return Message(content, reply_to=message)


def _local(context: Context, start: Vector) -> Vector:
    record = context.state.get(LOCAL)
    return record[LOCAL].numpy() if isinstance(record, ArrayRecord) else start


def _load_state(context: Context) -> State:
    record = context.state.get(STATE)
    if not isinstance(record, MetricRecord):
        return {}
    return {key: [float(v) for v in values] for key, values in record.items() if isinstance(values, list)}


def _keep_state(context: Context, state: State) -> None:
    context.state[STATE] = MetricRecord({key: list(values) for key, values in state.items()})
