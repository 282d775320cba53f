"""From names to kits: what is secret stays so, what is there is never touched."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from cryptography.hazmat.primitives import serialization
from typer.testing import CliRunner

from fed_dp.accounting import Budget, Ledger
from fed_dp.cli.main import app
from fed_dp.clients.site_file import SiteFile
from fed_dp.deploy import authority
from fed_dp.deploy.check import NotThere, check_connection
from fed_dp.deploy.provision import Plan, provision, rekey, renew, revoke
from fed_dp.deploy.server_file import ServerHome
from fed_dp.errors import ConfigError, DeployError, FedDpError
from fed_dp.server.ledger_heads import LedgerHeads
from fed_dp.strategies.sites import Site

BUDGET = Budget(4.0, 1e-5)


def plan(*sites: str) -> Plan:
    return Plan(sites, BUDGET, "server.example.org", 9092, 9093)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_kits_hold_what_a_site_needs_and_no_secret_of_another(tmp_path: Path) -> None:
    assert provision(tmp_path, plan("a", "b")) == (["a", "b"], [])
    secret = {"authority/ca.key", "server/server.key"}
    secret |= {f"sites/{name}/{file}" for name in "ab" for file in ("site.key", "ledger.sqlite")}
    for path in tmp_path.rglob("*"):
        if path.is_file() and (str(path.relative_to(tmp_path)) in secret or b"PRIVATE" in path.read_bytes()):
            assert path.stat().st_mode & 0o777 == 0o600, path
            secret.discard(str(path.relative_to(tmp_path)))
        if path.is_dir():
            assert not path.stat().st_mode & 0o077 or path.name == "sites"
    assert not secret
    own = {file: (tmp_path / file).read_bytes() for file in ("authority/ca.key", "server/server.key")}
    for name, other in (("a", "b"), ("b", "a")):
        kit = content(tmp_path / "sites" / name)
        assert set(kit) == {"START", "ca.crt", "ledger.sqlite", "site.key", "site.pub", "site.toml"}
        assert (tmp_path / "sites" / other / "site.key").read_bytes() not in kit.values()
        assert not set(own.values()) & set(kit.values())
    server = content(tmp_path / "server")
    assert not any(b"OPENSSH PRIVATE" in file for file in server.values())
    assert own["authority/ca.key"] not in server.values()


def test_a_kit_says_what_was_asked_for(tmp_path: Path) -> None:
    provision(tmp_path, plan("a", "b"))
    site = SiteFile.read(tmp_path / "sites" / "b")
    assert (site.name, site.client, site.server) == ("b", 1, "server.example.org:9092")
    assert site.opened().read()[0].budget == BUDGET
    assert site.opened().read()[0].site == "b"
    assert not site.allow.without_noise
    assert not site.share.metrics
    home = ServerHome(tmp_path / "server")
    assert home.sites() == {"a": 0, "b": 1}
    assert sorted(home.keys().values()) == [(0, "a"), (1, "b")]
    authority.check_site_key(Path(site.key))
    key = serialization.load_ssh_private_key(Path(site.key).read_bytes(), None)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    public = key.public_key().public_bytes(serialization.Encoding.PEM, form)
    assert home.keys()[public] == (1, "b")


def test_running_it_again_adds_sites_and_touches_nothing(tmp_path: Path) -> None:
    provision(tmp_path, plan("a", "b"))
    Ledger(tmp_path / "sites" / "a" / "ledger.sqlite").read()
    before = content(tmp_path)
    again = Plan(("c", "b"), Budget(1.0), "elsewhere", 1, 2)
    assert provision(tmp_path, again) == (["c"], ["b"])
    after = content(tmp_path)
    assert {name: after[name] for name in before if name != "server/sites.toml"} == {
        name: data for name, data in before.items() if name != "server/sites.toml"
    }
    assert ServerHome(tmp_path / "server").sites() == {"a": 0, "b": 1, "c": 2}
    site = SiteFile.read(tmp_path / "sites" / "c")
    assert (site.client, site.server) == (2, "server.example.org:9092")
    assert site.opened().read()[0].budget == Budget(1.0)
    assert provision(tmp_path, again) == ([], ["c", "b"])


def test_an_interrupted_provisioning_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def fail(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device", str(tmp_path / "x"))

        patch.setattr(Ledger, "create", fail)
        with pytest.raises(DeployError, match="No space left on device"):
            provision(tmp_path, plan("a"))
    assert provision(tmp_path, plan("a", "b")) == (["a", "b"], [])
    assert SiteFile.read(tmp_path / "sites" / "a").opened().read()[0].budget == BUDGET


def test_the_certificate_is_for_the_host_alone_and_the_chain_holds(tmp_path: Path) -> None:
    provision(tmp_path, plan("a"))
    context = ssl.create_default_context(cafile=str(tmp_path / "sites" / "a" / "ca.crt"))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server" / "server.crt", tmp_path / "server" / "server.key")
    for host, good in (("server.example.org", True), ("127.0.0.1", True), ("evil.example.org", False)):
        assert handshake(context, server, host) == good
    other = tmp_path / "other"
    provision(other, plan("a"))
    foreign = ssl.create_default_context(cafile=str(other / "sites" / "a" / "ca.crt"))
    assert not handshake(foreign, server, "server.example.org")


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> bool:
    """Let a client and a server meet in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server, server_hostname=host)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    done = [False, False]
    for _ in range(10):
        for k, side in enumerate((one, other)):
            try:
                side.do_handshake()
                done[k] = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                return False
    return all(done)


