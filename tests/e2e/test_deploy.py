"""Real sites on loopback, over TLS, with authenticated nodes: as a hospital's engineer would run them."""

from __future__ import annotations

import http.client
import json
import math
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fed_dp.accounting import Ledger
from fed_dp.deploy import authority
from fed_dp.deploy.provision import provision
from fed_dp.deploy.run_queue import requests
from fed_dp.runs.folder import RunFolder
from fed_dp.server.observers import Silent
from fed_dp.server.rounds import run_rounds
from fed_dp.simulations.runner import simulate
from tests.clock import wait_until
from tests.conftest import in_process, some
from tests.deploy.federation import (
    SITES,
    Federation,
    error_line,
    experiment,
    free_ports,
    tables,
    with_noise,
)
from tests.deploy.hostile import SENT, plan
from tests.experiment.test_grid import FORMS, PUBLIC
from tests.faults.test_exchange import Faulty

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A server and three sites."""
    federation = Federation(tmp_path_factory.mktemp("federation"))
    federation.rebudget("c", 6.0)
    try:
        federation.start("server", *SITES)
        federation.wait_for_sites()
        yield federation
    finally:
        federation.kill(*federation.processes)


def newest(federation: Federation) -> RunFolder:
    return RunFolder(list(requests(federation.server / "runs"))[-1].folder)


def weights(folder: RunFolder) -> np.ndarray:
    latest = folder.latest()
    assert latest is not None
    return latest[1]["weights"]


def test_without_noise_the_model_is_that_of_the_simulation(running: Federation, tmp_path: Path) -> None:
    summary = running.run(tables(rounds=2))
    pooled = experiment(tables(path=str(running.pooled), rounds=2))
    path, expected = simulate(pooled, observer=Silent(), folder=tmp_path / "simulated")
    ours, theirs = weights(newest(running)), weights(RunFolder(path))
    assert np.abs(ours).max() > 0.1  # it has moved
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    assert summary["accuracy"] == expected["accuracy"]
    assert summary["privacy"] is None
    assert summary["data"]["train"] == expected["data"]["train"]
    for name in SITES:  # nothing was charged, and the ledger says that nothing protects what was sent
        account = running.ledger(name).read()[0]
        assert (account.number, account.unprotected, account.charges) == (2, 2, ())
        assert account.spent == math.inf


def test_with_noise_a_seed_is_refused_and_ledgers_on_disk_show_the_spend(running: Federation) -> None:
    seeded = with_noise(name="seeded", privacy={"budget_epsilon": 3.0, "delta": 1e-5})
    told = error_line(running.command("run", running.experiment(seeded), "--server", str(running.server)))
    assert "privacy.noise_source = 'simulation' is seeded" in told
    before = {name: running.ledger(name).read()[0].number for name in SITES}
    summary = running.run(with_noise(name="noisy"))
    assert summary["failures"] == 0
    assert summary["privacy"]["noise_source"] == "secure"
    assert summary["privacy"]["guarantee"] == "proved"
    total = summary["privacy"]["epsilon_total"]
    assert 2.9 < total <= 3.0
    for name in SITES:
        account, entries = Ledger(running.site(name) / "ledger.sqlite").read()
        assert account.number - before[name] == 3
        assert [entry.event.round for entry in entries[-3:]] == [1, 2, 3]
        assert {entry.event.noise_source for entry in entries[-3:]} == {"secure"}
        assert account.metered == pytest.approx(total)
    told = running.command("status", str(running.server)).stdout
    assert "run noisy" in told
    assert "finished, round 3 of 3" in told
    site = json.loads(running.command("status", str(running.site("a")), "--json").stdout)
    assert site["charges"] == running.ledger("a").read()[0].number


def test_a_site_that_is_asked_for_more_than_its_file_allows_refuses_and_the_run_goes_on(
    running: Federation,
) -> None:
    files = {name: (running.site(name) / "site.toml").read_text() for name in SITES}
    charged = running.ledger("b").read()[0].number
    running.edit("a", "bound = 1000.0", "bound = 0.5")
    running.edit("b", "upload_fraction = 1.0", "upload_fraction = 0.05")
    try:
        summary = running.run(with_noise(name="refused", rounds=1))
    finally:
        for name, text in files.items():
            (running.site(name) / "site.toml").write_text(text)
    [line] = newest(running).lines()
    assert line["clients"] == {"asked": 3, "uploaded": 1, "failed": 2}
    assert "strategy.bound = 1000 (γ): this site's values stay within 0.5" in line["failures"]["0"]
    assert "strategy.upload_fraction = 0.1 (θ_u): this site shares at most 0.05" in line["failures"]["1"]
    assert running.ledger("b").read()[0].number == charged
    assert "refused: strategy.upload_fraction" in (running.site("b") / "site.log").read_text()
    assert any("own file refused" in warning for warning in summary["privacy"]["warnings"])


def test_a_budget_that_is_used_up_refuses_and_the_run_goes_on(running: Federation) -> None:
    before = running.ledger("c").read()[0]  # of 6, with the runs before
    dear = with_noise(name="dear", rounds=1, privacy={**with_noise()["privacy"], "budget_epsilon": 5.9})
    assert before.number > 0
    running.run(dear)
    [line] = newest(running).lines()
    assert line["clients"]["uploaded"] == 2
    assert "over the budget of 6" in line["failures"]["2"]
    assert running.ledger("c").read()[0] == before


# ----------------------------------------------------------------------------- every trainer

DEPLOYED = tuple(name for name in FORMS if name != "sgd" and not name.endswith("as its paper"))
EPSILON = 0.05  # of each: site c has little left
CLAIMED = tuple(name for name in FORMS if name.endswith("as its paper"))


@pytest.fixture
def images(running: Federation) -> Iterator[Federation]:
    """The same sites with images of digits in the place of their tables, which allow what is only claimed."""
    x, y = load_digits(return_X_y=True)
    x, places = x.reshape(-1, 1, 8, 8), [running.site(name) for name in SITES]
    parts = dict(zip(places, (slice(0, 300), slice(300, 650), slice(650, 900)), strict=True))
    for place in (*places, running.server):
        (place / "data").rename(place / "tables")
        (place / "data").mkdir()
    for place, part in parts.items():
        np.savez(place / "data" / "train.npz", X=x[part], y=y[part])
    for name, part in (("public", slice(900, 1100)), ("test", slice(1100, None))):
        np.savez(running.server / "data" / f"{name}.npz", X=x[part], y=y[part])
    for name in SITES:
        running.edit(name, "claimed = false", "claimed = true")
    yield running
    for name in SITES:
        running.edit(name, "claimed = true", "claimed = false")
    for place in (*places, running.server):
        shutil.rmtree(place / "data")
        (place / "tables").rename(place / "data")


@pytest.mark.parametrize(
    "form", some((*DEPLOYED, *CLAIMED), ("psgd, learnt encoder", "pcdbn", "adlm", "dpa, as its paper"))
)
def test_every_trainer_runs_at_real_sites(images: Federation, form: str) -> None:
    model, trainer, privacy = FORMS[form]
    data = {"name": "folder", "path": "/at-each-site", "classes": 10, "bounds": [0.0, 16.0]}
    public = {"public_records": 100} if form.startswith(PUBLIC) and form not in CLAIMED else {}
    before = {name: images.ledger(name).read()[0].number for name in SITES}
    stages = 3 if form == "pcdbn" else 2 if form == "dpa, learnt encoder" else 1
    content = tables(
        name="every",
        rounds=stages + 1,
        data={**data, **public},
        model=model,
        trainer=trainer,
        strategy={"name": "dssgd", "exchange": "parallel", "upload_fraction": 0.5},
        privacy={**privacy, "budget_epsilon": EPSILON, "noise_source": "secure"},
    )
    summary = images.run(content)
    assert summary["failures"] == 0
    wanted = "claimed" if form in CLAIMED else "proved"
    assert summary["privacy"]["guarantee"] == wanted
    assert summary["privacy"]["epsilon_total"] <= EPSILON * (1 + 1e-9)
    charges = stages + 1 if form.startswith("psgd") else stages  # further rounds of the others are free
    for name in SITES:
        entries = images.ledger(name).read()[1][before[name] :]
        assert [entry.event.stated.status for entry in entries] == [wanted] * charges
    if wanted == "claimed":
        shown = in_process(images.folder, "ledger", "show", str(images.site("a") / "ledger.sqlite")).stdout
        assert "claimed per record, noise: secure" in shown  # of the entry; the total has no bound at all


# ------------------------------------------------------------------------- who is not let in


def post(port: int, path: str, context: ssl.SSLContext | None) -> int:
    """Ask the server as anybody could; None speaks plain text."""
    connection = (
        http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        if context is None
        else http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
    )
    try:
        connection.request("POST", path, body=b"", headers={"content-type": "application/protobuf"})
        return connection.getresponse().status
    finally:
        connection.close()


def test_sites_reach_fleet_alone_and_plain_text_reaches_nothing(running: Federation) -> None:
    trusted = ssl.create_default_context(cafile=str(running.server / "ca.crt"))
    port, control = running.plan.port, running.plan.control_port
    for path in ("/v1/control/list-nodes", "/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/"):
        assert post(port, path, trusted) == 403
    assert post(control, "/v1/control/list-nodes", trusted) == 200  # on loopback, for the operator
    assert post(port, "/v1/fleet/pull-messages", trusted) == 401  # who are you?
    with pytest.raises((http.client.HTTPException, OSError)):
        post(port, "/v1/fleet/pull-messages", None)
    with pytest.raises(ssl.SSLCertVerificationError):
        post(port, "/v1/fleet/pull-messages", ssl.create_default_context())


def stranger(running: Federation, folder: Path) -> Path:
    """A site of another federation that was told this server's address."""
    other = running.plan.__class__(("x",), running.plan.budget, "127.0.0.1", running.plan.port, 1)
    provision(folder, other)
    shutil.copytree(running.site("a") / "data", folder / "sites" / "x" / "data")
    return folder / "sites" / "x"


