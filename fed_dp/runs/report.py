"""report.html: one self-contained page about the runs of a file, drawn from metrics and summaries."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fed_dp.accounting import Statement
from fed_dp.accounting.statement import number
from fed_dp.runs.chart import Chart, Point, Series, to_html
from fed_dp.runs.folder import Line, write_atomically
from fed_dp.runs.groups import Summary, firsts, grouped, spread_of
from fed_dp.runs.page import page
from fed_dp.runs.scores import common, final, leading, scores_of, text
from fed_dp.tasks import Metric

FEW_OWNERS = 12


def cost_text(summary: Summary) -> str:
    """Return a run's privacy in a few words, the total first."""
    cost = summary["privacy"]
    if cost is None:
        return "no privacy"
    total = cost["epsilon_total"]
    return f"ε = {total:,.{0 if total >= 1000 else 2}f}, δ = {cost['delta']:g}, {cost['guarantee']}"


def decided_lines(summary: Summary) -> list[str]:
    """Return what a trainer decided by itself, from public numbers alone."""
    spans = summary.get("decided", {}).items()  # earlier versions wrote none
    return [
        f"{key} = {span['min']:.5g}"
        + (f" to {span['max']:.5g}" if span["max"] > span["min"] else "")
        + ", which public numbers decide ('auto')"
        for key, span in spans
    ]


def traffic_lines(summary: Summary) -> list[str]:
    """Return what is worth telling about messages: faults, staleness, and bytes when they are few."""
    lines = []
    if summary["failures"]:
        kinds = ", ".join(f"{count} × {kind}" for kind, count in summary["failure_kinds"].items())
        lines.append(f"{summary['failures']} client-rounds failed ({kinds}); see metrics.jsonl")
    if summary["repeated"]:
        lines.append(f"{summary['repeated']} repeated or unasked replies were not counted")
    if summary["late"]:
        lines.append(f"{summary['late']} replies had been given up, came after all, and were used")
    if (stale := summary["staleness"]) and stale["max"]:
        lines.append(
            f"an upload was added to a model that had moved on by {stale['mean']:.1f} updates in the mean, "
            f"{stale['max']} at most"
        )
    sent = summary["bytes"]
    if sent["uploaded"] and not sent["bound_uploaded"]:
        lines.append("no upload held a single change: nothing was learnt")
        return lines
    for way in ("uploaded", "downloaded"):
        if 0 < sent[way] < 0.99 * sent["dense"]:
            lines.append(
                f"{way} {sent[way] / 1e6:.2f} MB: {sent[way] / sent['dense']:.3f} of all parameters, "
                f"{sent[way] / sent[f'bound_{way}']:.3f} × the fewest bytes that tell the same"
            )
    return lines


def write_report(
    path: Path, name: str, results: Mapping[str, Summary], lines: Mapping[str, Sequence[Line]]
) -> None:
    """Write the page. Repetitions of a variant are told together."""
    groups = grouped(results)
    repeated = "" if groups.keys() == results.keys() else _repeated(groups)
    lines, results = firsts(lines), firsts(results)
    metric = common(results.values())[0]
    rows = "\n".join(_row(variant, summary, metric) for variant, summary in results.items())
    statements = "\n".join(
        f"<h3>{html.escape(variant)}</h3>{_statement(summary)}"
        for variant, summary in results.items()
        if summary["privacy"] is not None
    )
    traffic = "".join(
        f"<li>{html.escape(variant)}: {html.escape(line)}</li>"
        for variant, summary in results.items()
        for line in (*decided_lines(summary), *traffic_lines(summary))
    )
    first = next(iter(results.values()))
    told = dict.fromkeys(note for summary in results.values() for note in summary["data"]["notes"])
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in told)
    body = f"""<h1>{html.escape(name)}</h1>
<p>Data: {html.escape(first["data"]["name"])}, {first["data"]["train"]:,} training and
{first["data"]["test"]:,} test records, partition {html.escape(first["data"]["partition"])};
model {html.escape(first["model"]["name"])} with {first["model"]["parameters"]:,} parameters.</p>
<ul>{notes}</ul>
{repeated}
<div class="scroll"><table><tr><th>run</th><th>trainer, strategy</th><th>clients</th><th>rounds</th>
<th>{html.escape(metric.label)}</th>
<th>best</th><th>privacy, whole run</th><th>MB up / down</th><th>seconds</th></tr>
{rows}
</table></div>
<ul>{traffic}</ul>
{_by_owner(results)}
{_curves(lines, metric)}
{_by_epsilon(results, metric)}
{_epsilon_by_round(results)}
<h2>What privacy it cost</h2>
{statements or "<p>No run was private.</p>"}
<p><small>Drawn from metrics.jsonl and summary.json beside this page. Experiment digests:
{html.escape(", ".join(f"{v} {s['digest'][:12]}" for v, s in results.items()))}.</small></p>"""
    write_atomically(path, page(name, body).encode())


