"""Line charts: one description, drawn as SVG within a page, or as files for a paper.

In a page, colours follow the reader's light or dark setting, every point tells its values, and series are
told apart by marker and dash as well as by colour. The page's script (page.py) lets series be hidden.
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 12, 46
COLOURS = 10  # of the page's style; series beyond begin again
DASHES = ("", "7 3", "2 3", "9 3 2 3")
MARKERS = ("circle", "square", "diamond", "triangle")


@dataclass(frozen=True, slots=True)
class Point:
    """A point, with the interval of its y where there is one."""

    x: float
    y: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Points under a name. A `reference` is a level: it has one y, over the whole width."""

    name: str
    points: tuple[Point, ...]
    reference: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn."""

    key: str  # of files and of the page's elements
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = False
    share: bool = False  # y is a share: the axis ends at 0 and 1, wherever intervals do
    x_ticks: tuple[float, ...] = ()
    names: tuple[str, ...] = ()  # of series, in the order of the palette, where several figures share it

    @property
    def colours(self) -> dict[str, int]:
        """Each series' place in the palette."""
        names = self.names or tuple(series.name for series in self.series)
        return {name: place for place, name in enumerate(names)}


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    start: float
    end: float
    log: bool

    def place(self, value: float) -> float:
        low, high = _scaled(self.low, self.log), _scaled(self.high, self.log)
        share = (_scaled(value, self.log) - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def _scaled(value: float, log: bool) -> float:
    return math.log10(max(value, 1e-300)) if log else value


def _axis(values: Sequence[float], start: float, end: float, *, log: bool, from_zero: bool = False) -> _Axis:
    low, high = min(values), max(values)
    if log:
        return _Axis(low / 1.25, high * 1.25, start, end, log)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return _Axis(min(0.0, low) if from_zero else low - room, high + room, start, end, log)


def ticks(low: float, high: float, *, log: bool = False, most: int = 7) -> list[float]:
    """Return round numbers within a range."""
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps: Sequence[int] = (1, 2, 5) if high / low < 1e3 else (1,)
        return [found for p in powers for s in steps if low <= (found := s * 10.0**p) <= high]
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(step * i, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def to_html(chart: Chart) -> str:
    """Return the chart as part of a page: legend, drawing, and its numbers as a table."""
    series = [each for each in chart.series if each.points]
    if not series:
        return ""
    label = html.escape(chart.title)
    legend = "".join(_legend(chart, each) for each in series)
    key = html.escape(chart.key)
    return f"""<figure class="chart" id="{key}"><figcaption><h2>{label}</h2></figcaption>
<div class="legend" role="group" aria-label="Show or hide series">{legend}</div>
<div class="drawing">{_drawing(chart, series)}</div>
<details><summary>Numbers of this figure</summary>{_table(chart, series)}</details></figure>
"""


def _legend(chart: Chart, series: Series) -> str:
    place = chart.colours[series.name]
    sample = (
        f'<svg width="26" height="12" aria-hidden="true">{_line([(1.0, 6.0), (25.0, 6.0)], place, series)}'
    )
    marker = "" if series.reference else _marker(13, 6, place)
    name = html.escape(series.name)
    state = f'type="button" aria-pressed="true" data-series="{place}"'
    return f"<button {state}>{sample}{marker}</svg>{name}</button>"


def _drawing(chart: Chart, series: Sequence[Series]) -> str:
    points = [point for each in series for point in each.points]
    free = [point for each in series if not each.reference for point in each.points] or points
    edges = [edge for point in points for edge in (point.interval or (point.y,))] + [p.y for p in points]
    if chart.log_y:
        edges = [edge for edge in edges if edge > 0] or [1.0]
    if chart.share:
        edges = [min(max(edge, 0.0), 1.0) for edge in edges]
    x = _axis([p.x for p in free], LEFT, WIDTH - RIGHT, log=chart.log_x)
    y = _axis(edges, HEIGHT - BOTTOM, TOP, log=chart.log_y, from_zero=chart.from_zero)
    parts = [_grid(chart, x, y)]
    for each in series:
        parts.append(_series(chart, each, x, y))
    told = html.escape(_told(chart, series))
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0"'
    return f'<svg {box} aria-label="{told}">{"".join(parts)}</svg>'


def _told(chart: Chart, series: Sequence[Series]) -> str:
    """Return the figure in words, for those who do not see it."""
    each = "; ".join(
        f"{one.name} {one.points[0].y:.4g}"
        + ("" if one.reference or len(one.points) == 1 else f" to {one.points[-1].y:.4g}")
        for one in series
    )
    return f"{chart.title}: {chart.y_label} against {chart.x_label}. {each}. Arrow keys read the points."


def _grid(chart: Chart, x: _Axis, y: _Axis) -> str:
    parts = []
    for value in chart.x_ticks or ticks(x.low, x.high, log=x.log):
        at = x.place(value)
        parts.append(f'<path class="grid" d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    for value in ticks(y.low, y.high, log=y.log):
        at = y.place(value)
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(chart.x_label)}</text>'
    )
    across = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text transform="translate(14 {across:.0f}) rotate(-90)" text-anchor="middle">'
        f"{html.escape(chart.y_label)}</text>"
    )
    return "".join(parts)


