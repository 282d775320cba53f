"""Pages of demonstrations: images in rows, within the page."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fed_dp.errors import ConfigError
from fed_dp.experiment import Experiment, build
from fed_dp.runs.page import page

Image = NDArray[np.floating[Any]]


def experiment_on(data: str, tables: Mapping[str, Any]) -> Experiment:
    """Return a small experiment on images of digits."""
    if data not in ("digits", "mnist"):
        raise ConfigError(f"--data = {data!r}: expected 'digits' or 'mnist'")
    return build({"data": {"name": data}, **tables}, where="demo")


def grid(rows: Mapping[str, Sequence[Image]], *, alt: str) -> str:
    """Return rows of images, each row under its name, as one picture with a text in its place."""
    from matplotlib.figure import Figure

    columns = max(map(len, rows.values()))
    figure = Figure(figsize=(1.1 * columns + 3.4, 1.15 * len(rows)), layout="constrained")
    cells = figure.subplots(len(rows), columns, squeeze=False)
    for line, (name, images) in zip(cells, rows.items(), strict=True):
        for cell, image in zip(line, images, strict=True):
            cell.imshow(image, cmap="gray")
            cell.set(xticks=[], yticks=[])
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=11)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=100)
    data = base64.b64encode(out.getvalue()).decode()
    return f'<figure class="plain"><img alt="{html.escape(alt)}" src="data:image/png;base64,{data}"></figure>'


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as a table; numbers hold their exact values."""
    heads = "".join(f'<th scope="col">{html.escape(key)}</th>' for key in rows[0])
    lines = []
    for row in rows:
        cells = "".join(
            f'<td class="number" data-value="{value!r}">{value:.3f}</td>'
            if isinstance(value, float)
            else f"<td>{html.escape(str(value))}</td>"
            for value in row.values()
        )
        lines.append(f"<tr>{cells}</tr>")
    return f'<div class="scroll"><table><tr>{heads}</tr>{"".join(lines)}</table></div>'


def write(out: Path, title: str, body: str) -> None:
    """Write the page."""
    try:
        out.write_text(page(title, body), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {str(out)!r} cannot be written: {error.strerror}") from None