def test_a_foreign_authority_an_unknown_key_and_a_plain_server_are_refused_in_words(
    running: Federation, tmp_path: Path
) -> None:
    kit = stranger(running, tmp_path / "other")
    told = error_line(running.command("site", str(kit)))
    assert "was not issued by this federation's authority" in told
    checked = running.command("check", str(kit))
    assert checked.returncode == 1
    assert "FAULT  server: the certificate of the server" in checked.stdout
    assert "good   ledger: whole, 0 charges" in checked.stdout

    shutil.copy(running.server / "ca.crt", kit / "ca.crt")  # it trusts the server; is it trusted?
    told = error_line(running.command("site", str(kit)))
    assert "does not know this site's key" in told

    text = (kit / "site.toml").read_text()
    [plain] = free_ports(1)
    (kit / "site.toml").write_text(text.replace(str(running.plan.port), str(plain)))
    with PlainServer(plain):
        told = error_line(running.command("site", str(kit)))
    assert "speaks no TLS" in told
    (kit / "site.toml").write_text(text.replace(str(running.plan.port), str(plain)))
    assert "does not answer" in running.command("check", str(kit)).stdout


class PlainServer:
    """A server that speaks plain HTTP."""

    def __init__(self, port: int) -> None:
        import http.server

        self._server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", port), http.server.BaseHTTPRequestHandler
        )

    def __enter__(self) -> None:
        import threading

        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_an_expired_certificate_is_refused_by_the_server_itself_and_by_sites(
    running: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "old"
    shutil.copytree(running.server, folder, ignore=shutil.ignore_patterns("runs", "*.db*", "flwr"))
    for name in ("server.key", "server.crt"):
        (folder / name).unlink()
    monkeypatch.setattr(authority, "datetime", LongAgo)
    authority.issue_server(running.folder / "authority", folder, hosts=["127.0.0.1"], days=30)
    monkeypatch.undo()
    told = error_line(running.command("server", str(folder)))
    assert "expired on 2020-01-31" in told
    assert "fed-dp deploy renew" in told
    kit = tmp_path / "kit"
    shutil.copytree(running.site("a"), kit, ignore=shutil.ignore_patterns("flwr", "memory"))
    [port] = free_ports(1)
    text = (kit / "site.toml").read_text()
    (kit / "site.toml").write_text(text.replace(str(running.plan.port), str(port)))
    with TlsServer(port, folder):
        told = error_line(running.command("site", str(kit)))
    assert "expired on 2020-01-31" in told


class LongAgo:
    """A clock that stands in 2020."""

    @staticmethod
    def now(zone: Any) -> Any:
        from datetime import datetime

        return datetime(2020, 1, 1, tzinfo=zone)


class TlsServer(PlainServer):
    """A server with a certificate from a folder."""

    def __init__(self, port: int, folder: Path) -> None:
        super().__init__(port)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.crt", folder / "server.key")
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)


