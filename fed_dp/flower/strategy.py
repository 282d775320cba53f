"""Distributed selective SGD as a Flower strategy for any app: `strategy.start(grid, arrays)`.

Reference: Shokri and Shmatikov, "Privacy-Preserving Deep Learning", CCS 2015, Figs. 3 and 4.
The ClientApp keeps its `train` function and its state_dict; it needs the mod `selective_upload`, or
`private_upload`. No noise is added here: an upload is as private as its site made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import INFO
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from fed_dp import seeds
from fed_dp.errors import ConfigError, EmptyRound, FedDpError, RunError
from fed_dp.flower.arrays import PARTLY, TERMS, Layout, the_arrays, update_in, update_record
from fed_dp.options import Fraction, NonNegative
from fed_dp.sharing.codec import Precision, decode, encode
from fed_dp.sharing.exchange import Exchange, order
from fed_dp.sharing.parameter_server import ParameterServer
from fed_dp.sharing.selection import Selection, share
from fed_dp.sharing.update import MAX_ABS_VALUE
from fed_dp.strategies.dssgd import Dssgd as Options
from fed_dp.strategies.failures import failure_of

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


class Dssgd(FedAvg):
    """Add what sites select of their changes; send each the most updated share of the model.

    Parameters
    ----------
    upload_fraction
        θ_u, the share of its changes that a site uploads.
    download_fraction
        θ_d, the share of the model that a site downloads after its first time; the rest it keeps.
    exchange
        "round_robin" (one site after the other; each begins with what the one before has uploaded),
        "random_order", "asynchronous" (in random order, some with the state of the last round), or
        "parallel" (all at once, as FedAvg).
    selection
        "largest_values", or "random_with_threshold" (τ = `threshold`).
    bound
        γ, within which every uploaded value lies.
    decay
        β, by which the counts of updates fade after each round.
    outdated
        With "asynchronous": the chance of last round's state.
    precision
        "float32" or "float16", of uploaded values.
    seed
        Of the orders and of ties among the most updated parameters.
    fedavg
        Any other argument of Flower's FedAvg: fraction_train, min_available_nodes, …

    Raises
    ------
    fed_dp.errors.ConfigError
        For options that do not go together, by name.
    """

    def __init__(
        self,
        *,
        upload_fraction: Fraction = 0.1,
        download_fraction: Fraction = 1.0,
        exchange: Exchange = "round_robin",
        selection: Selection = "largest_values",
        threshold: NonNegative | None = None,
        bound: float | None = None,
        decay: float | None = None,
        outdated: float | None = None,
        precision: Precision = "float32",
        seed: int = 0,
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        given = {
            "upload_fraction": upload_fraction,
            "download_fraction": download_fraction,
            "exchange": exchange,
            "selection": selection,
            "threshold": threshold,
            "bound": bound,
            "decay": decay,
            "outdated": outdated,
            "precision": precision,
        }
        self.options = _options({key: value for key, value in given.items() if value is not None})
        self.seed = seed
        self._model: _Model | None = None
        self._waves: list[list[int]] = []  # of the round that is going on, those to come
        self._outdated: frozenset[int] = frozenset()
        self._pending: dict[str, int] = {}  # message -> node, of those that have no reply yet
        self._round = 0
        self._base = RecordDict()  # what every message of the round holds beside the model
        self._asked: list[Message] = []  # of the wave that is on its way
        self._has_model: set[int] = set()  # nodes that had the whole model once, and replied

    # ------------------------------------------------------------------------------ whole runs

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Run all rounds from `initial_arrays`, in the order of the exchange; as Flower's own `start`."""
        self._model = None
        in_turn = _InWaves(grid, self)
        return super().start(
            in_turn,  # type: ignore[arg-type]  # it has all that the loop asks of a grid
            initial_arrays,
            num_rounds,
            timeout,
            train_config,
            evaluate_config,
            evaluate_fn,
        )

    def summary(self) -> None:
        """Log what is exchanged."""
        told = self.options
        log(
            INFO,
            "\t├──> DSSGD: uploads %g, downloads %g of the parameters, %s, bound %s",
            told.upload_fraction,
            told.download_fraction,
            told.exchange,
            told.bound,
        )
        super().summary()

    # ------------------------------------------------------------------------------ one round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the round's first wave: of all sites, under parallel exchange."""
        nodes = sorted(
            m.metadata.dst_node_id for m in super().configure_train(server_round, arrays, config, grid)
        )
        if not nodes:
            return []
        if self._model is None:
            self._model = _Model(arrays)
        waves = order(
            self.options.exchange,
            nodes,
            rng=seeds.generator(self.seed, "exchange", server_round),
            outdated=self.options.outdated,
        )
        if len(waves.waves) > 1 and not isinstance(grid, _InWaves):
            raise RunError(
                f"exchange = {self.options.exchange!r} asks one site after the other, which this loop does "
                "not: call strategy.start(…), or take exchange = 'parallel'"
            )
        self._waves, self._outdated = [list(wave) for wave in waves.waves], waves.outdated
        self._round, self._pending, self._asked = server_round, {}, []
        self._base = RecordDict({self.configrecord_key: config, TERMS: self._terms()})
        self._model.begin()
        return self.next_wave()

    def next_wave(self) -> list[Message]:
        """Return the messages of the next wave; none after the last."""
        if not self._waves:
            return []
        return [self._message(node) for node in self._waves.pop(0)]

    def _terms(self) -> ConfigRecord:
        told = self.options
        terms: dict[str, str | float | bool] = {
            PARTLY: told.download_share(0) < 1,
            "upload_fraction": told.upload_share(0),
            "selection": told.selection,
            "threshold": told.threshold,
            "bound": MAX_ABS_VALUE if told.bound is None else told.bound,
            "precision": told.precision,
        }
        return ConfigRecord(dict(terms))

    def _message(self, node: int) -> Message:
        assert self._model is not None  # by configure_train
        server = self._model.previous if node in self._outdated else self._model.server
        count = share(self.options.download_share(0), server.weights.size)
        if node in self._has_model and count < server.weights.size:
            rng = seeds.generator(self.seed, "download", self._round, node % 2**63)
            arrays = update_record(encode(server.download(count, rng=rng)))
        else:
            arrays = self._model.arrays(server)
        content = RecordDict({**self._base, self.arrayrecord_key: arrays})
        message = Message(content, node, MessageType.TRAIN, group_id=str(self._round))
        self._asked.append(message)
        return message

    def use(self, replies: Iterable[Message]) -> None:
        """Add the uploads of a wave, in the order of its nodes; what is not valid is refused by name."""
        self._pending |= {each.metadata.message_id: each.metadata.dst_node_id for each in self._asked}
        self._asked = []
        there = [reply for reply in replies if reply.metadata.reply_to_message_id in self._pending]
        for reply in sorted(there, key=lambda each: self._pending[each.metadata.reply_to_message_id]):
            node = self._pending.pop(reply.metadata.reply_to_message_id, None)
            if not reply.has_error() and reply.metadata.src_node_id == node:
                self._add(node, reply)

    def _add(self, node: int, reply: Message) -> None:
        assert self._model is not None  # by configure_train
        server, where = self._model.server, f"node {node}"
        try:
            _, record = the_arrays(reply.content, of=where)
            data = update_in(record)
            if data is None:
                raise RunError(
                    f"{where} sent whole arrays: its ClientApp needs mods=[fed_dp.flower.selective_upload()] "
                    "or private_upload"
                )
            most = share(self.options.upload_share(0), server.weights.size)
            bound = MAX_ABS_VALUE if self.options.bound is None else self.options.bound
            server.upload(decode(data, size=server.weights.size, most=most, bound=bound))
        except FedDpError as error:
            log(INFO, "\t> Refused the upload of node %d: %s", node, error)
            self._model.refused += 1
            self._model.reason = str(error)
            return
        self._has_model.add(node)
        self._model.added += 1

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add what is not added yet, and return the model.

        Raises
        ------
        EmptyRound
            When nobody uploaded: an unchanged model is never passed off as a result.
        """
        listed = list(replies)
        if self._model is None:  # fraction_train = 0
            return None, None
        self.use(listed)
        valid, errors = self._check_and_log_replies(listed, is_train=True, validate=False)
        model = self._model
        for reply in errors:  # it may have lost what it kept: the next download is whole
            self._has_model.discard(reply.metadata.src_node_id)
        if not model.added:
            why = failure_of(errors[0].error).reason if errors else model.reason or "nobody replied in time"
            raise EmptyRound(f"round {server_round}: no upload could be used; {why}")
        model.server.decay(self.options.decay)
        metrics = self._metrics([reply.content for reply in valid])
        metrics["uploads"] = model.added
        return model.arrays(model.server), metrics

    def _metrics(self, contents: Sequence[RecordDict]) -> MetricRecord:
        """Return the sites' metrics as FedAvg aggregates them, where all tell the same and their weight."""
        told = [[set(record) for record in content.metric_records.values()] for content in contents]
        same = all(len(each) == 1 and each == told[0] and self.weighted_by_key in each[0] for each in told)
        return (
            self.train_metrics_aggr_fn(list(contents), self.weighted_by_key)
            if told and same
            else MetricRecord()
        )


