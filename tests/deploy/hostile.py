"""A site with a valid key and another program: whatever it is asked, it sends something bad.

`python -m tests.deploy.hostile SITE_FOLDER`, in place of `fed-dp deploy site SITE_FOLDER`. Site 0 sends one
half of `SENT`, in order, site 1 the other, from the end.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from fed_dp.clients.app import app
from fed_dp.deploy import site, supernode
from fed_dp.sharing import message as names
from fed_dp.sharing.codec import encode
from fed_dp.sharing.update import SparseUpdate

Change = Callable[[RecordDict], RecordDict]


def with_data(change: Callable[[bytes], bytes]) -> Change:
    def bad(content: RecordDict) -> RecordDict:
        record = content.array_records[names.ARRAYS]
        data = change(record[names.CHANGE].data)
        record[names.CHANGE] = Array("uint8", (len(data),), names.WIRE, data)
        return content

    return bad


def with_values(value: float) -> Change:
    """The last of its values is this one, whatever a SparseUpdate would say."""
    return with_data(lambda data: data[:-4] + np.full(1, value, "<f4").tobytes())


def told(record: str, key: str, value: Any) -> Change:
    def bad(content: RecordDict) -> RecordDict:
        content[record][key] = value  # type: ignore[index]
        return content

    return bad


def without(record: str) -> Change:
    def bad(content: RecordDict) -> RecordDict:
        del content[record]
        return content

    return bad


def whole(size: int) -> bytes:
    return encode(SparseUpdate.dense(np.ones(size, np.float32)))


def loud(_: RecordDict) -> RecordDict:
    raise RuntimeError("x" * 1_000_000)


EVENT = '[{"release": {"mechanism": "laplace", "epsilon": 1}, "guarantee": "statistics", "round": 1, '
EVENT += '"client": 0, "noise_source": "secure"}]'
SIZE = 21  # parameters of a linear model of 6 inputs and 3 classes

BAD: list[tuple[str, Change]] = [
    ("truncated", with_data(lambda data: data[:-5])),
    ("too long", with_data(lambda data: data + b"\0")),
    ("truncated", with_data(lambda data: b"")),
    ("not an update", with_data(lambda data: b"\x93NUMPY" + data[6:])),
    ("size: expected 21", with_data(lambda data: whole(5))),
    ("size: expected 21", with_data(lambda data: whole(10**6))),
    ("too many: 21 coordinates, at most 6", with_data(lambda data: whole(SIZE))),
    ("nan", with_values(np.nan)),
    ("inf", with_values(np.inf)),
    ("within", with_values(3e38)),
    ("indices", with_data(lambda data: data[:-27] + bytes([data[-27] ^ 0xFF]) + data[-26:])),
    ("round = 99", told(names.CONFIG, names.ROUND, 99)),
    ("round = 'one'", told(names.CONFIG, names.ROUND, "one")),
    ("records = 1000000000", told(names.METRICS, names.RECORDS, 10**9)),
    ("records = -60", told(names.METRICS, names.RECORDS, -60)),
    ("records = [60]", told(names.METRICS, names.RECORDS, [60])),
    ("events are malformed", told(names.CONFIG, names.EVENTS, "[" * 100_000)),
    ("events are malformed", told(names.CONFIG, names.EVENTS, b"\xff\xfe")),
    ("another has none", told(names.CONFIG, names.EVENTS, EVENT)),
    ("not an upload", without(names.ARRAYS)),
    ("not an upload", without(names.METRICS)),
    ("not an upload", without(names.CONFIG)),
    ("not an upload", lambda content: RecordDict()),
    (
        "not an upload",
        lambda content: RecordDict({names.ARRAYS: ArrayRecord(), names.CONFIG: ConfigRecord()}),
    ),
    ("not an upload", lambda content: RecordDict({"x": MetricRecord({"y": 1})})),
    ("RuntimeError: xxx", loud),
]


SENT = BAD[::4] + BAD[-1:]  # over a real network; all of it in one process, see tests/faults/test_exchange.py


def plan(client: int, turn: int, cases: Sequence[tuple[str, Change]] = SENT) -> tuple[str, Change]:
    """What a site does in a round."""
    return cases[turn - 1] if client % 2 == 0 else cases[-turn]


def hostile(message: Message, context: Context) -> Message:
    """Answer as one should, then spoil it."""
    reply = app(message, context)
    if message.metadata.message_type != "train":
        return reply
    turn = int(message.content.config_records[names.CONFIG][names.ROUND])  # type: ignore[arg-type]
    from fed_dp.clients.site_file import SiteFile

    client = SiteFile.read(Path(str(context.node_config[names.SITE]))).client
    return Message(plan(client, turn)[1](reply.content), reply_to=message)


def answer(spec: dict[str, Any], seconds: float) -> None:
    supernode._installed = lambda *_: hostile  # type: ignore[assignment]
    HONEST(spec, seconds)


HONEST = supernode.answer
START = subprocess.Popen


def start(command: list[str], *arguments: Any, **options: Any) -> Any:
    return START(
        [part.replace("fed_dp.deploy.supernode", "tests.deploy.hostile") for part in command],
        *arguments,
        **options,
    )


if __name__ == "__main__":
    subprocess.Popen = start  # type: ignore[misc,assignment]
    if sys.argv[1] == "--execute":
        from tests.deploy import hostile as me

        supernode.answer = me.answer
        supernode.execute(*sys.argv[2:6])
    elif Path(sys.argv[1]).is_dir():
        site.serve(Path(sys.argv[1]), print)
    else:
        supernode.serve(Path(sys.argv[1]))
