"""Whole runs of the functional mechanism: sites add up to one, rounds are free, papers are told apart."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fed_dp.accounting import Ledger
from fed_dp.clients import app as client_app
from fed_dp.clients.building import make_trainer
from fed_dp.clients.ledger_session import VirtualLedgerSession
from fed_dp.experiment import Experiment, build, to_run_config
from fed_dp.experiment.federation import make_federation
from fed_dp.models import Encoded
from fed_dp.runs.folder import LEDGERS, RunFolder
from fed_dp.server.app import PlainLines
from fed_dp.server.observers import Silent
from fed_dp.server.rounds import run_rounds
from fed_dp.simulations.grid import InProcessGrid
from fed_dp.simulations.runner import simulate
from fed_dp.simulations.study import run_study
from tests.clients.test_statistics import MODELS, experiment
from tests.conftest import private_selection, small, some
from tests.simulations.test_simulate import StopAfter, run, weights


def exact(model: str, **changes: Any) -> Experiment:
    trainer = {**MODELS[model]["trainer"], "perturb": False}
    defaults = {"trainer": trainer, "privacy": {}, "strategy": "statistics"}
    return experiment(model, **{**defaults, **changes})


@pytest.mark.parametrize("model", MODELS)
def test_without_noise_many_sites_are_one(model: str, tmp_path: Path) -> None:
    found = []
    for count in (1, 4):
        path, summary = run(exact(model, clients={"count": count}), tmp_path / str(count))
        latest = RunFolder(path).latest()
        assert latest is not None
        found.append((latest[1]["weights"], summary["accuracy"]["final"]))
    (one, accuracy), (four, same) = found
    assert np.abs(one - four).max() < 2e-3 * np.abs(one).max()
    assert abs(accuracy - same) < 0.01
    assert accuracy > 0.85


@pytest.mark.parametrize("model", MODELS)
def test_a_private_run_is_private_as_stated_and_learns(model: str, tmp_path: Path) -> None:
    path, summary = run(experiment(model, strategy={"name": "statistics"}), tmp_path)
    cost = summary["privacy"]
    assert cost["guarantee"] == "proved"
    assert (cost["unit"], cost["neighbours"]) == ("record", "zero-out one")
    assert 3.99 < cost["epsilon_total"] <= 4.0
    stages = len(Ledger(path / LEDGERS, "client-0000").read()[1])
    assert (cost["rounds_free"], cost["rounds"]) == (4 - stages, 4)
    assert summary["accuracy"]["final"] > 0.4
    lines = RunFolder(path).lines()
    assert [line["clients"]["asked"] for line in lines] == [4] * stages + [0] * (4 - stages)


@pytest.mark.parametrize(
    ("trainer", "model"),
    [
        ("dpa", {"name": "private-pca", "components": 12, "features": 40, "layers": 2}),
        ("pcdbn", {"name": "patch-filters", "filters": 4, "components": 16, "layers": 2}),
    ],
)
def test_another_layer_is_another_stage_with_its_share(
    trainer: str, model: dict[str, Any], tmp_path: Path
) -> None:
    privacy = {"budget_epsilon": 4.0, "delta": 1e-5}
    tables = {"model": model, "trainer": {"name": trainer}, "strategy": {"name": "statistics"}}
    given = build({"seed": 3, "rounds": 5, "clients": {"count": 4}, "privacy": privacy, **tables})
    _, summary = run(given, tmp_path)
    stages = given.model.stages
    assert stages == (3 if trainer == "dpa" else 4)
    spent = summary["epsilon_by_round"]
    assert all(b > a for a, b in pairwise(spent[:stages]))
    assert spent[-1] == pytest.approx(4.0)
    assert summary["privacy"]["epsilon_total"] <= 4.0
    assert summary["accuracy"]["final"] > 0.3


@pytest.mark.parametrize("strategy", [{"name": "averaging"}, {"name": "dssgd", "upload_fraction": 0.5}])
def test_epsilon_stays_flat_over_free_rounds_while_that_of_others_grows(
    strategy: dict[str, Any], tmp_path: Path
) -> None:
    def spent(given: Experiment) -> list[float]:
        path, summary = run_study(
            given.name, {"x": given}, observe=Silent, engine="in-process", root=tmp_path / given.trainer.name
        )
        assert "<h2>ε by round</h2>" in (path / "report.html").read_text()
        assert summary["epsilon_by_round"] == [line["epsilon"]["max"] for line in RunFolder(path).lines()]
        return list(summary["epsilon_by_round"])

    model = "private-pca" if strategy["name"] == "averaging" else "scattering-random"
    flat = spent(experiment(model, strategy=strategy, rounds=6))
    assert flat[1] == flat[-1] == pytest.approx(4.0)
    for others in (small("psgd", rounds=6), private_selection("sparse_vector", rounds=6)):
        growing = spent(others)
        assert all(b > a for a, b in pairwise(growing))


def test_free_rounds_of_averaging_come_to_what_the_server_would_have_solved(tmp_path: Path) -> None:
    trainer = {"name": "dpa", "perturb": False, "local_steps": 2000}
    once, _ = run(exact("unit-linear"), tmp_path / "once")
    many, _ = run(
        exact("unit-linear", strategy={"name": "averaging"}, trainer=trainer, clients={"count": 1}),
        tmp_path / "many",
    )
    solved, descended = (RunFolder(path).latest()[1]["weights"] for path in (once, many))  # type: ignore[index]
    apart = np.linalg.norm(solved - descended) / np.linalg.norm(solved)
    assert apart < 0.1


@pytest.mark.parametrize("strategy", ["statistics", "averaging"])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [1, 2])
def test_a_resumed_run_is_the_whole_one(strategy: str, before: bool, after: int, tmp_path: Path) -> None:
    given = experiment("private-pca", strategy={"name": strategy})
    whole, expected = run(given, tmp_path / "whole")
    folder = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        simulate(given, observer=StopAfter(after, before=before), engine="in-process", folder=folder)
    _, summary = run(given, tmp_path, folder=folder)
    assert weights(folder) == weights(whole)
    assert summary["privacy"] == expected["privacy"]


def test_a_stage_that_was_half_there_is_whole_after_a_resume(tmp_path: Path) -> None:
    clients = {"count": 4, "fraction": 0.5}  # the last stage comes together over several rounds
    given = experiment("random-features", strategy="statistics", rounds=8, clients=clients)
    whole, _ = run(given, tmp_path / "whole")
    folder = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        simulate(given, observer=StopAfter(1, before=False), engine="in-process", folder=folder)
    run(given, tmp_path, folder=folder)
    assert weights(folder) == weights(whole)


EXCHANGES = ("parallel", "round_robin", "random_order", "asynchronous")


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("model", some(("patch-filters", "scattering"), ("patch-filters",)))
def test_in_every_exchange_the_encoder_is_that_of_all_sites_moments(
    model: str, exchange: str, tmp_path: Path
) -> None:
    """In whichever order sites come, their changes add up to what averaging makes of the same releases."""
    found = {}
    for strategy in ({"name": "averaging"}, {"name": "dssgd", "exchange": exchange, "upload_fraction": 1.0}):
        given = experiment(model, strategy=strategy, rounds=6)
        path, summary = run(given, tmp_path / strategy["name"])
        latest = RunFolder(path).latest()
        assert latest is not None
        assert summary["privacy"]["rounds_free"] == 6 - given.model.stages
        assert 3.99 < summary["privacy"]["epsilon_total"] <= 4.0
        found[strategy["name"]] = latest[1]["weights"], summary["accuracy"]["final"]
    (mean, accuracy), (added, ours) = found["averaging"], found["dssgd"]
    _, net = make_trainer(given, make_federation(given).dataset)
    assert isinstance(net.network, Encoded)
    learnt = net.network.segment(given.model.stages).start
    start = net.weights()[:learnt]
    assert np.abs(mean[:learnt] - start).max() > 0.1  # it has learnt
    # Averaging weighs sites by their records (359 or 360); where changes are added up, all weigh the same.
    np.testing.assert_allclose(added[:learnt], mean[:learnt], atol=2e-4)
    assert ours > accuracy - 0.05


@pytest.mark.parametrize("exchange", [*EXCHANGES, "free_running"])
def test_sites_that_add_up_come_to_more_than_each_alone(exchange: str, tmp_path: Path) -> None:
    found = {}
    strategy = {"name": "dssgd", "exchange": exchange, "upload_fraction": 0.5}
    for name, how in (("together", strategy), ("alone", {"name": "standalone"})):
        _, summary = run(experiment("scattering-random", strategy=how, rounds=8), tmp_path / name)
        found[name] = summary["accuracy"]["final"]
    assert found["together"] > found["alone"]


class Deaf(InProcessGrid):
    """A grid that loses one client's replies of one round, after the client has done its work."""

    def __init__(self, *args: Any, lost: tuple[int, str]) -> None:
        super().__init__(*args)
        self._lost = lost

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        replies = super().send_and_receive(messages, timeout=timeout)
        return [r for r in replies if (r.metadata.src_node_id, r.metadata.group_id) != self._lost]


