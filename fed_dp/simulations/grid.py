"""Our own Grid: the project's ServerApp and ClientApp, unchanged, without Flower's simulation engine.

Node ids are 1..N in client order and replies come back in the order of the messages, so the same
seed gives the same result. A node's Context is kept here between messages, as a SuperNode would.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fed_dp.accounting.ledger import write_accounts
from fed_dp.clients.app import train_client_batch
from fed_dp.clients.ledger_session import VirtualLedgerSession
from fed_dp.errors import ResumeError
from fed_dp.models import use_one_thread
from fed_dp.runs.folder import LEDGERS, atomically
from fed_dp.sharing.message import LEDGER, PARTITION, PARTITIONS, SIMULATED
from fed_dp.strategies.failures import wrapped

RUN_ID = 1
SERVER_NODE = 0
CLIENT_RAISED = 2  # Flower's ErrorCode.CLIENT_APP_RAISED_EXCEPTION
Config = dict[str, bool | float | int | str]
Job = tuple[Message, Context]


def identify() -> None:
    """Tell Flower which run this process serves; `Message(...)` needs it outside of Flower's engines."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN_ID, SERVER_NODE, 0


def answer(app: ClientApp, message: Message, context: Context) -> Job:
    """Run the ClientApp on one message; an exception becomes an error reply and changes no state.

    Only what was charged before it stays charged.
    """
    changed = _with(context, context.state)
    try:
        reply: Message | Exception = app(message, changed)
    except Exception as error:  # whatever a client raises, the round goes on without it
        reply = error
    return _outcome(reply, message, context, changed)


def answer_client_batch(app: ClientApp, client_batch: Sequence[Job]) -> list[Job]:
    """Run the ClientApp on messages that are answered together; each as `answer` does."""
    if len(client_batch) == 1:
        return [answer(app, *job) for job in client_batch]
    use_one_thread()
    changed = [_with(context, context.state) for _, context in client_batch]
    replies = train_client_batch(
        [(message, new) for (message, _), new in zip(client_batch, changed, strict=True)]
    )
    return [
        _outcome(reply, message, context, new)
        for reply, (message, context), new in zip(replies, client_batch, changed, strict=True)
    ]


def _outcome(reply: Message | Exception, message: Message, context: Context, changed: Context) -> Job:
    if isinstance(reply, Message):
        return reply, changed
    kept = {k: v for k, v in changed.state.items() if k == LEDGER}
    failed = Message(Error(CLIENT_RAISED, wrapped(reply)), reply_to=message)
    return failed, _with(context, {**context.state, **kept})


