"""Why nothing of a client was used in a round: a code, by which failures are counted, and a reason."""

from __future__ import annotations

import re
import traceback as tracebacks
from dataclasses import dataclass

from flwr.app import Error

from fed_dp.errors import FedDpError

MAX_REASON = 300  # characters of a site's reason that are kept
MAX_TRACEBACK = 20_000  # characters
_BEGIN = "\n--- traceback of the client ---\n"
NO_REPLY_CODE = "NoReply"
REFUSALS = ("BudgetExceeded", "LedgerFault", "SiteRefused")  # codes of a site that would not, or must not


@dataclass(frozen=True, slots=True)
class Failure:
    """A code (the name of an error class of fed_dp, or one of those below) and the reason."""

    code: str
    reason: str
    traceback: str = ""  # of a simulated client's exception, unless it is one of fed_dp's own

    @classmethod
    def of(cls, error: FedDpError) -> Failure:
        """Return why something that a site sent was not used."""
        return cls(type(error).__name__, str(error))


NO_REPLY = Failure(NO_REPLY_CODE, "no reply in time")
ABSENT = Failure("Absent", "not there when the run began")
OFFLINE = Failure("Offline", "offline")
SILENT = Failure("Silent", "not asked any more, being silent")


def wrapped(error: BaseException) -> str:
    """Return a simulated client's error as Flower sends one: its class, then its words; and its traceback."""
    kind = type(error)
    words = f"<class '{kind.__module__}.{kind.__qualname__}'>:<'{error}'>"
    if isinstance(error, FedDpError):
        return words
    return words + _BEGIN + "".join(tracebacks.format_exception(error))


def failure_of(error: Error) -> Failure:
    """Return why a site sent an error; Flower wraps what an app raised as <class 'x'>:<'why'>."""
    reason, _, traceback = (error.reason or f"error code {error.code}").partition(_BEGIN)
    found = re.fullmatch(r"<class '(.*?)'>:<'(.*)'>", reason, re.DOTALL)
    if found is None:
        return Failure("Error", reason[:MAX_REASON])
    kind, why = found.groups()
    code = kind.rpartition(".")[2]
    own = kind.startswith("fed_dp.")
    return Failure(code, (why if own else f"{code}: {why}")[:MAX_REASON], traceback[:MAX_TRACEBACK])
