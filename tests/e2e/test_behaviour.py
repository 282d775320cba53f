"""A user's own folder of persons over time, from CSV files to a trained model: dPAH's and pCDBN's forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fed_dp
from fed_dp.clients import workplace
from fed_dp.clients.site_file import SiteFile
from fed_dp.errors import SiteRefused
from fed_dp.experiment import build, to_run_config
from fed_dp.experiment.federation import load

PERSONS, DAYS = 30, 24
BOUNDS = {"steps": [0.0, 20_000.0], "calls": [0.0, 8.0], "weekend": [0.0, 1.0]}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generated persons, whose steps swing back to what is usual for them, and who move their friends."""
    path, rng = tmp_path_factory.mktemp("persons"), np.random.default_rng(7)
    usual = rng.uniform(4_000, 12_000, PERSONS)
    steps = np.clip(usual + 2_500 * rng.normal(size=(DAYS, PERSONS)), 0, 20_000)
    pd.DataFrame(
        {
            "id": np.tile(range(PERSONS), DAYS),
            "date": np.repeat(pd.date_range("2024-01-01", periods=DAYS).strftime("%Y-%m-%d"), PERSONS),
            "steps": steps.ravel().round(),
            "calls": rng.integers(9, size=DAYS * PERSONS),
            "weekend": np.repeat(np.arange(DAYS) % 7 >= 5, PERSONS).astype(int),
        }
    ).to_csv(path / "train.csv", index=False)
    pairs = rng.integers(PERSONS, size=(60, 2))
    pd.DataFrame(pairs[pairs[:, 0] != pairs[:, 1]], columns=["one", "other"]).to_csv(
        path / "friends.csv", index=False
    )
    return path


def section(home: Path, **more: Any) -> dict[str, Any]:
    return {
        "name": "folder",
        "path": str(home),
        "person": "id",
        "time": "date",
        "rises": "steps",
        "friends": "friends.csv",
        "influence": "calls",
        "bounds": BOUNDS,
        **more,
    }


PROVED = {"budget_epsilon": 20.0, "delta": 1e-5}
PAPER = {"budget_epsilon": 24.0, "variant": "paper"}
FORMS: dict[str, dict[str, Any]] = {
    "dPAH, proved": {
        "model": "behaviour-linear",
        "trainer": "dpa",
        "strategy": "statistics",
        "privacy": PROVED,
    },
    "pCDBN, proved": {
        "model": "patch-behaviour",
        "trainer": "pcdbn",
        "strategy": "statistics",
        "privacy": PROVED,
    },
    "dPAH": {
        "model": {"name": "dpah", "hidden": 6, "users": PERSONS},
        "trainer": {"name": "dpa", "learning_rate": 0.02, "local_epochs": 10, "batch_size": 50},
        "strategy": "averaging",
        "privacy": PAPER,
    },
    "pCDBN": {
        "model": {"name": "cdbn-behaviour", "filters": 2},
        "trainer": {"name": "pcdbn", "approximation": "chebyshev"},
        "strategy": "averaging",
        "privacy": PAPER,
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_behaviour_learns_from_it(form: str, home: Path, tmp_path: Path) -> None:
    more = {"persons": PERSONS} if form == "dPAH" else {}
    stages = 2 if form == "pCDBN, proved" else 1
    run = fed_dp.simulate(
        data=section(home, **more),
        rounds=stages if "proved" in form else 3,
        clients=1,
        engine="in-process",
        runs=tmp_path,
        progress=False,
        **FORMS[form],
    )
    assert run.privacy is not None
    assert run.privacy.guarantee == ("proved" if "proved" in form else "claimed")
    notes = json.loads((run.folder / "summary.json").read_text())["data"]["notes"]
    assert any("ε is of a record, not of a person" in note for note in notes)
    if form != "pCDBN":  # three epochs do not teach it
        assert run.scores["accuracy"] > 0.55
    if form == "dPAH":
        eta = dict(run.model.named_parameters())["influence"]
        assert eta.shape == (PERSONS,)
        assert len(set(eta.tolist())) > PERSONS / 2  # they are learnt one by one


def test_a_deployed_sites_workplace_has_a_record_for_each_line(home: Path, tmp_path: Path) -> None:
    privacy = {**PROVED, "noise_source": "secure"}
    form = {**FORMS["dPAH, proved"], "privacy": privacy}
    tables = {key: {"name": part} if isinstance(part, str) else part for key, part in form.items()}
    content = {**tables, "rounds": 1, "clients": {"count": 2}, "data": section(Path("/at-each-site"))}
    config = tuple(sorted(to_run_config(build(content)).items()))

    def of_site(data: str) -> workplace.Workplace:
        text = f'name = "a"\nclient = 1\nledger = "ledger.sqlite"\n[data]\npath = "{home}"\n{data}'
        (tmp_path / "site.toml").write_text(text)
        workplace.read_workplace.cache_clear()
        return workplace.read_workplace(config, SiteFile.read(tmp_path / "site.toml"))

    with pytest.raises(SiteRefused, match=r"data.friends = 'friends.csv': this site opens .* only where"):
        of_site("")  # a server cannot ask which files there are
    place = of_site('friends = "friends.csv"\n')
    workplace.read_workplace.cache_clear()
    assert place.stated_records(1) == PERSONS * DAYS  # whatever stands in them
    x, y = place.federation.client(1)
    there = x.any(axis=(1, 2, 3))
    simulated = load(build({**content, "data": section(home)}).data)
    assert there.sum() == len(simulated.train) + len(simulated.test) == PERSONS * (DAYS - 4)
    assert {(a.tobytes(), b) for a, b in zip(x[there], y[there], strict=True)} == {
        (a.tobytes(), b)
        for part in (simulated.train, simulated.test)
        for a, b in zip(part.x, part.y, strict=True)
    }