# ------------------------------------------------------------------------------ what is lost


def test_a_killed_site_is_asked_again_and_a_killed_server_goes_on(running: Federation) -> None:
    content = with_noise(name="killed", rounds=4, clients={"count": 3, "quorum": 3})
    before = {name: running.ledger(name).read()[0].number for name in ("a", "b")}
    done = running.command("run", running.experiment(content), "--server", str(running.server), "--detach")
    assert done.returncode == 0, done.stderr
    folder = newest(running)
    wait_until(lambda: len(folder.lines()) >= 1, running.logs)
    charged = running.ledger("a").read()[0].number
    wait_until(lambda: running.ledger("a").read()[0].number > charged, running.logs, every=0.01)
    running.kill("a")  # charged, and perhaps not sent
    running.start("a")
    after = len(folder.lines())
    wait_until(lambda: len(folder.lines()) > after, running.logs)
    running.kill("server")
    running.start("server")
    wait_until(lambda: folder.finished, running.logs, every=0.5)
    lines = folder.lines()
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert [line["clients"]["uploaded"] for line in lines] == [3] * 4  # nobody is missing
    latest = folder.latest()
    assert latest is not None
    assert latest[1]["version"] == 12  # each upload was counted once
    for name, number in before.items():
        assert running.ledger(name).read()[0].number - number >= 4
    assert "started after round" in running.said("server")


