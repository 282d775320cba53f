"""How the documentation site is built: `make docs`."""

from __future__ import annotations

import re
from typing import Any

import fed_dp

project = "fed_dp"
author = "The fed_dp maintainers"
copyright = author
version = release = fed_dp.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"fed_dp {version}"
html_static_path: list[str] = []
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
suppress_warnings = ["myst.xref_missing"]  # links to files of the repository, which are not pages


def _as_written(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Show docstrings line by line, as they are written: they are plain text, not reStructuredText."""
    plain = [re.sub(r"([`*|_\\])", r"\\\1", line) for line in lines]
    lines[:] = [f"| {line}" if line.strip() else "|" for line in plain]


def setup(app: Any) -> None:
    """Register it."""
    app.connect("autodoc-process-docstring", _as_written)