class _Model:
    """The parameter server of a run, and the arrays that it stands for."""

    def __init__(self, arrays: ArrayRecord) -> None:
        self.layout, self._template = Layout.of(arrays), arrays
        self.server = ParameterServer(self.layout.flatten(arrays, of="the initial arrays").copy())
        self.previous = self.server
        self.added = self.refused = 0
        self.reason = ""

    def begin(self) -> None:
        """Begin a round: keep the state for the sites that lag behind."""
        self.previous = self.server.copy()
        self.added = self.refused = 0
        self.reason = ""

    def arrays(self, server: ParameterServer) -> ArrayRecord:
        """Return the model as its app knows it."""
        return self.layout.fill(self._template, server.weights)


class _InWaves:
    """A grid for Flower's own loop: a round's messages go out wave by wave, each from the state by then."""

    def __init__(self, grid: Grid, strategy: Dssgd) -> None:
        self._grid, self._strategy = grid, strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send a wave, use its replies, and so on; return all replies. Any other messages go as they are."""
        wave = list(messages)
        replies = list(self._grid.send_and_receive(wave, timeout=timeout))
        if wave and wave[0].metadata.message_type == MessageType.TRAIN:
            self._strategy.use(replies)
            while wave := self._strategy.next_wave():
                came = list(self._grid.send_and_receive(wave, timeout=timeout))
                self._strategy.use(came)
                replies += came
        return replies


def _options(given: Mapping[str, Any]) -> Options:
    """Check options as those of an experiment are."""
    from fed_dp.experiment.source import validated

    options = validated(Options, given, where="fed_dp.flower.Dssgd")
    if options.free_running:
        raise ConfigError(
            "exchange = 'free_running': expected parallel, round_robin, random_order or asynchronous"
        )
    if options.mechanism is not None:
        raise ConfigError(
            f"selection = {options.selection!r}: sites add noise, not the strategy: give their ClientApp "
            "mods=[fed_dp.flower.private_upload(…)]"
        )
    if isinstance(options.upload_fraction, tuple) or isinstance(options.download_fraction, tuple):
        raise ConfigError("upload_fraction and download_fraction: expected one number for all sites")
    try:
        options.check_options()
    except ValueError as error:
        raise ConfigError(f"fed_dp.flower.Dssgd: {error}".replace("strategy.", "")) from None
    return options
