"""What demonstrations show: selection alone hides little, noise hides; losses tell who was trained on."""

from __future__ import annotations

from pathlib import Path

from fed_dp.demonstrations.inversion import inversion
from fed_dp.demonstrations.membership import membership


def test_a_tenth_of_the_changes_shows_the_record_and_noise_does_not(tmp_path: Path) -> None:
    near = {row["upload"]: row["|correlation|, median"] for row in inversion("digits", tmp_path / "x.html")}
    assert near["all changes"] > 0.999
    assert near["largest 10 %"] > 0.9
    assert near["largest 1 %"] > 0.3
    [truncated] = [value for name, value in near.items() if "no noise" in name]
    assert truncated > 0.9
    assert all(value < 0.3 for name, value in near.items() if "ε = 8" in name)
    page = (tmp_path / "x.html").read_text()
    assert page.count("data:image/png;base64") == 1
    assert 'alt="Records and what was reconstructed.' in page
    assert "proved, ε = 8" in page


def test_the_loss_tells_who_was_trained_on_where_nothing_is_private(tmp_path: Path) -> None:
    rows = {row["training"]: row for row in membership("digits", tmp_path / "x.html")}
    plain, private = rows["no privacy"], rows["pSGD, ε = 1"]
    assert plain["attack's AUC"] > 0.58
    assert abs(private["attack's AUC"] - 0.5) < 0.07
    assert plain["loss, trained on"] < plain["loss, others"]
    page = (tmp_path / "x.html").read_text()
    assert "false alarms" in page
    assert "no privacy" in page