def test_dates_and_issuers_are_explained(tmp_path: Path) -> None:
    provision(tmp_path / "one", plan("a"))
    provision(tmp_path / "two", plan("a"))
    mine = authority.read_certificate(tmp_path / "one" / "server" / "server.crt")
    ca, other = (
        authority.read_certificate(tmp_path / name / "authority" / "ca.crt") for name in ("one", "two")
    )
    authority.check_issued(mine, ca, "it")
    with pytest.raises(DeployError, match=r"it was not issued by this federation's authority"):
        authority.check_issued(mine, other, "it")
    now = datetime.now(UTC)
    assert authority.check_dates(mine, "it", now=now) is None
    assert "it expires on" in str(authority.check_dates(mine, "it", now=now + timedelta(days=800)))
    with pytest.raises(DeployError, match=r"it expired on .*fed-dp deploy renew"):
        authority.check_dates(mine, "it", now=now + timedelta(days=826))
    with pytest.raises(DeployError, match="is the clock right"):
        authority.check_dates(mine, "it", now=now - timedelta(days=1))


def test_a_renewed_certificate_is_for_the_same_names(tmp_path: Path) -> None:
    provision(tmp_path, plan("a"))
    old = (tmp_path / "server" / "server.crt").read_bytes()
    renew(tmp_path, days=10)
    assert (tmp_path / "server" / "server.crt").read_bytes() != old
    assert (tmp_path / "server" / "server.key").stat().st_mode & 0o777 == 0o600
    context = ssl.create_default_context(cafile=str(tmp_path / "sites" / "a" / "ca.crt"))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server" / "server.crt", tmp_path / "server" / "server.key")
    assert handshake(context, server, "server.example.org")
    (tmp_path / "authority" / "ca.key").unlink()
    with pytest.raises(DeployError, match=r"ca.key is missing"):
        renew(tmp_path, days=10)
    with pytest.raises(ConfigError, match=r"--days -5"):
        renew(tmp_path, days=-5)