def _series(chart: Chart, series: Series, x: _Axis, y: _Axis) -> str:
    place = chart.colours[series.name]
    points = [p for p in series.points if p.y > 0 or not chart.log_y]
    if series.reference:
        at = y.place(points[0].y)
        body = _line([(LEFT, at), (WIDTH - RIGHT, at)], place, series)
        body += _dot(chart, series, points[0], WIDTH - RIGHT - 6 - 12 * (place % 4), at, place)
        return f'<g class="s{place % COLOURS}" data-series="{place}">{body}</g>'
    placed = [(x.place(p.x), y.place(p.y)) for p in points]
    body = _line(placed, place, series) if len(placed) > 1 else ""
    for point, (left, top) in zip(points, placed, strict=True):
        if point.interval is not None:
            low, high = (y.place(min(max(edge, y.low), y.high)) for edge in point.interval)
            body += (
                f'<path class="interval" d="M{left:.1f} {low:.1f}V{high:.1f}M{left - 4:.1f} {low:.1f}h8'
                f'M{left - 4:.1f} {high:.1f}h8"/>'
            )
        body += _dot(chart, series, point, left, top, place)
    return f'<g class="s{place % COLOURS}" data-series="{place}">{body}</g>'


def _dot(chart: Chart, series: Series, point: Point, left: float, top: float, place: int) -> str:
    """Return a marker that tells its values, exactly as they came."""
    apart = (
        ""
        if point.interval is None
        else f", 95 % of the mean: {point.interval[0]:.4f} to {point.interval[1]:.4f}"
    )
    where = "" if series.reference else f", {chart.x_label} {point.x:g}"
    tip = html.escape(f"{series.name}{where}: {point.y:.4g}{apart}")
    marker = (
        f'<circle class="level" cx="{left:.1f}" cy="{top:.1f}" r="3"/>'
        if series.reference
        else _marker(left, top, place)
    )
    return (
        f'<g class="point" data-x="{point.x!r}" data-y="{point.y!r}" data-name="{html.escape(series.name)}" '
        f'data-tip="{tip}"><circle class="reach" cx="{left:.1f}" cy="{top:.1f}" r="11"/>{marker}</g>'
    )


def _line(points: Sequence[tuple[float, float]], place: int, series: Series) -> str:
    dash = "1 4" if series.reference else DASHES[place // COLOURS % len(DASHES)]
    style = f' stroke-dasharray="{dash}"' if dash else ""
    path = "M" + "L".join(f"{left:.1f} {top:.1f}" for left, top in points)
    return f'<path class="line s{place % COLOURS}"{style} d="{path}"/>'


def _marker(left: float, top: float, place: int) -> str:
    kind, colour = MARKERS[place % len(MARKERS)], f'class="marker s{place % COLOURS}"'
    if kind == "circle":
        return f'<circle {colour} cx="{left:.1f}" cy="{top:.1f}" r="4"/>'
    paths = {
        "square": "m-3.5 -3.5h7v7h-7z",
        "diamond": "m0 -5l5 5l-5 5l-5 -5z",
        "triangle": "m0 -5l4.5 8.5h-9z",
    }
    return f'<path {colour} d="M{left:.1f} {top:.1f}{paths[kind]}"/>'


def _table(chart: Chart, series: Sequence[Series]) -> str:
    rows = []
    for each in series:
        for point in each.points:
            low, high = point.interval or ("", "")
            cells = [each.name, "" if each.reference else point.x, point.y, low, high]
            rows.append(
                "<tr>"
                + "".join(
                    f"<td>{html.escape(cell)}</td>"
                    if isinstance(cell, str)
                    else f'<td class="number" data-value="{cell!r}">{cell:.6g}</td>'
                    for cell in cells
                )
                + "</tr>"
            )
    heads = "".join(
        f'<th scope="col">{html.escape(head)}</th>'
        for head in ("series", chart.x_label, chart.y_label, "from", "to")
    )
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def save(chart: Chart, folder: Path) -> list[Path]:
    """Write the chart as SVG and PNG files."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    markers = {"circle": "o", "square": "s", "diamond": "D", "triangle": "^"}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fed_dp", "font.size": 11}):
        figure = Figure(figsize=(9, 4.6), layout="constrained")
        axes = figure.subplots()
        for series in chart.series:
            place = chart.colours[series.name]
            colour, style = f"C{place % 10}", ("-", "--", ":", "-.")[place // 10 % 4]
            if series.reference and series.points:
                axes.axhline(series.points[0].y, linestyle=":", color=colour, label=series.name)
            elif series.points:
                x, y = [p.x for p in series.points], [p.y for p in series.points]
                marker = markers[MARKERS[place % len(MARKERS)]]
                axes.plot(x, y, style, marker=marker, markersize=4, color=colour, label=series.name)
                there = [p for p in series.points if p.interval is not None]
                if there:
                    low, high = zip(*(p.interval for p in there if p.interval), strict=True)
                    axes.vlines([p.x for p in there], low, high, color=colour, linewidth=1)
        axes.set(
            xlabel=chart.x_label,
            ylabel=chart.y_label,
            title=chart.title,
            xscale="log" if chart.log_x else "linear",
            yscale="log" if chart.log_y else "linear",
        )
        if chart.x_ticks:
            axes.set_xticks(chart.x_ticks, [f"{tick:g}" for tick in chart.x_ticks], minor=False)
            axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, ncols=1 + len(chart.series) // 12)
        written = []
        for kind in ("svg", "png"):
            out = io.BytesIO()
            figure.savefig(
                out,
                format=kind,
                dpi=150,
                metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")) if kind == "svg" else None,
            )
            path = folder / f"{chart.key}.{kind}"
            path.write_bytes(out.getvalue())
            written.append(path)
    return written
