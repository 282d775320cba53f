"""What is only claimed to be private, at a real site: its own file allows it, and its noise is kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fed_dp.accounting import Budget, Ledger
from fed_dp.clients.adlm.trainer import AdlmTrainer
from fed_dp.clients.functional.perturbed import PerturbedTrainer
from fed_dp.clients.ledger_session import SiteLedgerSession
from fed_dp.errors import ConfigError, PrivacyError
from fed_dp.experiment import Experiment, build
from fed_dp.models import Vector
from fed_dp.sharing import message as names
from tests.clients.deployed import Deployed
from tests.conftest import some
from tests.experiment.test_grid import FORMS

CLAIMED = [name for name in FORMS if name.endswith("as its paper")]


def claimed(form: str, variant: str = "paper") -> Experiment:
    model, trainer, privacy = FORMS[form]
    privacy = {**privacy, "budget_epsilon": 1.0, "variant": variant, "noise_source": "secure"}
    return build({"rounds": 3, "model": model, "trainer": trainer, "privacy": privacy})


class Site(Deployed):
    """A site with a file of its own, which tells what noise its trainer was given."""

    def __init__(self, folder: Path, experiment: Experiment, *, allowed: bool) -> None:
        super().__init__(experiment, None)
        folder.mkdir()
        self.ledger = Ledger.create(folder / "ledger.sqlite", site="a", budget=Budget(4.0))
        path = folder / "site.toml"
        path.write_text(f"client = 0\nmemory = 'memory'\n[allow]\nclaimed = {str(allowed).lower()}\n")
        self.node = {names.SITE: str(path)}
        self.drawn: list[Vector] = []

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for trainer in (PerturbedTrainer, AdlmTrainer):
            fit_with = trainer.fit_with

            def seen(own, drawn, *rest, fit_with=fit_with):  # type: ignore[no-untyped-def]
                self.drawn.append(drawn.copy())
                return fit_with(own, drawn, *rest)

            monkeypatch.setattr(trainer, "fit_with", seen)


def test_no_site_runs_it_unless_its_file_says_so(tmp_path: Path) -> None:
    site = Site(tmp_path / "a", claimed("dpa, as its paper"), allowed=False)
    with pytest.raises(PrivacyError, match=r"is claimed .*only what is proved \(allow.claimed\)"):
        site.answer()
    assert site.ledger.read()[0].number == 0


def test_what_is_refuted_runs_nowhere_but_in_simulations() -> None:
    with pytest.raises(ConfigError, match="'paper_as_printed' is refuted, and for simulation alone"):
        claimed("dpa, as its paper", "paper_as_printed")


@pytest.mark.parametrize("form", some(CLAIMED, ["pcdbn, as its paper", "adlm, as its paper"]))
def test_noise_is_charged_and_drawn_once_from_entropy_and_is_the_same_ever_after(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    for name in ("a", "b"):
        site = Site(tmp_path / name, claimed(form), allowed=True)
        with monkeypatch.context() as patch:
            site.watch(patch)
            replies = [site.answer(1), site.answer(2), site.answer(1, fill=0.01)]
        account, entries = site.ledger.read()
        assert [entry.event.stated.status for entry in entries] == ["claimed"]
        assert account.metered == pytest.approx(1.0)
        assert {bytes(draw) for draw in site.drawn} == {bytes(site.drawn[0])}
        assert len(site.drawn) == len(replies)
        drawn.append(site.drawn[0])
    assert not np.array_equal(*drawn)  # no seed decides it
    assert 0.9 < np.abs(drawn[0]).mean() < 1.1  # of Lap(1)


def test_it_is_seen_where_noise_is_drawn_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path / "a", claimed("pcdbn, as its paper"), allowed=True)
    site.watch(monkeypatch)
    monkeypatch.setattr(SiteLedgerSession, "kept", lambda *_: None)
    site.answer(1)
    site.answer(2)
    assert not np.array_equal(*site.drawn)
    assert site.ledger.read()[0].number == 2  # and it is charged again
