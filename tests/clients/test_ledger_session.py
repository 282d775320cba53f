"""A site's books: charged before noise, kept before it is sent, and refused on any doubt."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, MessageType, RecordDict

from fed_dp.accounting import Account, Budget, Gaussian, Ledger, SparseVector, from_json
from fed_dp.clients import app as client_app
from fed_dp.clients import workplace
from fed_dp.clients.ledger_session import VirtualLedgerSession
from fed_dp.clients.trainer import Fit
from fed_dp.errors import BudgetExceeded, DataError, LedgerFault, PrivacyError
from fed_dp.experiment import Experiment, build, to_run_config
from fed_dp.experiment.plan import release_plan
from fed_dp.experiment.start import starting_weights
from fed_dp.sharing import message as names
from fed_dp.sharing.private_selection import RandomMask, SparseVectorSelector
from fed_dp.simulations.grid import RUN_ID, InProcessGrid
from fed_dp.strategies.dssgd import Dssgd
from tests.clients.deployed import Deployed
from tests.clients.test_app import change, grid, start, train
from tests.conftest import private_selection, small
from tests.mechanisms.privacy_loss import Spy

SELECTIONS = ("sparse_vector", "random_mask")


def secure(selection: str = "sparse_vector", **changes: Any) -> Experiment:
    return private_selection(selection, noise_source="secure", **changes)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "site.ledger", site="ward 7", budget=Budget(4.0, 1e-5))


def sent(reply: Message) -> bytes:
    return reply.content.array_records[names.ARRAYS][names.CHANGE].data


@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_deployed_site_charges_its_ledger_and_tells_its_mark(selection: str, ledger: Ledger) -> None:
    site = Deployed(secure(selection), ledger.path)
    replies = [site.answer(turn) for turn in (1, 2)]
    account, entries = ledger.read()
    told = replies[-1].content.config_records[names.CONFIG]
    assert told[names.LEDGER_HEAD] == account.ledger_head
    assert [entry.event for entry in entries] == [
        event
        for r in replies
        for event in from_json(str(r.content.config_records[names.CONFIG][names.EVENTS]))
    ]
    assert all(entry.event.noise_source == "secure" for entry in entries)
    assert sent(replies[0]) != sent(replies[1])


def test_the_same_question_gets_the_same_bytes_and_costs_once(ledger: Ledger) -> None:
    site = Deployed(secure(), ledger.path)
    first = site.answer()
    again = Deployed(secure(), ledger.path).answer(known=ledger.read()[0].ledger_head)  # after a restart
    assert sent(again) == sent(first)
    assert again.content.metric_records == first.content.metric_records
    assert again.content.config_records == first.content.config_records
    assert ledger.read()[0].number == 1
    assert sent(site.answer(fill=0.25)) != sent(first)  # another question: other weights
    assert ledger.read()[0].number == 2


def test_a_seeded_source_is_refused_where_there_is_a_ledger(ledger: Ledger) -> None:
    for experiment in (private_selection("sparse_vector"), build_psgd()):
        with pytest.raises(PrivacyError, match=r"noise_source = 'simulation' is seeded.*allowed: 'secure'"):
            Deployed(experiment, ledger.path).answer()
    assert ledger.read()[0].number == 0


def build_psgd() -> Experiment:
    return build(
        {
            "trainer": {"name": "psgd", "sample_rate": 0.25},
            "clients": {"count": 4},
            "privacy": {"budget_epsilon": 4.0, "delta": 1e-5},
        }
    )


def test_a_real_site_without_a_ledger_sends_nothing(tmp_path: Path) -> None:
    site = Deployed(secure(), None)
    for tutorial in ({}, {names.PARTITIONS: 2}):  # as Flower's own examples start a SuperNode
        site.node |= tutorial
        with pytest.raises(PrivacyError, match="node_config has no ledger"):
            site.answer()
    with pytest.raises(LedgerFault, match="is missing"):
        Deployed(secure(), tmp_path / "nowhere").answer()
    assert list(tmp_path.iterdir()) == []


def test_a_site_whose_budget_is_spent_sends_nothing_more(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "small.ledger", site="a", budget=Budget(2.5, 1e-5))
    site = Deployed(secure(), ledger.path)  # the experiment would spend 4 in two rounds
    site.answer(1)
    with pytest.raises(BudgetExceeded, match=r"over the budget of 2.5 .*nothing was sent"):
        site.answer(2)
    assert ledger.read()[0].number == 1


def test_an_older_ledger_is_refused_by_what_the_server_has_seen(ledger: Ledger, tmp_path: Path) -> None:
    site = Deployed(secure(), ledger.path)
    shutil.copy(ledger.path, tmp_path / "older")
    mark = str(site.answer(1).content.config_records[names.CONFIG][names.LEDGER_HEAD])
    shutil.copy(tmp_path / "older", ledger.path)
    with pytest.raises(LedgerFault, match="rolled back"):
        site.answer(2, known=mark)
    assert ledger.read()[0].number == 0


def test_a_site_that_fails_after_the_charge_has_paid(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Deployed(secure(), ledger.path)
    monkeypatch.setattr("fed_dp.clients.update_exchange.encode", lambda *_, **__: 1 / 0)
    with pytest.raises(PrivacyError, match=r"training failed \(ZeroDivisionError\); nothing was sent"):
        site.answer(1)
    assert ledger.read()[0].number == 1
    assert ledger.kept(experiment=site.experiment.digest, request="") is None


def test_a_site_with_a_ledger_takes_part_in_nothing_that_is_not_private(ledger: Ledger) -> None:
    with pytest.raises(
        PrivacyError,
        match=r"'sgd' adds no noise: this site takes part in private .* alone.*nothing was sent",
    ):
        Deployed(small(), ledger.path).answer()
    with pytest.raises(PrivacyError, match=r"is refuted .*no site releases what is refuted"):
        Deployed(secure(variant="paper_as_printed"), ledger.path).answer()
    assert ledger.read()[0].number == 0


def test_what_is_wrong_with_a_site_s_records_stays_at_the_site(tmp_path: Path, ledger: Ledger) -> None:
    (tmp_path / "train.csv").write_text("age,ill\n33,no\nMrs 0,yes\n")
    data = {
        "name": "folder",
        "path": str(tmp_path),
        "label": "ill",
        "classes": ["no", "yes"],
        "bounds": [0, 120],
    }
    site = Deployed(secure(data=data, clients={"count": 1}), None)
    request = Message(RecordDict(), 1, MessageType.QUERY, group_id="0")
    for simulated in (False, True):
        node = {**site.node, **({names.SIMULATED: True} if simulated else {})}
        with pytest.raises(DataError) as caught:
            client_app.app(request, Context(RUN_ID, 1, node, RecordDict(), site.config))
        assert ("Mrs 0" in str(caught.value)) == simulated
    with pytest.raises(PrivacyError, match="not for a server to say"):  # it has a ledger, and no file
        Deployed(secure(data=data, clients={"count": 1}), ledger.path).answer()


def used_and_charged(selection: str, variant: str = "proved") -> tuple[float, float]:
    """The scale of the released values' noise, and what the event in the reply says it should be."""
    experiment = private_selection(selection, variant=variant)
    spy = Spy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_app, "_noise", lambda *_: spy)
        reply = train(grid(experiment), start(experiment))
    [event] = from_json(str(reply.content.config_records[names.CONFIG][names.EVENTS]))
    if isinstance(event.release, SparseVector):
        share = {"proved": 1 / 9, "paper": 2 / 9 / 2}[variant]
        return spy.calls[-1][1], 2 * 0.01 * event.release.count / (share * event.release.epsilon)
    assert isinstance(event.release, Gaussian)
    return spy.calls[-1][1], 2 * 0.1 * event.release.noise_multiplier


