"""Files of a data set: where they are looked for, what they must be, how they are fetched."""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from fed_dp.errors import DataCorrupt, DataError, DataMissing


@dataclass(frozen=True, slots=True)
class File:
    """One file: its name, the SHA-256 of its bytes (None: not published), its public home."""

    name: str
    sha256: str | None
    url: str | None = None


def home() -> Path:
    """Return the folder of all data sets: FED_DP_DATA, or the user's cache folder."""
    chosen = os.environ.get("FED_DP_DATA")
    return Path(chosen) if chosen else platformdirs.user_cache_path("fed_dp") / "data"


def verified(folder: Path, file: File) -> Path:
    """Return the file's path after checking that it is there and whole.

    Raises DataMissing or DataCorrupt, each naming the file and what was expected.
    """
    path = Path(os.path.normpath(folder / file.name))
    if not path.is_file():
        raise DataMissing(
            f"{path} is missing: set FED_DP_DATA to the folder of the data sets, or put the file there"
            + (f" (from {file.url})" if file.url else "")
        )
    if file.sha256 is not None and (found := _digest(path)) != file.sha256:
        raise DataCorrupt(
            f"{path} is not the published file: sha256 {found[:16]}… ({path.stat().st_size} bytes), "
            f"expected {file.sha256[:16]}…; it may be truncated: delete and fetch it again"
        )
    return path


def fetch(
    folder: Path, file: File, *, mirror: str | None = None, report: Callable[[str], None] = print
) -> Path:
    """Download a file unless a good copy is there; it appears whole and checked, or not at all."""
    path = Path(os.path.normpath(folder / file.name))
    if path.is_file():
        report(f"{path}: already there")
        return verified(folder, file)
    url = f"{mirror.rstrip('/')}/{path.name}" if mirror else file.url
    if url is None or file.sha256 is None:
        raise DataError(f"{file.name} has no direct download: put it at {path}")
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        with os.fdopen(handle, "wb") as out, urllib.request.urlopen(url, timeout=30) as source:
            while block := source.read(1 << 20):
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
        if (found := _digest(temporary)) != file.sha256:
            raise DataCorrupt(f"{url}: sha256 {found[:16]}…, expected {file.sha256[:16]}…; nothing was kept")
        temporary.replace(path)
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(
            f"cannot fetch {url} ({reason}): download it elsewhere and put it at {path}"
        ) from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    report(f"{path}: fetched, {path.stat().st_size} bytes, checksum good")
    return path


def _digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
