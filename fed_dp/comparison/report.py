"""A comparison's report: one page, and the same as CSV, PNG, SVG and JSON; all drawn from comparison.json."""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fed_dp.accounting import Statement
from fed_dp.accounting.statement import number
from fed_dp.audit.finding import row_text
from fed_dp.errors import RunError
from fed_dp.runs.chart import Chart, Point, Series, save, to_html
from fed_dp.runs.folder import write_atomically
from fed_dp.runs.page import page
from fed_dp.tasks import Metric

Outcome = Mapping[str, Any]
Row = Mapping[str, Any]


def write_all(folder: Path, outcome: Outcome) -> None:
    """Write comparison.json, and everything that is drawn from it."""
    try:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        text = json.dumps(outcome, indent=2, allow_nan=False)
        write_atomically(folder / "comparison.json", text.encode() + b"\n")
        write_atomically(folder / "table.csv", _csv(outcome).encode())
        write_atomically(folder / "report.html", _page(outcome, text).encode())
        for chart in charts(outcome):
            save(chart, folder / "figures")
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror}") from None


# ------------------------------------------------------------------------------------ figures


def charts(outcome: Outcome) -> list[Chart]:
    """Return the figures: accuracy against ε and rounds, ε against rounds, and what it takes."""
    metric = Metric(**outcome["metric"])
    score = metric.label
    rows = [row for row in outcome["rows"] if outcome["score"] in row]
    private = [row for row in rows if row["privacy"] is not None]
    levels: list[float] = outcome["epsilons"]
    names = tuple(dict.fromkeys(row["variant"] for row in sorted(rows, key=lambda r: r["epsilon"] is None)))
    top = max(levels)
    dearest = [row for row in rows if row["epsilon"] in (None, top)]
    by_round = Metric(**outcome["by_round"])
    longest = max((row["rounds"] for row in dearest), default=1)
    return [
        Chart(
            "accuracy-by-epsilon",
            f"Test {score} against ε",
            "ε of the whole run",
            f"test {score}",
            (*_by_epsilon(private, outcome["score"]), *_references(rows, outcome["score"])),
            log_x=len(levels) > 1,
            share=metric.within_one,
            x_ticks=tuple(levels),
            names=names,
        ),
        Chart(
            "accuracy-by-round",
            f"Test {by_round.label} against rounds, of a budget of ε = {top:g}",
            "round",
            f"test {by_round.label}",
            tuple(
                Series(row["variant"], tuple(Point(p["round"], p[by_round.name]) for p in row["by_round"]))
                for row in dearest
            ),
            names=names,
        ),
        Chart(
            "epsilon-by-round",
            f"ε against rounds, of a budget of {top:g}: flat where further rounds are free",
            "round",
            "ε spent",
            tuple(_spending(row, longest) for row in dearest if row["epsilon_by_round"]),
            from_zero=True,
            names=names,
        ),
    ]


def _spending(row: Row, longest: int) -> Series:
    """Return what was spent after each round; what is paid once stays as it is, however many follow."""
    points = [Point(server_round, spent) for server_round, spent in enumerate(row["epsilon_by_round"], 1)]
    if row["paid_once"] and points[-1].x < longest:
        points.append(Point(longest, points[-1].y))
    return Series(row["variant"], tuple(points))


def _by_epsilon(rows: Sequence[Row], score: str) -> list[Series]:
    found: dict[str, list[Point]] = {}
    for row in rows:
        interval = row[score]["interval"]
        at = row["privacy"]["epsilon_total"]
        point = Point(at, row[score]["mean"], None if interval is None else (*interval,))
        found.setdefault(row["variant"], []).append(point)
    return [Series(name, tuple(sorted(points, key=lambda p: p.x))) for name, points in found.items()]


def _references(rows: Sequence[Row], score: str) -> list[Series]:
    return [
        Series(row["variant"], (Point(0.0, row[score]["mean"]),), reference=True)
        for row in rows
        if row["privacy"] is None
    ]


# -------------------------------------------------------------------------------------- tables