CASES = [("sparse_vector", "proved"), ("sparse_vector", "paper"), ("random_mask", "proved")]


@pytest.mark.parametrize(("selection", "variant"), CASES)
def test_the_noise_that_is_used_is_the_noise_that_is_charged(selection: str, variant: str) -> None:
    used, charged = used_and_charged(selection, variant)
    assert used == pytest.approx(charged)


@pytest.mark.parametrize(("selection", "variant"), CASES)
def test_less_noise_than_charged_is_seen(
    selection: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vector, mask = SparseVectorSelector, RandomMask
    monkeypatch.setattr(Dssgd, "selector", lambda *_, **__: weakened(vector, mask, selection, variant))
    used, charged = used_and_charged(selection, variant)
    assert used < 0.9 * charged


def weakened(vector: Any, mask: Any, selection: str, variant: str) -> Any:
    agreed = release_plan(private_selection(selection, variant=variant), client=0, size=2410)
    assert agreed is not None
    if isinstance(agreed.release, SparseVector):
        return vector(agreed.release.count, 0.01, 0.001, 2 * agreed.release.epsilon, variant)
    assert isinstance(agreed.release, Gaussian)
    return mask(241, 0.1, agreed.release.noise_multiplier / 2)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_selective_training_that_diverges_is_not_told_from_others_either(selection: str) -> None:
    trainer = {"name": "sgd", "learning_rate": 1e30, "update_fraction": 0.5, "local_epochs": 3}
    experiment = private_selection(selection, trainer=trainer)
    assert not train(grid(experiment), start(experiment)).has_error()
    plain = small(trainer=trainer)
    assert "diverged" in (train(grid(plain), start(plain)).error.reason or "")


# -------------------------------------------------------------------------- virtual clients


def account(nodes: InProcessGrid, node: int = 1) -> Account:
    books = VirtualLedgerSession.of(nodes.contexts[node])
    assert books is not None
    return books.account


def test_a_virtual_client_charges_too_and_what_it_charged_before_a_failure_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = private_selection("sparse_vector")
    nodes = grid(experiment)
    train(nodes, start(experiment))
    assert account(nodes).number == 1
    monkeypatch.setattr("fed_dp.clients.update_exchange.encode", lambda *_, **__: 1 / 0)
    assert "ZeroDivisionError" in (train(nodes, start(experiment), turn=2).error.reason or "")
    assert account(nodes).number == 2
    reason = train(nodes, start(experiment), turn=3).error.reason or ""
    assert "over the budget of 4" in reason


def test_a_private_trainer_is_charged_the_same_way_and_refused_when_its_rounds_are_spent() -> None:
    experiment = small("psgd")
    nodes = grid(experiment)
    for turn in (1, 2):
        assert not train(nodes, start(experiment), turn=turn).has_error()
    assert 3.9 < account(nodes).spent <= 4
    assert "over the budget of 4" in (train(nodes, start(experiment), turn=3).error.reason or "")
    assert account(nodes).number == 2


def test_weights_that_are_refused_cost_nothing() -> None:
    experiment = private_selection("sparse_vector")
    nodes = grid(experiment)
    assert train(nodes, np.full(start(experiment).size, np.nan)).has_error()
    assert names.LEDGER not in nodes.contexts[1].state


@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_private_selection_tells_of_the_records_through_the_change_alone(
    selection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = {"budget_epsilon": 1e6, "delta": 1e-5}  # at a small ε the same seed gives the same noise alone
    experiment = private_selection(selection, privacy=budget)
    replies = []
    for shift in (0, 1):
        original = client_app.ClientData
        monkeypatch.setattr(
            client_app,
            "ClientData",
            lambda x, y, *rest, s=shift, site=original: site(x, np.roll(y, s), *rest),
        )
        replies.append(train(grid(experiment), start(experiment)).content)
        monkeypatch.setattr(client_app, "ClientData", original)
    one, other = replies
    assert set(one.metric_records[names.METRICS]) == {names.RECORDS}  # no loss
    assert one.metric_records == other.metric_records
    assert one.config_records == other.config_records
    assert one.array_records != other.array_records


@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_training_that_diverged_is_not_told_from_others(
    selection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = private_selection(selection)
    place = workplace.read_workplace(tuple(sorted(to_run_config(experiment).items())))
    for broken in (np.nan, np.inf, -np.inf):
        start = starting_weights(place.experiment, place.federation)
        diverged = np.full(place.size, broken, np.float32)
        with monkeypatch.context() as patch:
            patch.setattr(type(place.trainer), "fit", lambda *_, change=diverged: Fit(change))
            reply = train(grid(experiment), start)
        assert not reply.has_error()
        assert np.isfinite(change(reply, place.size).values).all()


@pytest.mark.parametrize("selection", SELECTIONS)
def test_everything_may_be_selected(selection: str) -> None:
    experiment = private_selection(selection)
    tables = experiment.tables()
    tables["strategy"]["upload_fraction"] = 1.0
    tables["privacy"]["budget_epsilon"] = 1e9
    everything = build(tables)
    found = change(train(grid(everything), start(everything)), start(everything).size)
    assert len(found) == found.size or selection == "sparse_vector"
    tables["strategy"] |= {"threshold": 0.0} if selection == "sparse_vector" else {}
    most = change(train(grid(build(tables)), start(everything)), start(everything).size)
    assert len(most) > 0.4 * most.size


def test_what_is_uploaded_is_the_mechanism_s_and_within_its_bounds() -> None:
    for variant in ("proved", "paper", "paper_as_printed"):
        experiment = private_selection("sparse_vector", variant=variant)
        found = change(train(grid(experiment), start(experiment)), start(experiment).size)
        assert 0 < len(found) <= int(0.1 * found.size)
        assert np.abs(found.values).max() <= np.float32(0.01)
    experiment = private_selection("random_mask")
    masks = [
        change(train(grid(experiment), start(experiment), node), start(experiment).size).indices
        for node in (1, 2)
    ]
    assert all(mask is not None and len(mask) == int(0.1 * start(experiment).size) for mask in masks)
    assert not np.array_equal(*masks)
