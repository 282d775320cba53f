"""Data sets: known ones by name, a user's own from a folder; and how records are divided."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fed_dp.lazy import exports

if TYPE_CHECKING:
    from fed_dp.data.dataset import DataSet, Records
    from fed_dp.data.files import File, fetch, home
    from fed_dp.data.folder import FolderOptions, has_part, read_folder, read_inputs, read_part
    from fed_dp.data.health import without_influence
    from fed_dp.data.options import Data, read
    from fed_dp.data.public import public_digits

__all__ = [
    "Data",
    "DataSet",
    "File",
    "FolderOptions",
    "Records",
    "fetch",
    "has_part",
    "home",
    "public_digits",
    "read",
    "read_folder",
    "read_inputs",
    "read_part",
    "without_influence",
]
__getattr__ = exports(
    __name__,
    {
        "Data": "options",
        "DataSet": "dataset",
        "File": "files",
        "FolderOptions": "folder",
        "Records": "dataset",
        "fetch": "files",
        "has_part": "folder",
        "home": "files",
        "public_digits": "public",
        "read": "options",
        "read_folder": "folder",
        "read_inputs": "folder",
        "read_part": "folder",
        "without_influence": "health",
    },
)