def _page(outcome: Outcome, text: str) -> str:
    data, rows = outcome["data"], outcome["rows"]
    about = ""
    if data is not None:
        about = (
            f"{html.escape(data['name'])}: {data['train']:,} training records at {data['clients']} sites "
            f"(partition {html.escape(data['partition'])}), {data['test']:,} test records. "
        )
    notes = dict.fromkeys(note for row in rows for note in row.get("notes", ()))
    listed = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    body = f"""<h1>Which mechanism, at which ε: {html.escape(outcome["name"])}</h1>
<p>{about}{len(outcome["seeds"])} seed{"s" if len(outcome["seeds"]) > 1 else ""} each; pSGD is the baseline.
ε is always the total of the whole run.</p>
<ul>{listed}</ul>
{_warnings(rows)}
{"".join(to_html(chart) for chart in charts(outcome))}
{_table(outcome)}
{_costs(outcome)}
{_guarantees(rows)}
{_audits(rows)}
<h2>To reproduce it</h2>
<pre>{html.escape(outcome["command"])}</pre>
<p>{html.escape(", ".join(f"{name} {version}" for name, version in outcome["versions"].items()))}</p>
<details><summary>The exact experiments</summary>
<pre>{html.escape(json.dumps(outcome["experiments"], indent=1))}</pre></details>
<p><small>Drawn from comparison.json, which is also within this page; table.csv and figures/ beside it have
the same numbers. Intervals are 95 % of the mean over seeds (Student's t). p: paired t-test against pSGD at
the same ε, seed by seed, adjusted for the number of tests (Holm).</small></p>"""
    return page(f"Comparison: {outcome['name']}", body, data=text)


def _warnings(rows: Sequence[Row]) -> str:
    found = []
    weak = sorted({(r["variant"], r["privacy"]["guarantee"]) for r in rows if r.get("privacy")})
    for variant, status in weak:
        if status != "proved":
            found.append(f"{variant}: its guarantee is {status}, not proved; see below")
    found += [
        f"{row['variant']}, ε = {row['epsilon']}: seed {seed} failed: {why}"
        for row in rows
        for seed, why in row["failures"].items()
    ]
    if any(r.get("privacy") and r["privacy"]["noise_source"] == "simulation" for r in rows):
        found.append("Noise is seeded and in floating point: for research, not for protecting anyone.")
    units = {(r["privacy"]["unit"], r["privacy"]["neighbours"]) for r in rows if r.get("privacy")}
    if len(units) > 1:
        told = "; ".join(f"one {unit}, {neighbours}" for unit, neighbours in sorted(units))
        found.append(f"Rows protect different things ({told}): the same ε is not the same promise.")
    each = "".join(f"<li>{html.escape(line)}</li>" for line in found)
    return f'<div class="banner" role="note"><ul>{each}</ul></div>' if found else ""


def _number(value: float | None, digits: int = 4) -> str:
    """Return a cell that shows a rounded number and holds the exact one."""
    if value is None:
        return "<td></td>"
    return f'<td class="number" data-value="{value!r}">{value:.{digits}f}</td>'


def _scrolled(caption: str, heads: Sequence[str], rows: Sequence[str], key: str) -> str:
    top = "".join(f'<th scope="col">{head}</th>' for head in heads)
    return f"""<h2 id="{key}-title">{caption}</h2>
<div class="scroll" tabindex="0" role="region" aria-labelledby="{key}-title"><table id="{key}">
<thead><tr>{top}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>"""


def _name(row: Row) -> str:
    return f'<th scope="row">{html.escape(row["variant"])}</th>'


def _line(outcome: Outcome, row: Row, cells: Sequence[str]) -> str:
    base = ' class="base"' if row["variant"] == outcome["baseline"] else ""
    key = "none" if row["epsilon"] is None else f"{row['epsilon']:g}"
    name = html.escape(row["variant"])
    return f'<tr{base} data-variant="{name}" data-epsilon="{key}">{_name(row)}{"".join(cells)}</tr>'


def _table(outcome: Outcome) -> str:
    """Return scores and guarantees, one row for each mechanism and ε; the total ε first."""
    score, rows = outcome["score"], []
    for row in sorted(outcome["rows"], key=lambda r: (r["epsilon"] is not None, r["epsilon"] or 0)):
        if score not in row:
            continue
        cost, told, against = row["privacy"], row[score], row.get("against_baseline")
        low, high = told["interval"] or (None, None)
        if cost is None:
            private = '<td class="number">∞</td><td colspan="4">no privacy</td>'
        else:
            status = cost["guarantee"]
            audit = row_text(row["audit"], delta=cost["delta"]) if row.get("audit") else "not audited"
            private = (
                f"{_number(cost['epsilon_total'], 3)}"
                f'<td><span class="{status}">{status}</span></td>'
                f"<td>one {html.escape(cost['unit'])}</td><td>{html.escape(cost['neighbours'])}, δ = "
                f"{cost['delta']:g}</td><td>{html.escape(audit)}</td>"
            )
        found = against or {"difference": None, "p_adjusted": None}
        rows.append(
            _line(
                outcome,
                row,
                [
                    private,
                    _number(told["mean"]),
                    _number(low),
                    _number(high),
                    _number(found["difference"]),
                    _number(found["p_adjusted"], 3),
                ],
            )
        )
    heads = (
        "mechanism", "total ε", "guarantee", "unit", "neighbours", "audit: ε", outcome["metric"]["label"],
        "from", "to", "less pSGD", "p",
    )  # fmt: skip
    return _scrolled("Every mechanism at every ε", heads, rows, "scores")