def test_a_replaced_ledger_is_taken_once_the_operator_forgets_the_old_one(tmp_path: Path) -> None:
    provision(tmp_path, plan("a", "b"))
    server = tmp_path / "server"
    (server / "runs").mkdir()
    ledger_heads = LedgerHeads(server / "runs")
    old, new = (Site(1, 0, 9, ledger=ledger, name="a") for ledger in ("one", "two"))
    ledger_heads.keep([old], ["5:x"])
    assert LedgerHeads(server / "runs").admitted([new])[0].why
    runner = CliRunner()
    told = runner.invoke(app, ["deploy", "forget", str(server), "a"])
    assert told.exit_code == 0
    assert "a: 1 ledger forgotten" in told.output
    assert LedgerHeads(server / "runs").admitted([new]) == (new,)
    again = runner.invoke(app, ["deploy", "forget", str(server), "a"])
    assert again.exit_code != 0
    assert "no ledger of a site 'a' is remembered" in str(again.exception)


def test_a_revoked_site_keeps_its_number_and_has_no_key(tmp_path: Path) -> None:
    provision(tmp_path, plan("a", "b"))
    revoke(tmp_path / "server", "a")
    home = ServerHome(tmp_path / "server")
    assert home.sites() == {"a": 0, "b": 1}
    assert list(home.keys().values()) == [(1, "b")]
    with pytest.raises(ConfigError, match="was revoked before"):
        revoke(tmp_path / "server", "a")
    with pytest.raises(ConfigError, match="'x' is not known; known: a, b"):
        revoke(tmp_path / "server", "x")
    old = (tmp_path / "sites" / "a" / "site.key").read_bytes()
    new = rekey(tmp_path, "a")
    assert new.read_bytes() != old
    authority.check_site_key(new)
    assert sorted(ServerHome(tmp_path / "server").keys().values()) == [(0, "a"), (1, "b")]
    key = serialization.load_ssh_private_key(new.read_bytes(), None)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    public = key.public_key().public_bytes(serialization.Encoding.PEM, form)
    assert ServerHome(tmp_path / "server").keys()[public] == (0, "a")
    (tmp_path / "server" / "sites" / "b.pub").unlink()  # lost, not revoked: that is a fault
    with pytest.raises(ConfigError, match="is not a public key"):
        ServerHome(tmp_path / "server").keys()