def test_what_hostile_sites_send_is_refused_by_name_and_the_state_is_that_of_the_honest_one(
    running: Federation, tmp_path: Path
) -> None:
    rounds = len(SENT) // 2
    parallel = {**tables()["strategy"], "exchange": "parallel"}
    content = tables(name="hostile", rounds=rounds, strategy=parallel, evaluate_every=rounds)
    running.kill("a", "b")
    running.start("a", "b", program="tests.deploy.hostile")
    running.wait_for_sites()
    summary = running.run(content)
    lines = newest(running).lines()
    for line in lines:
        assert line["clients"]["uploaded"] == 1
        for client in (0, 1):
            said = plan(client, line["round"])[0]
            assert said in line["failures"][str(client)], (line["round"], client, said)
    assert summary["failures"] == 2 * rounds
    alone = experiment({**content, "data": tables(path=str(running.pooled))["data"]})
    faults = {(client, turn): "dies" for client in (0, 1) for turn in range(1, rounds + 1)}
    folder = RunFolder.create(tmp_path / "alone", alone)
    run_rounds(alone, Faulty(alone, faults), folder, Silent())
    np.testing.assert_allclose(weights(newest(running)), weights(folder), rtol=1e-5, atol=1e-7)


@pytest.mark.exhaustive
def test_told_to_stop_a_server_and_its_sites_end_and_leave_no_process(running: Federation) -> None:
    assert running.stop() == []
