"""Where a mod charges: a durable ledger at a real site, an account in the node's state in a simulation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from fed_dp import seeds
from fed_dp.accounting import Account, Budget, Event, Ledger, Unprotected
from fed_dp.clients.ledger_session import (
    LedgerSession,
    SiteLedgerSession,
    TrainRequest,
    TrainResponse,
    VirtualLedgerSession,
    exclusive,
)
from fed_dp.clients.workplace import simulated
from fed_dp.errors import ConfigError, PrivacyError
from fed_dp.flower.arrays import server_round
from fed_dp.flower.mods import EVALUATE, App, category
from fed_dp.mechanisms import Noise, NoiseSource, SecureNoise, SimulationNoise
from fed_dp.sharing import message as names


@dataclass(frozen=True, slots=True)
class Charges:
    """What pays for a node's releases, as its operator has set it up."""

    ledger: Path | None  # None: the node's own config names it, or this is a simulation
    witness: Path | None
    budget: Budget | None  # of a simulated client
    seed: int | None

    @classmethod
    def of(
        cls, ledger: str | Path | None, witness: str | Path | None, budget: Budget | None, seed: int | None
    ) -> Charges:
        """Check what a mod was given.

        Raises
        ------
        ConfigError
            When a durable ledger comes with what only simulations have.
        """
        if ledger is not None and (budget is not None or seed is not None):
            key, value = ("budget", budget) if budget is not None else ("seed", seed)
            raise ConfigError(
                f"{key} = {value!r} with ledger = {str(ledger)!r}: a ledger on disk has its own budget and "
                "draws secure noise; expected one or the other"
            )
        return cls(
            None if ledger is None else Path(ledger), None if witness is None else Path(witness), budget, seed
        )

    def path(self, context: Context) -> Path | None:
        """Return the ledger on disk; None in a simulation."""
        named = context.node_config.get(names.LEDGER)
        return self.ledger or (Path(str(named)) if named else None)

    @contextmanager
    def session(self, context: Context) -> Iterator[LedgerSession]:
        """Hold the node's ledger: two copies of one message are answered one after the other.

        Raises
        ------
        PrivacyError
            When this is no simulation, and there is no ledger on disk.
        """
        run = f"flower run {context.run_id}"
        if (path := self.path(context)) is not None:
            witness = self.witness or path.with_name(path.name + ".witness")
            with exclusive(path):
                yield SiteLedgerSession(Ledger(path, witness=witness), run)
            return
        if not simulated(context) or self.budget is None:
            raise PrivacyError(
                "there is no ledger: give the mod ledger='site.sqlite' (made by fed-dp ledger create), or "
                "name it in the node config; in a simulation, give it budget=fed_dp.Budget(…)"
            )
        session = VirtualLedgerSession.of(context)
        yield session or VirtualLedgerSession.open(client_of(context), run, self.budget, context)

    def source(self, context: Context) -> NoiseSource:
        """Return the name of the source of noise, for the ledger."""
        return "secure" if self.seed is None or self.path(context) is not None else "simulation"

    def check_noise(self, context: Context) -> None:
        """Refuse before anything is charged, where secure noise is not installed."""
        if self.source(context) == "secure":
            SecureNoise()

    def noise(self, context: Context, request: TrainRequest, account: Account) -> Noise:
        """Return where noise comes from: seeded in a simulation that has a seed, else secure.

        Every charge has noise of its own.
        """
        if self.seed is None or self.source(context) == "secure":
            return SecureNoise()
        return SimulationNoise(
            seeds.generator(
                self.seed, "privacy noise", request.server_round, client_of(context), account.number
            )
        )


def client_of(context: Context) -> int:
    """Return a node's number among its federation's, where it has one."""
    number = context.node_config.get(names.PARTITION, 0)
    return number if type(number) is int and number >= 0 else 0


def request_of(message: Message) -> TrainRequest:
    """Return what a message asks: the same for the same message, sent again."""
    digest = hashlib.sha256()
    content = message.content
    for name, arrays in sorted(content.array_records.items()):
        for key, array in arrays.items():
            digest.update(json.dumps([name, key, array.dtype, list(array.shape)]).encode() + array.data)
    tables = {name: dict(record) for name, record in content.config_records.items()}
    digest.update(json.dumps(tables, sort_keys=True, default=repr).encode())
    return TrainRequest(server_round(content), digest.digest(), known=None)


def kept_reply(session: LedgerSession, request: TrainRequest, message: Message) -> Message | None:
    """Return what was sent in response to this very message before: repeating it costs nothing."""
    before = session.kept(request)
    return None if before is None else Message(_unpacked(before.data), reply_to=message)


def keep_reply(session: LedgerSession, account: Account, request: TrainRequest, reply: Message) -> None:
    """Keep what is about to be sent."""
    session.keep(account, request, TrainResponse(_packed(reply.content), {}, {}))


def cost_metrics(account: Account) -> dict[str, float]:
    """Return what a node tells of its account: its total ε so far, and δ."""
    return {"epsilon": account.metered, "delta": float(account.budget.delta)}


def only_scores(
    message: Message, context: Context, app: App, session: LedgerSession, *, allowed: bool
) -> Message:
    """Let a message that asks for scores through, if the operator allows it; it is entered in the ledger."""
    if not allowed or category(message) != EVALUATE:
        raise PrivacyError(
            f"a message of type {message.metadata.message_type!r}: what the app would reply is computed from "
            "its records without noise; the operator can allow 'evaluate' by evaluate=True; nothing was sent"
        )
    request = TrainRequest(0, request_of(message).data, None)
    session.charge(Event(Unprotected("scores"), "none", 0, client_of(context), "none"), request)
    return app(message, context)


def _packed(content: RecordDict) -> bytes:
    """Write a reply for the outbox: its text, then the bytes of its arrays."""
    head: list[Any] = []
    body: list[bytes] = []
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            arrays = [
                (key, array.dtype, array.shape, array.stype, len(array.data)) for key, array in record.items()
            ]
            head.append(["arrays", name, arrays])
            body += [array.data for array in record.values()]
        elif isinstance(record, MetricRecord):
            head.append(["metrics", name, dict(record)])
        else:
            head.append(["config", name, {key: _plain(value) for key, value in record.items()}])
    return b"\n".join([json.dumps(head).encode(), b"".join(body)])


def _unpacked(data: bytes) -> RecordDict:
    head, _, body = data.partition(b"\n")
    content, start = RecordDict(), 0
    for kind, name, items in json.loads(head):
        if kind == "arrays":
            record = ArrayRecord()
            for key, dtype, shape, stype, size in items:
                record[key] = Array(dtype, tuple(shape), stype, body[start : start + size])
                start += size
            content[name] = record
        elif kind == "metrics":
            content[name] = MetricRecord(items)
        else:
            content[name] = ConfigRecord({key: _value(plain) for key, plain in items.items()})
    return content


def _plain(value: Any) -> Any:
    """Return a value of a ConfigRecord as JSON has it: bytes as {"hex": …}."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _value(plain: Any) -> Any:
    if isinstance(plain, dict):
        return bytes.fromhex(plain["hex"])
    return [_value(each) for each in plain] if isinstance(plain, list) else plain