@pytest.mark.parametrize(
    ("sites", "changes", "says"),
    [
        (("a", "a"), {}, "twice"),
        (("A",), {}, "'A': expected small letters"),
        (("../x",), {}, "expected small letters"),
        ((), {}, "expected names"),
        (("a",), {"port": 0}, "--port 0"),
        (("a",), {"days": 0}, "--days 0"),
        (("a",), {"days": 10**7}, "--days 10000000"),
        (("a",), {"host": ""}, "--host ''"),
        (("a",), {"host": "bücher.de"}, "expected a name"),
        (("a",), {"host": "fl.example.org:9092"}, "without a port"),
    ],
)
def test_a_wrong_plan_is_refused(sites: tuple[str, ...], changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Plan(sites, BUDGET, **changes)


def test_the_command_line_explains_itself_and_its_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own

    def deploy(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["deploy", *arguments])

    done = deploy("init", "fed", "--sites", "a,b", "--epsilon", "2")
    assert done.exit_code == 0
    assert "kit of a, budget ε = 2" in done.stdout
    assert "next:" in done.stdout
    assert "there already" in deploy("init", "fed", "--sites", "a").stdout
    for command, says in (
        ("init fed --sites A", "'A': expected small letters"),
        ("init fed --sites x --epsilon -1", "budget epsilon = -1.0"),
        ("site fed/sites/a", "data.path"),
        ("site nowhere", "nowhere: cannot be read"),
        ("server nowhere", "server.toml: cannot be read"),
        ("run hospitals:psgd --server fed/server", "clients.count = 4: 2 sites are provisioned (a, b)"),
        ("run digits:sgd --server fed/server -s clients.count=2", "real sites have folders of their own"),
        ("run digits:psgd --server fed/server -s clients.count=2", "'simulation' is seeded"),
        ("run digits:standalone --server fed/server -s clients.count=2", "'standalone' is for simulations"),
        ("run hospitals --server fed/server", "has variants (dssgd, psgd, svm): name one"),
        ("run --server fed/server", "expected an experiment, or --resume"),
        ("run --resume --server fed/server", "does not answer"),
        ("stop fed/server", "nothing is being run"),
        ("renew nowhere", "ca.key is missing"),
        ("demo fed", "exists: the demonstration makes a folder of its own"),
    ):
        error = deploy(*command.split()).exception
        assert isinstance(error, FedDpError), (command, error)
        assert says in str(error)
    assert "does not answer" in deploy("status", "fed/server").stdout
    assert "spent ε = 0 of 2" in deploy("status", "fed/sites/a").stdout
    done = deploy("check", "fed/sites/a")
    assert isinstance(done.exception, DeployError)
    assert "good   ledger: whole, 0 charges" in done.stdout
    assert "FAULT  data: data.path" in done.stdout
    os.chmod(tmp_path / "fed" / "sites" / "a" / "site.key", 0o644)
    assert "FAULT  key" in deploy("check", "fed/sites/a").stdout
    for file in ("server.key", "ca.crt"):
        (tmp_path / "fed" / "server" / file).unlink()
        error = deploy("server", "fed/server").exception
        assert isinstance(error, DeployError)
        assert file in str(error)
    assert "ca.crt is not a certificate" in deploy("status", "fed/server").stdout.replace("\n", "")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("client = 0", "client = 0\nseed = 3", "unknown key seed = 3"),
        ("upload_fraction = 1.0", "upload_fraction = 1.5", "allow.upload_fraction = 1.5"),
        ("bound = 1000.0", "bound = nan", "allow.bound"),
        ('"sgd", ', '"sgd", "magic", ', "allow.trainers names 'magic'"),
        ("epsilon = 4.0", "epsilon = 40.0", "was made for ε = 4, δ = 1e-05; the site's file says 40"),
        ('name = "a"', 'name = "Ä"', "name = 'Ä'"),
        ("client = 0", "", "client is missing"),
        ("client = 0", "client = =", "not valid TOML"),
        ("heartbeat = 10", "heartbeat = 1", "heartbeat = 1"),
    ],
)
def test_a_wrong_site_file_names_key_and_value(tmp_path: Path, old: str, new: str, says: str) -> None:
    provision(tmp_path, plan("a"))
    path = tmp_path / "sites" / "a" / "site.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(FedDpError) as caught:
        SiteFile.read(path).opened()
    assert says in str(caught.value)


@pytest.mark.parametrize("server", ["host:abc", "host", ":1", "host:99999"])
def test_a_wrong_address_and_a_missing_authority_are_named(tmp_path: Path, server: str) -> None:
    provision(tmp_path, plan("a"))
    site = SiteFile.read(tmp_path / "sites" / "a")
    with pytest.raises(DeployError, match="expected HOST:PORT"):
        check_connection(site.model_copy(update={"server": server}))
    with pytest.raises(DeployError, match="nowhere is not a certificate"):
        check_connection(site.model_copy(update={"authority": "nowhere"}))


def test_a_server_that_hangs_up_may_come_back(tmp_path: Path) -> None:
    provision(tmp_path, plan("a"))
    with socket.create_server(("127.0.0.1", 0)) as rude:
        threading.Thread(target=lambda: rude.accept()[0].close(), daemon=True).start()
        site = SiteFile.read(tmp_path / "sites" / "a")
        address = f"127.0.0.1:{rude.getsockname()[1]}"
        with pytest.raises(NotThere):
            check_connection(site.model_copy(update={"server": address}))


def test_openssl_agrees(tmp_path: Path) -> None:
    provision(tmp_path, plan("a"))
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not there")
    command = "openssl verify -x509_strict -purpose sslserver -CAfile authority/ca.crt server/server.crt"
    done = subprocess.run(
        command.split(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