@pytest.mark.parametrize("strategy", ["statistics", "averaging"])
def test_a_lost_reply_is_asked_for_again_released_once_and_booked_once(strategy: str, tmp_path: Path) -> None:
    given = experiment("private-pca", strategy={"name": strategy})
    config = dict(to_run_config(given))
    second = list(InProcessGrid(4, config, client_app.app).contexts)[1]
    grid = Deaf(4, config, client_app.app, lost=(second, "2"))
    folder = RunFolder.create(tmp_path / "run", given)
    summary = run_rounds(given, grid, folder, Silent())
    lines = folder.lines()
    uploaded = [line["clients"]["uploaded"] for line in lines[:3]]
    assert uploaded == [4, 3, 1 if strategy == "statistics" else 4]
    assert lines[-1]["epsilon"]["min"] == lines[-1]["epsilon"]["max"] == pytest.approx(4.0)
    books = VirtualLedgerSession.of(list(grid.contexts.values())[1])
    assert books is not None
    assert books.account.number == 2
    assert summary["failures"] == 1


def test_a_fraction_of_the_sites_comes_to_all_in_later_rounds(tmp_path: Path) -> None:
    given = experiment(
        "random-features", strategy={"name": "statistics"}, rounds=12, clients={"count": 4, "fraction": 0.5}
    )
    path, _ = run(given, tmp_path)
    asked = [line["clients"]["asked"] for line in RunFolder(path).lines()]
    assert sum(asked) == 4
    assert asked[0] == 2