def _repeated(groups: Mapping[str, Sequence[Summary]]) -> str:
    """Return what repetitions came to: a table and box plots."""
    metric = leading([run for runs in groups.values() for run in runs])
    rows = []
    for group, runs in groups.items():
        told = spread_of(runs)[metric.name]
        low, high = told["interval"] or (None, None)
        numbers = (told["mean"], told["deviation"], low, high, told["least"], told["most"])
        cells = "".join(
            f'<td class="number">{"" if value is None else f"{value:.4f}"}</td>' for value in numbers
        )
        rows.append(f'<tr><td>{html.escape(group)}</td><td class="number">{len(runs)}</td>{cells}</tr>')
    with _figure() as (figure, drawn):
        axes = figure.subplots()
        values = [[final(run, metric) for run in runs] for runs in groups.values()]
        axes.boxplot(values, tick_labels=list(groups))
        axes.tick_params(axis="x", rotation=30 if len(groups) < 9 else 75, labelsize=8)
        axes.set(ylabel=f"test {metric.label}")
        axes.grid(alpha=0.3, axis="y")
    return f"""<h2>Over repetitions: {html.escape(metric.label)}</h2>
<table><tr><th>run</th><th>repetitions</th><th>mean</th><th>deviation</th><th>95 % of the mean, from</th>
<th>to</th><th>least</th><th>most</th></tr>{"".join(rows)}</table>
<p>All other tables and figures show every run by its first repetition.</p>
<figure class="plain">{drawn()}</figure>"""


def _by_owner(results: Mapping[str, Summary]) -> str:
    """Return the scores on each natural client's own test records, where clients are few."""
    told = {variant: found for variant, s in results.items() if (found := few_owners(s))}
    if not told:
        return ""
    metrics = owner_metrics(results.values())
    owners = list(dict.fromkeys(owner for found in told.values() for owner in found))
    heads = "".join(f"<th>{html.escape(owner)}</th>" for owner in owners)
    rows = []
    for variant, found in told.items():
        cells = "".join(
            f'<td class="number">{text(found[owner], metrics)}</td>' if owner in found else "<td></td>"
            for owner in owners
        )
        rows.append(f"<tr><td>{html.escape(variant)}</td>{cells}</tr>")
    title = f"<h2>On each client's own test records: {html.escape(metric_words(metrics))}</h2>"
    return f"{title}<table><tr><th>run</th>{heads}</tr>{''.join(rows)}</table>"


def few_owners(summary: Summary) -> Mapping[str, Mapping[str, float]]:
    """Return the scores of natural clients, where they are few enough to be told one by one."""
    owners: Mapping[str, Mapping[str, float]] = summary.get("by_owner", {})
    return owners if len(owners) <= FEW_OWNERS else {}


def owner_metrics(summaries: Iterable[Summary]) -> list[Metric]:
    """Return the two metrics that each owner is told by: the leading one, and another in brackets."""
    listed = list(summaries)
    first = leading(listed)
    return [first, *(metric for metric in common(listed) if metric != first)][:2]


def metric_words(metrics: Sequence[Metric]) -> str:
    """Return their names as `text` shows their values."""
    return metrics[0].label + "".join(f" ({metric.label})" for metric in metrics[1:])


