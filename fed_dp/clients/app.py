"""The Flower ClientApp: it receives weights, runs the trainer, and sends the change back.

Raw records and un-noised values never leave this module's callees. Everything that can go wrong
raises, and then Flower sends an error reply with no arrays in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fed_dp.accounting import to_json
from fed_dp.clients import device
from fed_dp.clients.registry import make_trainer
from fed_dp.clients.trainer import Site, State, Trainer
from fed_dp.errors import RunError
from fed_dp.experiment import Experiment, from_run_config
from fed_dp.experiment.federation import Federation, federation
from fed_dp.models import use_one_thread
from fed_dp.sharing import message as names

app = ClientApp()
STATE = "trainer"  # the record of Context.state that a trainer's state lives in


@dataclass(frozen=True, slots=True)
class _Workplace:
    experiment: Experiment
    federation: Federation
    trainer: Trainer


@lru_cache(maxsize=1)
def _workplace(config: tuple[tuple[str, bool | float | int | str], ...]) -> _Workplace:
    """Read the experiment, the data and the network once per process, not once per message."""
    experiment = from_run_config(dict(config))
    members = federation(experiment)
    return _Workplace(experiment, members, make_trainer(experiment, members.dataset))


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
    """Run one round of the trainer from the weights received."""
    started = time.perf_counter()
    place, client = _at_work(context)
    arrays, config = message.content[names.ARRAYS], message.content[names.CONFIG]
    assert isinstance(arrays, ArrayRecord) and isinstance(config, ConfigRecord)
    weights = names.from_npy(arrays[names.WEIGHTS].data)
    x, y = place.federation.client(client)
    turn = config[names.ROUND]
    assert isinstance(turn, int)
    site = Site(x, y, client, turn, place.experiment.seed)
    fit = place.trainer.fit(weights, site, _load_state(context))
    names.check_vector(fit.change, size=weights.size, what="own change")
    _keep_state(context, fit.state)
    content = RecordDict(
        {
            names.ARRAYS: ArrayRecord({names.CHANGE: Array(fit.change)}),
            names.METRICS: MetricRecord(
                {**fit.metrics, names.RECORDS: len(y), names.SECONDS: time.perf_counter() - started}
            ),
            names.CONFIG: ConfigRecord(
                {names.EVENTS: to_json(fit.events), names.DEVICE: device.choose(place.experiment.clients.gpus).type}
            ),
        }
    )
    return Message(content, reply_to=message)


def _load_state(context: Context) -> State:
    record = context.state.get(STATE)
    if not isinstance(record, MetricRecord):
        return {}
    return {key: [float(v) for v in values] for key, values in record.items() if isinstance(values, list)}


def _keep_state(context: Context, state: State) -> None:
    context.state[STATE] = MetricRecord({key: list(values) for key, values in state.items()})