def client_batches(messages: Sequence[Message], most: int, workers: int) -> list[list[Message]]:
    """Divide messages into client batches of at most `most`, as even as can be: all workers end together.

    Messages to one node are never in one client batch: the second must see what the first left.
    """
    count = -(-len(messages) // most)
    count = min(len(messages), -(-count // workers) * workers)
    found: list[list[Message]] = []
    for number in range(count):
        begin, end = (len(messages) * each // count for each in (number, number + 1))
        client_batch: dict[int, Message] = {}
        for message in messages[begin:end]:
            if message.metadata.dst_node_id in client_batch:
                found.append(list(client_batch.values()))
                client_batch = {}
            client_batch[message.metadata.dst_node_id] = message
        found.append(list(client_batch.values()))
    return found


def _with(context: Context, state: Mapping[str, Any]) -> Context:
    return Context(
        context.run_id, context.node_id, context.node_config, RecordDict(dict(state)), context.run_config
    )


class SimulationGrid(Grid):
    """A Grid over simulated nodes. Subclasses say where their ClientApps run."""

    def __init__(self, nodes: int, run_config: Config, client_batch: int = 1) -> None:
        identify()
        self._client_batch = client_batch  # how many train messages are answered together
        self._run = Run.create_empty(RUN_ID)
        self.contexts = {
            node: Context(
                RUN_ID,
                node,
                {PARTITION: node - 1, PARTITIONS: nodes, SIMULATED: True},
                RecordDict(),
                run_config,
            )
            for node in range(1, nodes + 1)
        }

    def stamp(self, message: Message) -> str:
        """Give a message its id."""
        identity = str(uuid4())
        message.metadata.__dict__["_message_id"] = identity
        return identity

    def client_batches(self, messages: Sequence[Message], *, workers: int) -> list[list[Message]]:
        """Return which messages are answered together: several that train, any other alone."""
        training = all(message.metadata.message_type == MessageType.TRAIN for message in messages)
        return client_batches(messages, self._client_batch if training else 1, workers)

    # ------------------------------------------------------------- Flower's interface, simple parts

    def set_run(self, run: Run) -> None:
        """Set the run this grid serves."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run this grid serves."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message (deprecated by Flower in favour of `Message(...)`)."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return all node ids, in client order."""
        return list(self.contexts)

    # ------------------------------------------------------------------------------ checkpoint

    def save(self, folder: Path, done: int) -> None:
        """Write what the nodes keep between rounds, as old as the server's checkpoint `done`."""
        self._write_ledgers(folder)
        states = {node: context.state for node, context in self.contexts.items()}
        with atomically(_clients(folder, done)) as out:
            pickle.dump(states, out)

    def _write_ledgers(self, folder: Path) -> None:
        accounts = {}
        for context in self.contexts.values():
            if (session := VirtualLedgerSession.of(context)) is not None:
                accounts[session.account.site] = session.account, list(session.new)
                session.new.clear()
                session.store()
        if accounts:
            write_accounts(folder / LEDGERS, accounts)

    def load(self, folder: Path, done: int) -> None:
        """Read back what `save` wrote. Only ever read from a run folder of your own (it is a pickle)."""
        path = _clients(folder, done)
        try:
            states = pickle.loads(path.read_bytes())
        except Exception as error:  # a damaged pickle can raise anything
            raise ResumeError(f"{path} cannot be read ({error}): start a new run") from None
        if set(states) != set(self.contexts):
            raise ResumeError(f"{path} holds {len(states)} clients, the experiment {len(self.contexts)}")
        for node, state in states.items():
            self.contexts[node].state = state


def _clients(folder: Path, done: int) -> Path:
    return folder / "checkpoint" / f"clients-{done:06d}.pickle"


class InProcessGrid(SimulationGrid):
    """All clients in this process, one after the other: for tests and the quickest runs."""

    def __init__(self, nodes: int, run_config: Config, app: ClientApp, client_batch: int = 1) -> None:
        super().__init__(nodes, run_config, client_batch)
        self._app = app
        self._waiting: dict[str, Message] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue the messages."""
        messages = list(messages)
        ids = [self.stamp(message) for message in messages]
        self._waiting |= dict(zip(ids, messages, strict=True))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Let the client that has waited longest train, and return its reply."""
        wanted = set(message_ids)
        first = next((i for i in self._waiting if i in wanted), None)
        return [] if first is None else [self._answer(first)]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Answer the messages; nothing can be late."""
        messages = list(messages)
        self.push_messages(messages)
        replies: list[Message] = []
        for client_batch in self.client_batches(messages, workers=1):
            replies += self._answer_client_batch([message.metadata.message_id for message in client_batch])
        return replies

    def _answer(self, identity: str) -> Message:
        return self._answer_client_batch([identity])[0]

    def _answer_client_batch(self, identities: Sequence[str]) -> list[Message]:
        messages = [self._waiting.pop(identity) for identity in identities]
        nodes = [message.metadata.dst_node_id for message in messages]
        jobs = [(message, self.contexts[node]) for message, node in zip(messages, nodes, strict=True)]
        answers = answer_client_batch(self._app, jobs)
        for node, (_, context) in zip(nodes, answers, strict=True):
            self.contexts[node] = context
        return [reply for reply, _ in answers]
