"""Data sets: known ones by name, a user's own from a folder; and how records are divided."""

from __future__ import annotations

from pathlib import Path

from fed_dp.data.dataset import DataSet, Records
from fed_dp.data.files import File, fetch, home
from fed_dp.data.folder import FolderOptions, has_part, read_folder, read_inputs, read_part
from fed_dp.data.health import without_influence
from fed_dp.data.public import public_digits
from fed_dp.data.sources import SOURCES, Source

__all__ = [
    "SOURCES",
    "DataSet",
    "File",
    "FolderOptions",
    "Records",
    "Source",
    "fetch",
    "folder_of",
    "has_part",
    "home",
    "public_digits",
    "read",
    "read_folder",
    "read_inputs",
    "read_part",
    "without_influence",
]


def folder_of(name: str, path: Path | None = None) -> Path:
    """Return where the files of a known data set are looked for: `path`, or under the data home."""
    return path if path is not None else home() / SOURCES[name].folder


def read(name: str, path: Path | None = None) -> DataSet:
    """Read a known data set, checking every file against its published checksum."""
    source, folder = SOURCES[name], folder_of(name, path)
    return source.read(folder, source.files(folder))