PAPER: dict[str, dict[str, Any]] = {
    "dpa": {"model": {"name": "auto-encoder", "hidden": 20}},
    "dpah": {"model": {"name": "dpah", "hidden": 20}, "data": {"name": "health-weekly"}},
    "pcdbn": {"model": {"name": "cdbn", "filters": 2, "hidden": 16}},
    "pcdbn, behaviour": {
        "model": {"name": "cdbn-behaviour", "filters": 2},
        "data": {"name": "health-weekly"},
    },
}


def paper(kind: str, *, trainer: dict[str, Any] | None = None, **changes: Any) -> Experiment:
    name = "pcdbn" if kind.startswith("pcdbn") else "dpa"
    tables = {
        "seed": 3,
        "rounds": 2,
        "clients": {"count": 2},
        "trainer": {"name": name, "learning_rate": 0.02, **(trainer or {})},
        "privacy": {"budget_epsilon": 4.0, "variant": "paper"},
        **PAPER[kind],
    }
    return build({**tables, **changes})


@pytest.mark.parametrize("kind", PAPER)
def test_a_papers_form_is_claimed_and_says_so_first_and_last(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = paper(kind)
    path, summary = simulate(given, observer=PlainLines(), engine="in-process", root=tmp_path)
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith("NOT PROVED: privacy.variant = 'paper' is claimed")
    cost = summary["privacy"]
    assert cost["guarantee"] == "claimed"
    assert cost["epsilon_total"] == 4.0
    assert cost["rounds_free"] == 0  # it looks at the records again
    assert "only claimed by its paper or author" in cost["warnings"][0]
    assert len(Ledger(path / LEDGERS, "client-0000").read()[1]) == 1


def test_bounds_of_the_records_in_the_model_are_refuted(tmp_path: Path) -> None:
    given = paper("dpa", privacy={"budget_epsilon": 4.0, "variant": "paper_as_printed"})
    _, summary = run(given, tmp_path)
    assert summary["privacy"]["guarantee"] == "refuted"


@pytest.mark.parametrize("kind", PAPER)
@pytest.mark.parametrize("truncate", [True, False])
def test_ablations_learn_without_noise_and_without_privacy(kind: str, truncate: bool, tmp_path: Path) -> None:
    rounds = {"dpa": 12, "pcdbn": 10}.get(kind, 1)
    given = paper(
        kind,
        trainer={"perturb": False, "truncate": truncate, "local_epochs": 3, "batch_size": 50},
        privacy={},
        rounds=rounds,
        clients={"count": 1},
    )
    _, summary = run(given, tmp_path)
    assert summary["privacy"] is None
    classes = 10 if kind in ("dpa", "pcdbn") else 2
    assert summary["accuracy"]["best"] > 2 / classes if classes == 10 else summary["accuracy"]["best"] > 0.6


def test_a_papers_noise_is_drawn_once_for_all_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[bytes] = []
    from fed_dp.clients.functional import perturbed as module

    real = module.coefficient_noise

    def spy(*args: Any, **keywords: Any) -> Any:
        noise = real(*args, **keywords)
        drawn.append(noise.tobytes())
        return noise

    monkeypatch.setattr(module, "coefficient_noise", spy)
    run(paper("dpa", clients={"count": 1}, rounds=3), tmp_path)
    head = drawn[4:6]  # two layers and the head draw two kinds each in round 1, later rounds the head alone
    assert len(drawn) == 6 + 2 * 2
    assert drawn[6:8] == head
    assert drawn[8:10] == head
