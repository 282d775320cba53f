"""What is wanted stands on disk: tries that come to nothing, giving up, going on."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fed_dp.accounting import Budget
from fed_dp.deploy import server
from fed_dp.deploy.control import app_bundle
from fed_dp.deploy.provision import Plan, provision
from fed_dp.deploy.run_queue import Request, requests
from fed_dp.deploy.server_app import alone
from fed_dp.deploy.server_file import ServerHome
from fed_dp.errors import DataMissing, EmptyRound, ResumeError, RunError
from fed_dp.experiment import build
from fed_dp.runs.folder import RunFolder
from tests.deploy.federation import with_noise


class Link:
    """A Control API whose runs end as they are told to."""

    def __init__(self) -> None:
        self.started: list[Mapping[str, Any]] = []
        self.active: set[int] = set()

    def start(self, config: Mapping[str, Any]) -> int:
        self.started.append(config)
        self.active.add(len(self.started))
        return len(self.started)

    def stop(self, number: int) -> None:
        self.active.discard(number)

    def running(self, number: int) -> bool:
        return number in self.active


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerHome:
    monkeypatch.setattr(server, "RETRY_DELAY", 0.0)
    provision(tmp_path, Plan(("a", "b", "c"), Budget(1.0)))
    found = ServerHome(tmp_path / "server")
    found.runs.mkdir()
    return found


@pytest.fixture
def request_(home: ServerHome) -> Request:
    return Request.make(home.runs, build(with_noise()))


def look(home: ServerHome, link: Link) -> list[str]:
    said: list[str] = []
    server._see_through(home, link, said.append)  # type: ignore[arg-type]
    return said


def test_a_run_is_tried_until_it_comes_to_nothing_too_often(home: ServerHome, request_: Request) -> None:
    link = Link()
    assert "started" in look(home, link)[0]
    assert look(home, link) == []  # it is running
    assert link.started[0]["run-folder"] == request_.folder.name  # and no path
    for _ in range(home.file.restarts):
        link.active.clear()
        request_.note(EmptyRound("round 1: none of 3 clients uploaded"))
        said = look(home, link)
        assert "stopped after round 0: round 1: none of 3" in said[0]
        assert "started" in said[1]
    link.active.clear()
    request_.note(EmptyRound("round 1: again"))
    assert "given up" in look(home, link)[1]
    assert request_.status == "stopped"
    assert request_.why == "round 1: again"
    assert look(home, link) == []
    request_.again()
    assert "started" in look(home, link)[0]


def test_a_finished_round_makes_good_for_earlier_failures(home: ServerHome, request_: Request) -> None:
    link = Link()
    look(home, link)
    for done in range(1, 3 * home.file.restarts):
        RunFolder(request_.folder).save(done, {"weights": np.zeros(2)})
        link.active.clear()
        assert f"started after round {done}" in look(home, link)[1]
    assert request_.status == "wanted"


def test_what_no_other_try_can_mend_is_given_up_at_once(home: ServerHome, request_: Request) -> None:
    link = Link()
    look(home, link)
    link.active.clear()
    request_.note(DataMissing("test.csv is missing"))
    assert "given up" in look(home, link)[1]
    assert request_.why == "test.csv is missing"


def test_a_killed_server_does_not_count_as_a_failed_try(home: ServerHome, request_: Request) -> None:
    for _ in range(2 * home.file.restarts):
        assert "started" in look(home, Link())[0]
        request_.forget()
    assert request_.status == "wanted"


def test_one_run_at_a_time_the_oldest_first(home: ServerHome, request_: Request) -> None:
    other = Request.make(home.runs, build(with_noise(name="later")))
    link = Link()
    look(home, link)
    look(home, link)
    assert [config["run-folder"] for config in link.started] == [request_.folder.name]
    link.active.clear()
    RunFolder(request_.folder).finish({"done": 1})
    look(home, link)
    assert link.started[-1]["run-folder"] == other.folder.name
    other.withdraw()
    assert [each.status for each in requests(home.runs)] == ["finished", "stopped"]
    assert other.why == "stopped by the operator"


def test_a_run_that_is_stopped_while_it_is_about_to_start_again_stays_stopped(
    home: ServerHome, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link()
    look(home, link)
    link.active.clear()
    monkeypatch.setattr(server.time, "sleep", lambda _: request_.withdraw())
    look(home, link)
    assert len(link.started) == 1
    request_.again()
    start = link.start

    def withdrawn(config: Mapping[str, Any]) -> int:
        number = start(config)
        request_.withdraw()
        return number

    link.start = withdrawn  # type: ignore[method-assign]
    assert look(home, link) == []
    assert not link.active


def test_a_run_whose_experiment_cannot_be_read_is_given_up(home: ServerHome, request_: Request) -> None:
    (request_.folder / "experiment.toml").write_text("rounds = -1")
    link = Link()
    assert "given up" in look(home, link)[0]
    assert request_.status == "stopped"
    assert look(home, link) == []


def test_changes_from_many_sides_are_all_kept(request_: Request) -> None:
    errors = [EmptyRound("x")] * 20

    def work() -> None:
        for error in errors:
            request_.note(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    request_.withdraw()
    for thread in threads:
        thread.join()
    assert request_.status == "stopped"


def test_a_damaged_request_is_named(request_: Request) -> None:
    (request_.folder / "request.json").write_text("{")
    with pytest.raises(ResumeError, match=r"request.json cannot be read"):
        _ = request_.status


def test_two_processes_never_write_one_run_folder(request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fed_dp.deploy.server_app.PATIENCE", 0.3)
    with alone(request_.folder):
        with pytest.raises(RunError, match="in use by another process"):
            with alone(request_.folder):
                pass
    with alone(request_.folder):
        pass


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's
def test_what_is_handed_out_holds_no_code() -> None:
    import io
    import zipfile

    content = app_bundle({"experiment-json": "{}", "run-folder": "x"})
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".py")]
        assert "fed_dp.clients.app:app" in archive.read("pyproject.toml").decode()
