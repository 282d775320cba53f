"""Charts: round ticks, exact values, something for those who do not see them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fed_dp.runs.chart import Chart, Point, Series, save, ticks, to_html
from fed_dp.runs.page import page

CHART = Chart(
    "a-chart",
    "A <chart> & more",
    "x",
    "y",
    (
        Series("one & only", (Point(0.5, 0.1, (0.05, 0.2)), Point(8.0, 0.123456789))),
        Series("level", (Point(0.0, 0.9),), reference=True),
        Series("empty", ()),
    ),
    log_x=True,
    share=True,
    x_ticks=(0.5, 8.0),
)


def test_a_chart_is_well_formed_and_holds_its_values_exactly() -> None:
    root = ElementTree.fromstring(to_html(CHART))
    points = [e for e in root.iter() if e.get("class") == "point"]
    assert [(p.get("data-name"), float(p.get("data-y") or "")) for p in points] == [
        ("one & only", 0.1),
        ("one & only", 0.123456789),
        ("level", 0.9),
    ]
    assert "95 % of the mean: 0.0500 to 0.2000" in (points[0].get("data-tip") or "")
    drawing = next(e for e in root.iter() if e.get("role") == "img")
    assert "A <chart> & more: y against x. one & only 0.1 to 0.1235; level 0.9" in (
        drawing.get("aria-label") or ""
    )
    assert len([e for e in root.iter("button")]) == 2
    assert len([e for e in root.iter("td")]) == 15
    assert to_html(Chart("none", "t", "x", "y", (Series("empty", ()),))) == ""


def test_files_are_written_and_the_same_again(tmp_path: Path) -> None:
    written = save(CHART, tmp_path)
    assert [path.name for path in written] == ["a-chart.svg", "a-chart.png"]
    before = [path.read_bytes() for path in written]
    save(CHART, tmp_path)
    assert [path.read_bytes() for path in written] == before
    assert before[1].startswith(b"\x89PNG")


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_lie_within_and_are_few(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert 2 <= len(found) <= 9
    assert all(low - 1e-6 * width <= tick <= low + width * (1 + 1e-6) for tick in found)


def test_ticks_of_logarithms() -> None:
    assert ticks(0.4, 10, log=True) == pytest.approx([0.5, 1, 2, 5, 10])
    assert ticks(1, 1e6, log=True) == pytest.approx([10.0**p for p in range(7)])


def test_no_text_of_the_data_ends_a_page() -> None:
    made = page("t", "<p>b</p>", data='{"x": "</script><script>alert(1)</script>"}')
    assert "</script><script>alert" not in made
    assert made.count("</script>") == 2
    for outside in ("http://", "https://", "src="):
        assert outside not in made