def _row(variant: str, summary: Summary, metric: Metric) -> str:
    score, sent = scores_of(summary)[metric.name], summary["bytes"]
    cells = [
        f"<td>{html.escape(variant)}</td>",
        f"<td>{html.escape(summary['trainer'])}, {html.escape(summary['strategy'])}</td>",
        f'<td class="number">{summary["clients"]}</td>',
        f'<td class="number">{summary["rounds"]}</td>',
        f'<td class="number">{score["final"]:.4f}</td>',
        f'<td class="number">{score["best"]:.4f}</td>',
        f"<td>{html.escape(cost_text(summary))}</td>",
        f'<td class="number">{sent["uploaded"] / 1e6:.2f} / {sent["downloaded"] / 1e6:.2f}</td>',
        f'<td class="number">{summary["seconds"]["total"]:.1f}</td>',
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _statement(summary: Summary) -> str:
    cost = Statement(**summary["privacy"])
    pairs = {
        "total over the whole run": f"ε = {number(cost.epsilon_total)}, δ = {cost.delta:g}",
        **({"total at δ = 0": f"ε = {number(cost.epsilon_pure)}"} if cost.epsilon_pure is not None else {}),
        "budget of each site": f"ε = {cost.budget_epsilon:,.10g}",
        "parts of it": cost.parts,
        "guarantee": cost.guarantee,
        "unit": f"one {cost.unit}",
        "neighbours": cost.neighbours,
        "scope": cost.scope,
        "noise": cost.noise,
        "why": cost.reason,
        "assumptions": "; ".join(cost.assumptions),
        **({"warnings": "; ".join(cost.warnings)} if cost.warnings else {}),
    }
    rows = "".join(f'<tr><th scope="row">{k}</th><td>{html.escape(v)}</td></tr>' for k, v in pairs.items())
    return f"<table>{rows}</table>"


def _by_epsilon(results: Mapping[str, Summary], metric: Metric) -> str:
    """Return scores by ε, where several runs differ in it: per parameter as papers print it, and in all."""
    groups: dict[str, list[Summary]] = {}
    for summary in results.values():
        if summary["privacy"] is not None:
            groups.setdefault(summary["mechanism"], []).append(summary)
    if max(map(len, groups.values()), default=0) < 2:
        return ""
    printed = any(s["privacy"]["epsilon_per_parameter"] for group in groups.values() for s in group)
    keys = {"epsilon_per_parameter": "ε/c: of one parameter in one round"} if printed else {}
    keys["epsilon_total"] = "ε: of the whole run"
    return "".join(_against(key, label, groups, metric) for key, label in keys.items())


def _against(key: str, label: str, groups: Mapping[str, Sequence[Summary]], metric: Metric) -> str:
    series = []
    for name, group in groups.items():
        known = sorted((s["privacy"][key], final(s, metric)) for s in group if s["privacy"][key])
        series.append(Series(name, tuple(Point(x, y) for x, y in known)))
    title = f"Test {metric.label} by ε{'' if key == 'epsilon_total' else ' of one parameter'}"
    return to_html(
        Chart(
            key.replace("_", "-"),
            title,
            label,
            f"test {metric.label}",
            tuple(series),
            log_x=True,
            from_zero=True,
        )
    )


def _epsilon_by_round(results: Mapping[str, Summary]) -> str:
    """Return what had been spent after each round: flat where a release serves all later rounds."""
    private = {variant: s["epsilon_by_round"] for variant, s in results.items() if s["epsilon_by_round"]}
    if not private:
        return ""
    series = tuple(
        Series(variant, tuple(Point(turn, value) for turn, value in enumerate(spent, 1)))
        for variant, spent in private.items()
    )
    wide = max(map(max, private.values())) > 100
    chart = Chart(
        "epsilon-by-round", "ε by round", "round", "ε spent by the dearest site", series, log_y=wide
    )
    return to_html(chart)


def _curves(lines: Mapping[str, Sequence[Line]], metric: Metric) -> str:
    series = tuple(
        Series(
            variant,
            tuple(Point(line["round"], line[metric.name]) for line in rounds if metric.name in line),
        )
        for variant, rounds in lines.items()
    )
    title, label = f"Test {metric.label} by round", f"test {metric.label}"
    return to_html(Chart("accuracy-by-round", title, "round", label, series, from_zero=metric.within_one))


@contextmanager
def _figure() -> Iterator[tuple[Any, Callable[[], str]]]:
    """Give a figure to draw on; afterwards, the function gives its SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fed_dp", "font.size": 11}):
        figure = Figure(figsize=(9, 4.2), layout="constrained")
        yield figure, lambda: out.getvalue()[out.getvalue().index("<svg") :]
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
