"""`flwr run .`: Flower's own engine runs the same app, offline, with the same result."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fed_dp.experiment import load_experiment
from fed_dp.server.observers import Silent
from fed_dp.simulations.runner import simulate
from tests.clock import HANG, wait_until
from tests.simulations.test_simulate import run, weights

pytestmark = [pytest.mark.e2e, pytest.mark.ray]

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
SETTINGS = ["rounds=2", "clients.count=3"]
IN_TURN = ["strategy.name=dssgd", "strategy.exchange=random_order", "strategy.download_fraction=0.5"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def flower(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A SuperLink of our own on loopback, and the environment that finds it."""
    home = tmp_path / "flwr"
    home.mkdir()
    port, control = free_port(), free_port()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "test"\n\n[superlink.test]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    command = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--control-api-address", f"127.0.0.1:{control}"]
    with (tmp_path / "superlink.log").open("wb") as log:
        link = subprocess.Popen(
            [str(BIN / command[0]), *command[1:], "--database", str(tmp_path / "state.db")],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_until(lambda: listens(port), (tmp_path / "superlink.log").read_text)
        yield environment
    finally:
        os.killpg(link.pid, signal.SIGTERM)
        try:
            link.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(link.pid, signal.SIGKILL)
            link.wait(20)


def flwr_run(app: Path, config: str, *, nodes: int, environment: dict[str, str], folder: Path) -> str:
    """Run an app under Flower's engine; return all that was logged."""
    federation = f"num-supernodes={nodes} client-resources-num-cpus=1"
    done = subprocess.run(
        [str(BIN / "flwr"), "run", str(app), "--stream", "-c", config, "--federation-config", federation],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    return done.stdout + done.stderr + (folder / "superlink.log").read_text()


@pytest.mark.parametrize("more", [pytest.param([], marks=pytest.mark.exhaustive), IN_TURN])
def test_all_three_engines_give_the_same_result(
    flower: dict[str, str], tmp_path: Path, more: list[str]
) -> None:
    settings = SETTINGS + more
    experiment = load_experiment("digits:psgd", settings)
    here, expected = run(experiment, tmp_path / "in-process")
    on_ray, summary = simulate(experiment, observer=Silent(), engine="ray", root=tmp_path / "ray")
    folder = tmp_path / "flower"
    config = f'experiment="digits:psgd" set="{" ".join(settings)}" run-folder="{folder}"'
    log = flwr_run(ROOT, config, nodes=3, environment=flower, folder=tmp_path)
    assert (folder / "summary.json").is_file(), log[-3000:]
    assert weights(here) == weights(on_ray) == weights(folder)
    theirs = json.loads((folder / "summary.json").read_text())
    for key in ("accuracy", "bytes", "privacy", "digest"):
        assert expected[key] == summary[key] == theirs[key]


def test_somebody_elses_app_with_our_strategy_and_mod_runs_under_flowers_engine(
    flower: dict[str, str], tmp_path: Path
) -> None:
    app = shutil.copytree(ROOT / "examples" / "quickstart", tmp_path / "quickstart")
    subprocess.run(["patch", "-p1", "-i", "dssgd.diff"], cwd=app, check=True, capture_output=True)
    log = flwr_run(app, "num-server-rounds=2", nodes=4, environment=flower, folder=tmp_path)
    assert "final accuracy" in log, log[-3000:]
    # ε so far of every client, and the clients whose uploads were used
    assert "'uploads': 4" in log or "uploads': '4" in log, log[-3000:]
