"""What is only claimed to be private, at a real site: its own file allows it, and its noise is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from fed_dp.accounting import Budget, Ledger
from fed_dp.clients.adlm.trainer import AdlmTrainer
from fed_dp.clients.building import make_trainer
from fed_dp.clients.functional.perturbed import PerturbedTrainer
from fed_dp.clients.ledger_session import SiteLedgerSession
from fed_dp.clients.trainer import ClientData
from fed_dp.data.dataset import Floats
from fed_dp.errors import ConfigError, PrivacyError
from fed_dp.experiment import Experiment, build
from fed_dp.experiment.federation import Federation, make_federation
from fed_dp.experiment.start import starting_weights
from fed_dp.mechanisms import SimulationNoise
from fed_dp.models import Vector
from fed_dp.sharing import message as names
from tests.clients.deployed import Deployed
from tests.conftest import some
from tests.experiment.test_grid import FORMS

CLAIMED = [name for name in FORMS if name.endswith("as its paper")]


def sent(reply: Message) -> bytes:
    return reply.content.array_records[names.ARRAYS][names.CHANGE].data


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
            replies = [site.answer(1), site.answer(2)]
        account, entries = site.ledger.read()
        assert [entry.event.stated.status for entry in entries] == ["claimed"]
        assert account.metered == pytest.approx(1.0)
        assert {bytes(draw) for draw in site.drawn} == {bytes(site.drawn[0])}
        assert len(site.drawn) == len(replies)
        drawn.append(site.drawn[0])
    assert not np.array_equal(*drawn)  # no seed decides it
    # Of Lap(1): the median of n magnitudes, which are exponential, deviates by 1/√n. No run in 1e9 fails.
    magnitudes = np.abs(np.concatenate(drawn))
    allowed = 6.5 / np.sqrt(len(magnitudes))
    assert np.median(magnitudes) == pytest.approx(np.log(2), abs=allowed)
    assert allowed < np.log(2) / 2  # half of the noise would be noticed


@pytest.mark.parametrize("form", some(CLAIMED, ["dpa, as its paper"]))
def test_a_round_is_answered_for_one_set_of_weights_and_the_same_bytes_come_again(
    form: str, tmp_path: Path
) -> None:
    """Other weights in the same round would be another question to the same noise, at no charge."""
    site = Site(tmp_path / "a", claimed(form), allowed=True)
    first, second = site.answer(1), site.answer(2)
    assert sent(site.answer(1)) == sent(first)
    assert sent(site.answer(2)) == sent(second)
    for server_round in (1, 2):
        with pytest.raises(PrivacyError, match=f"round {server_round} was answered for other weights"):
            site.answer(server_round, fill=0.01)
    assert site.ledger.read()[0].number == 1


def test_noise_holds_for_the_records_it_was_drawn_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path / "a", claimed("dpa, as its paper"), allowed=True)
    site.answer(1)
    client = Federation.client

    def changed(own: Federation, number: int) -> tuple[Floats, Any]:
        x, y = client(own, number)
        return x, np.roll(y, 1)

    monkeypatch.setattr(Federation, "client", changed)
    with pytest.raises(PrivacyError, match="records have changed since their noise was drawn"):
        site.answer(2)


def ready(form: str, **changes: Any) -> tuple[Any, Vector, ClientData]:
    model, trainer, privacy = FORMS[form]
    given = build(
        {"clients": {"count": 30}, "model": model, "trainer": {**trainer, **changes}, "privacy": privacy}
    )
    federation = make_federation(given)
    made, _ = make_trainer(given, federation.dataset)
    data = ClientData(*federation.client(0), 0, 1, given.seed)
    return made, starting_weights(given, federation), data


def test_bounds_that_a_server_sends_do_not_scale_what_noise_covers() -> None:
    """dPA normalises by public bounds (Eq. 13): others would blow records up, and leave noise as it is."""
    trainer, weights, data = ready("dpa, as its paper")
    own = trainer.fit(weights, data, {})
    where = np.flatnonzero(np.isin(weights, (0.0, 1.0)))  # γ = 0 and φ = 1 are among them
    net = trainer._net
    net.load(weights)
    net.network.bounds.fill_(1e-6)
    hostile = net.weights()
    assert set(np.flatnonzero(hostile != weights)) <= set(where)
    assert not np.array_equal(hostile, weights)
    np.testing.assert_array_equal(hostile + trainer.fit(hostile, data, {}).change, weights + own.change)


@pytest.mark.parametrize("form", ["ilm, as its paper", "adlm, as its paper"])
def test_noise_is_divided_by_no_more_records_than_there_are(form: str) -> None:
    seen = {}
    for batch_size in (48, 10**9):
        trainer, weights, data = ready(form, batch_size=batch_size)
        assert len(data.y) <= 48
        seen[batch_size] = trainer.seen(weights, data)
    np.testing.assert_array_equal(seen[48], seen[10**9])
    assert np.abs(seen[48]).max() > 100  # far beyond inputs of [0, 1]


def test_relevance_is_drawn_once_with_the_noise_that_it_scales() -> None:
    """From x + η/β₁ and x + η/β₂, x would follow: other weights must not make another β."""
    trainer, weights, data = ready("adlm, as its paper")
    drawn = trainer.draw(weights, data, SimulationNoise(np.random.default_rng(1)))
    fits = [trainer.fit_with(drawn, weights + step, data, {}) for step in (0.0, 0.1)]
    betas = [fit.state["relevance"] for fit in fits]
    assert betas[0] == betas[1]
    again = trainer.draw(weights + 0.1, data, SimulationNoise(np.random.default_rng(1)))
    assert not np.array_equal(again[: len(betas[0])], drawn[: len(betas[0])])  # which it would have made


def test_it_is_seen_where_noise_is_drawn_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path / "a", claimed("pcdbn, as its paper"), allowed=True)
    site.watch(monkeypatch)
    monkeypatch.setattr(SiteLedgerSession, "kept", lambda *_: None)
    monkeypatch.setattr(SiteLedgerSession, "slots", lambda *_: set())
    site.answer(1)
    site.answer(2)
    assert not np.array_equal(*site.drawn)
    assert site.ledger.read()[0].number == 2  # and it is charged again