def _costs(outcome: Outcome) -> str:
    rows = [
        _line(
            outcome,
            row,
            [
                _number(row["epsilon"], 3),
                f"<td>{html.escape(row['trainer'])}, {html.escape(row['strategy'])}, "
                f"{html.escape(row['model']['name'])}</td>",
                _number(row["rounds"], 0),
                _number(row["bytes"]["uploaded"] / 1e6, 3),
                _number(row["bytes"]["downloaded"] / 1e6, 3),
                _number(row["seconds"], 1),
            ],
        )
        for row in outcome["rows"]
        if "bytes" in row
    ]
    heads = ("mechanism", "ε", "trainer, strategy, network", "rounds", "MB up", "MB down", "seconds")
    return _scrolled("What a run takes: all clients together, on one core", heads, rows, "costs")


def _guarantees(rows: Sequence[Row]) -> str:
    """Return what stands behind each mechanism, once."""
    found: dict[str, Any] = {}
    for row in sorted(rows, key=lambda r: r["epsilon"] or 0):
        if row.get("privacy"):
            found[row["variant"]] = row
    parts = []
    for variant, row in found.items():
        cost = Statement(**row["privacy"])
        lines = {
            "total": f"ε = {number(cost.epsilon_total)}, δ = {cost.delta:g} (at the largest ε here)",
            "guarantee": cost.guarantee,
            "protects": f"one {cost.unit}; neighbours: {cost.neighbours}",
            "scope": cost.scope,
            "parts of it": cost.parts,
            "why": cost.reason,
            "assumed": "; ".join(cost.assumptions),
            **({"warnings": "; ".join(cost.warnings)} if cost.warnings else {}),
        }
        cells = "".join(
            f'<tr><th scope="row">{key}</th><td>{html.escape(value)}</td></tr>'
            for key, value in lines.items()
        )
        summary = f"{html.escape(variant)}: {cost.guarantee}"
        parts.append(f"<details><summary>{summary}</summary><table>{cells}</table></details>")
    return f"<h2>What stands behind each ε</h2>{''.join(parts)}" if parts else ""


def _audits(rows: Sequence[Row]) -> str:
    listed = []
    for row in rows:
        if audit := row.get("audit"):
            where = f"{row['variant']}, ε = {row['epsilon']:g}"
            told = row_text(audit, delta=row["privacy"]["delta"])
            told = f"{where}: {told}. {audit['subject']}; {audit['attack']}"
            listed.append(f"<li>{html.escape(told)}</li>")
    if not listed:
        return ""
    return f"""<h2>Audits</h2><p>Lower bounds on what is really lost, by attacks of our own. A bound above the
stated ε refutes it in this configuration; a bound below it proves nothing.</p><ul>{"".join(listed)}</ul>"""


def _csv(outcome: Outcome) -> str:
    """Return the main table, one line for each mechanism and ε."""
    out, score = io.StringIO(), outcome["score"]
    heads = (
        "mechanism", "epsilon", "epsilon_total", "delta", "guarantee", "unit", "neighbours", "audit_epsilon",
        "audit_claim", "audit_delta", "audit_verdict", "score", "mean", "low", "high", "deviation", "runs",
        "less_psgd", "p", "p_adjusted", "rounds", "bytes_uploaded", "bytes_downloaded", "seconds",
    )  # fmt: skip
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(heads)
    for row in outcome["rows"]:
        if score not in row:
            continue
        cost, told, audit = row["privacy"] or {}, row[score], row.get("audit") or {}
        against = row.get("against_baseline") or {}
        low, high = told["interval"] or (None, None)
        audited = [audit.get(key) for key in ("bound", "claim", "delta", "verdict")]
        writer.writerow(
            [
                row["variant"], row["epsilon"], cost.get("epsilon_total"), cost.get("delta"),
                cost.get("guarantee", "none"), cost.get("unit"), cost.get("neighbours"), *audited, score,
                told["mean"], low, high, told["deviation"], len(told["by_seed"]), against.get("difference"),
                against.get("p"), against.get("p_adjusted"), row["rounds"], row["bytes"]["uploaded"],
                row["bytes"]["downloaded"], row["seconds"],
            ]
        )  # fmt: skip
    return out.getvalue()
