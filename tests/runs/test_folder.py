from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fed_dp.errors import ResumeError, RunError
from fed_dp.runs.folder import RunFolder, new_path
from tests.conftest import small


def test_a_folder_knows_its_experiment_and_refuses_another(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", small())
    assert folder.experiment() == small()
    assert small().digest in (folder.path / "experiment.toml").read_text()
    assert RunFolder.open(folder.path, small()).path == folder.path
    with pytest.raises(ResumeError, match="made by another experiment"):
        RunFolder.open(folder.path, small(seed=99))
    with pytest.raises(ResumeError, match="not a run folder"):
        RunFolder.open(tmp_path, small())


def test_a_folder_whose_experiment_was_never_written_is_used_again_and_no_other_is(tmp_path: Path) -> None:
    (tmp_path / "stopped" / "checkpoint").mkdir(parents=True)
    (tmp_path / "stopped" / "experiment.toml.part").write_text("half")
    assert RunFolder.create(tmp_path / "stopped", small()).experiment() == small()
    with pytest.raises(RunError, match="File exists"):
        RunFolder.create(tmp_path / "stopped", small())
    for number, name in enumerate(("notes.txt", "checkpoint/server-000001.npz")):
        folder = tmp_path / str(number)
        (folder / "checkpoint").mkdir(parents=True)
        (folder / name).write_text("something")
        with pytest.raises(RunError, match="File exists"):
            RunFolder.create(folder, small())


def test_lines_survive_a_crash_in_the_middle_of_a_line(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", small())
    for turn in (1, 2, 3):
        folder.append({"round": turn, "events": "[]"})
    with (folder.path / "metrics.jsonl").open("a") as out:
        out.write('{"round": 4, "acc')
    assert [line["round"] for line in folder.lines()] == [1, 2, 3]
    assert [line["round"] for line in folder.rewind(2)] == [1, 2]
    assert (folder.path / "metrics.jsonl").read_text().count("\n") == 2


def test_the_last_checkpoint_is_kept_and_a_damaged_one_is_told(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", small())
    assert folder.latest() is None
    (folder.path / "checkpoint" / "server-000001.npz.part").write_bytes(b"left by a crash")
    for done in (1, 2):
        (folder.path / "checkpoint" / f"clients-{done:06d}.pickle").write_bytes(b"")
        folder.save(done, {"weights": np.full(3, done)})
    found = folder.latest()
    assert found is not None
    assert found[0] == 2
    assert found[1]["weights"].tolist() == [2, 2, 2]
    names = sorted(p.name for p in (folder.path / "checkpoint").iterdir())
    assert names == ["clients-000002.pickle", "server-000002.npz"]
    path = folder.path / "checkpoint" / "server-000002.npz"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ResumeError, match=r"server-000002\.npz is damaged"):
        folder.latest()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        RunFolder.create(tmp_path / "file" / "run", small())


def test_two_runs_in_one_second_get_two_names(tmp_path: Path) -> None:
    first = new_path(tmp_path, "x")
    first.mkdir()
    assert new_path(tmp_path, "x") != first


def test_the_summary_marks_a_finished_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", small())
    assert not folder.finished
    folder.finish({"a": 1})
    assert folder.finished
    assert json.loads((folder.path / "summary.json").read_text()) == {"a": 1}
