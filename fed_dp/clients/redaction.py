"""What may be said of an error at a deployed site: no path of its machine, nothing that quotes a record."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from logging import ERROR
from pathlib import Path

from flwr.common.logger import log

from fed_dp.errors import FedDpError, PrivacyError


@contextmanager
def kind_only() -> Iterator[None]:
    """Replace an error by its kind: its words may hold records, and an error reply is sent."""
    try:
        yield
    except PrivacyError:
        raise
    except Exception as error:
        raise PrivacyError(f"training failed ({type(error).__name__}); nothing was sent") from None


@contextmanager
def without_site_paths(known: Sequence[str]) -> Iterator[None]:
    """Send no path of a deployed site's machine with an error; its own log has it in full."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, FedDpError):
            log(ERROR, "%s: %s", type(error).__name__, error)
            raise PrivacyError(f"the site failed ({type(error).__name__}); nothing was sent") from None
        if (redacted := without_paths(str(error), *known)) == str(error):
            raise
        log(ERROR, "%s", error)
        raise type(error)(redacted) from None


def without_paths(text: str, *known: str) -> str:
    """Return a text in which of every absolute path, and of every known one, the last part is left."""
    folders = {
        folder for path in known for folder in (path, str(Path(path).parent), str(Path(path).absolute()))
    }
    for folder in sorted(folders, key=len, reverse=True):
        if len(folder) > 1:
            text = text.replace(f"{folder}/", "").replace(folder, Path(folder).name)
    return re.sub(r"(?<![^\s'\"(=\[])/(?:[^/:;,'\"()\n]+/)*", "", text)
