"""A real site's ClientApp under its own file: what it does, what it tells, what it refuses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict

from fed_dp.accounting import Unprotected, from_json
from fed_dp.clients import app as client_app
from fed_dp.clients import memory, redaction, workplace
from fed_dp.clients.ledger_session import SiteLedgerSession
from fed_dp.clients.memory import OnDisk
from fed_dp.clients.site_file import SiteFile
from fed_dp.data import FolderOptions, read_part
from fed_dp.errors import DataError, FedDpError, PrivacyError, SiteRefused
from fed_dp.experiment import build, to_run_config
from fed_dp.sharing import message as names
from fed_dp.sharing.codec import decode
from fed_dp.sharing.update import SparseUpdate
from fed_dp.simulations.grid import RUN_ID, identify
from fed_dp.strategies.site_strategy import record
from tests.clock import HANG
from tests.deploy.federation import COLUMNS, RECORDS, Federation, tables, with_noise

SIZE = 21


class Asked:
    """Site a, asked by a server; every answer is that of a process that has just started."""

    def __init__(self, folder: Path) -> None:
        identify()
        self.federation = Federation(folder)
        self.node = {names.SITE: str(self.federation.site("a") / "site.toml")}

    def edit(self, old: str, new: str) -> None:
        self.federation.edit("a", old, new)

    def ask(self, content: dict[str, Any], kind: str, records: RecordDict | None = None) -> Message:
        workplace.read_workplace.cache_clear()
        config = dict(to_run_config(build(content)))
        message = Message(records or RecordDict(), 1, kind, group_id="1")
        return client_app.app(message, Context(RUN_ID, 1, dict(self.node), RecordDict(), config))

    def describe(self, content: dict[str, Any]) -> Message:
        return self.ask(content, MessageType.QUERY)

    def train(
        self, content: dict[str, Any], turn: int = 1, weights: np.ndarray | SparseUpdate | None = None
    ) -> Message:
        return self.ask(content, MessageType.TRAIN, question(turn, weights))

    def score(self, content: dict[str, Any]) -> Message:
        return self.ask(content, MessageType.EVALUATE, question(1, None))

    @property
    def charges(self) -> int:
        return self.federation.ledger("a").read()[0].number


def question(turn: int, weights: np.ndarray | SparseUpdate | None) -> RecordDict:
    sent = record(np.zeros(SIZE, np.float32) if weights is None else weights)
    return RecordDict(
        {names.ARRAYS: sent, names.CONFIG: ConfigRecord({names.ROUND: turn, names.LEDGER_HEAD: ""})}
    )


def sent(reply: Message) -> bytes:
    data: bytes = reply.content.array_records[names.ARRAYS][names.CHANGE].data
    return data


@pytest.fixture
def site(tmp_path: Path) -> Asked:
    return Asked(tmp_path)


PRIVATE = with_noise()


@pytest.mark.parametrize(
    ("edit", "content", "says"),
    [
        (('"sgd", ', ""), tables(), "trainer.name = 'sgd': this site allows psgd, dpa"),
        (("without_noise = true", "without_noise = false"), tables(), "'sgd' adds no noise"),
        (
            None,
            with_noise(privacy={"budget_epsilon": 3.0, "delta": 1e-5}),
            "privacy.noise_source = 'simulation' is seeded",
        ),
        (
            None,
            tables(
                strategy={"name": "dssgd", "selection": "sparse_vector", "bound": 0.1},
                privacy={"budget_epsilon": 3.0, "variant": "paper_as_printed", "noise_source": "secure"},
            ),
            "no site releases what is refuted",
        ),
        (
            ("upload_fraction = 1.0", "upload_fraction = 0.2"),
            tables(),
            "0.3 (θ_u): this site shares at most 0.2",
        ),
        (
            ("upload_fraction = 1.0", "upload_fraction = 0.2"),
            tables(strategy={"name": "averaging"}),
            "upload_fraction = 1 (θ_u): this site shares at most 0.2",
        ),
        (("bound = 1000.0", "bound = 0.5"), tables(), "strategy.bound = 1000 (γ)"),
        (None, tables(clients={"count": 10**9}), "clients.count = 1e+09: this site allows at most 10000"),
        (None, tables(rounds=10**8), "rounds = 1e+08: this site allows at most 10000 (allow.rounds)"),
        (None, tables(trainer={"name": "sgd", "local_epochs": 101}), "trainer.local_epochs = 101: this site"),
        (
            None,
            tables(
                trainer={"name": "psgd", "sample_rate": 1e-6},
                privacy={"budget_epsilon": 1.0, "delta": 1e-5, "noise_source": "secure"},
            ),
            "trainer.sample_rate = 1e+06: this site allows at most 10000 (allow.steps)",
        ),
        (
            None,
            tables(
                rounds=200,
                trainer={"name": "psgd", "sample_rate": 1e-3},
                privacy={"budget_epsilon": 1.0, "delta": 1e-5, "noise_source": "secure"},
            ),
            "rounds × steps of a round = 200000: this site allows at most 100000 (allow.total_steps)",
        ),
        (
            None,
            tables(
                model={"name": "rbf"},
                trainer={"name": "svm", "frequencies": "random", "cost": 1e6},
                strategy={"name": "averaging"},
                privacy={"budget_epsilon": 1.0, "noise_source": "secure"},
            ),
            "(allow.steps)",
        ),
        (
            None,
            tables(data={**tables()["data"], "categories": {"x0": [str(k) for k in range(5000)]}}),
            "inputs of data.bounds and data.categories = 5000: this site allows at most 4096 (allow.width)",
        ),
        (
            None,
            with_noise(privacy={"budget_epsilon": 1e-4, "delta": 1e-5, "noise_source": "secure"}),
            "privacy.budget_epsilon = 0.0001: this site allows at least 0.001 (allow.least_epsilon)",
        ),
        (
            None,
            tables(data={**tables()["data"], "classes": 10**6}),
            "data.classes = 1e+06: this site allows at most 4096 (allow.width)",
        ),
        (
            None,
            tables(
                model={"name": "random-features", "features": 10_000},
                trainer={"name": "dpa"},
                strategy={"name": "statistics"},
                privacy={"budget_epsilon": 1.0, "noise_source": "secure"},
            ),
            "model.features = 10000: this site allows at most 4096 (allow.width)",
        ),
        (("epsilon = 100.0", "epsilon = 200.0"), PRIVATE, "was made for ε = 100"),
        (("client = 0", "clint = 0"), PRIVATE, "this site's own file cannot be used"),
    ],
)
def test_what_the_file_does_not_allow_is_refused_and_costs_nothing(
    site: Asked, edit: tuple[str, str] | None, content: dict[str, Any], says: str
) -> None:
    if edit is not None:
        site.edit(*edit)
    with pytest.raises(SiteRefused) as caught:
        site.train(content)
    assert says in str(caught.value)
    assert "nothing was sent" in str(caught.value)
    assert site.charges == 0


def test_what_is_refused_is_refused_before_the_records_are_opened(site: Asked) -> None:
    site.edit("bound = 1000.0", "bound = 0.5")
    answers = []
    for there in (True, False):
        if not there:
            (site.federation.site("a") / "data" / "train.csv").unlink()
        answers.append(site.describe(tables()).content)
        with pytest.raises(SiteRefused, match=r"strategy\.bound"):
            site.train(tables())
        with pytest.raises(SiteRefused, match=r"strategy\.bound"):
            site.score(tables())
    assert answers[0] == answers[1]
    assert answers[0].metric_records[names.METRICS] == {names.PARTITION: 0, names.RECORDS: 0}
    assert "strategy.bound" in str(answers[0].config_records[names.CONFIG][names.REFUSED])


@pytest.mark.parametrize("kind", ["describe", "train"])
def test_bounds_that_overflow_are_no_oracle(site: Asked, kind: str) -> None:
    """Whether one record has a number in a column was told by whether the site answered, uncharged."""
    path = site.federation.site("a") / "data" / "train.csv"
    first, *rest = path.read_text().splitlines()
    config = dict(to_run_config(build(PRIVATE)))
    whole = json.loads(str(config["experiment-json"]))
    whole["data"]["bounds"] = [-1.5e308, 1.5e308]
    config["experiment-json"] = json.dumps(whole)
    told = set()
    for cell in ("", "1"):
        lines = [",".join([cell, *line.split(",")[1:]]) for line in rest]
        path.write_text("\n".join([first, *lines]) + "\n")
        workplace.read_workplace.cache_clear()
        message = Message(
            question(1, None), 1, getattr(MessageType, {"describe": "QUERY"}.get(kind, "TRAIN"))
        )
        try:
            client_app.app(message, Context(RUN_ID, 1, dict(site.node), RecordDict(), config))
            told.add("answered")
        except FedDpError as error:
            told.add(str(error))
    assert len(told) == 1
    assert site.charges == 0


def test_just_what_it_allows_is_done(site: Asked) -> None:
    site.edit("upload_fraction = 1.0", "upload_fraction = 0.3")
    site.edit("bound = 1000.0", "bound = 0.01")
    content = tables(strategy={**tables()["strategy"], "bound": 0.01})
    update = decode(sent(site.train(content)), size=SIZE, most=SIZE)
    assert len(update) == int(0.3 * SIZE)
    assert np.abs(update.values).max() <= np.float32(0.01)


def told_records(site: Asked, content: dict[str, Any]) -> int:
    count = site.describe(content).content.metric_records[names.METRICS][names.RECORDS]
    assert isinstance(count, int)
    return count


def test_counts_and_metrics_are_told_only_if_the_file_says_so(site: Asked) -> None:
    told = site.describe(tables()).content
    assert told.metric_records[names.METRICS][names.RECORDS] == RECORDS
    assert told.config_records[names.CONFIG][names.SCORES] is False
    assert set(site.train(tables()).content.metric_records[names.METRICS]) == {names.RECORDS}  # no loss
    with pytest.raises(SiteRefused, match="tells no scores"):
        site.score(tables())
    site.edit("metrics = false", "metrics = true")
    site.edit("records = true", "records = false")
    told = site.describe(tables()).content
    assert told.metric_records[names.METRICS][names.RECORDS] == 0
    assert told.config_records[names.CONFIG][names.SCORES] is True
    metrics = site.train(tables(seed=8)).content.metric_records[names.METRICS]
    assert metrics[names.RECORDS] == 0
    assert "loss" in metrics
    assert "loss" not in site.train(PRIVATE).content.metric_records[names.METRICS]  # noise comes after it


PSGD = tables(
    trainer={"name": "psgd"},
    strategy={"name": "averaging"},
    privacy={"budget_epsilon": 9.0, "delta": 1e-5, "noise_source": "secure"},
)


def test_a_site_that_hides_its_number_of_records_divides_by_a_declared_one_or_not_at_all(site: Asked) -> None:
    """The noise in a mean would tell it; and what it tells in one experiment is not protected in another."""
    declared = {**PSGD, "data": {**PSGD["data"], "expected_records": 50}}
    assert told_records(site, PSGD) == RECORDS
    with pytest.raises(SiteRefused, match=r"data\.expected_records is set: .*nothing was sent"):
        site.train(declared)
    site.edit("records = true", "records = false")
    svm = {**PSGD, "data": {**PSGD["data"], "classes": 2}, "model": {"name": "rbf"}}
    svm["trainer"] = {"name": "svm", "frequencies": "random"}
    for content in (PSGD, svm):  # both divide by their number
        with pytest.raises(SiteRefused, match=r"data\.expected_records is missing: .*nothing was sent"):
            site.train(content)
    assert site.charges == 0
    assert told_records(site, declared) == 50
    reply = site.train(declared)
    assert reply.content.metric_records[names.METRICS][names.RECORDS] == 50
    events = str(reply.content.config_records[names.CONFIG][names.EVENTS])
    assert from_json(events)[0].stated.neighbours == "add/remove one"


@pytest.mark.parametrize("turn", [True, False, 1.0, "1", 0, -1, 2**60])
def test_a_round_that_is_none_is_refused_before_it_is_charged(site: Asked, turn: Any) -> None:
    """True is an int to Python: it was charged, and then the ledger could not be read ever after."""
    asked = question(1, None)
    asked.config_records[names.CONFIG][names.ROUND] = turn
    with pytest.raises(FedDpError, match="expected a whole number from 1"):
        site.ask(PRIVATE, MessageType.TRAIN, asked)
    assert site.charges == 0
    site.train(PRIVATE)
    assert site.charges == 1


def test_an_experiment_has_no_more_rounds_than_it_says(site: Asked) -> None:
    with pytest.raises(FedDpError, match="round = 4: the experiment has 3 rounds"):
        site.train(PRIVATE, 4)
    assert site.charges == 0


def test_what_is_kept_between_rounds_is_two_files_in_whichever_order_a_server_asks(site: Asked) -> None:
    strategy = {**tables()["strategy"], "download_fraction": 0.5, "upload_fraction": 1.0}
    content = tables(strategy=strategy, rounds=9)
    for turn in (9, 8, 7, 6, 5):
        site.train(content, turn)
    assert len(list((site.federation.site("a") / "memory").iterdir())) == 2


def test_where_a_participant_is_protected_so_is_the_number_of_its_records(site: Asked) -> None:
    assert told_records(site, PRIVATE) == 0
    assert site.train(PRIVATE).content.metric_records[names.METRICS][names.RECORDS] == 0


def test_what_left_without_noise_stands_in_the_ledger(site: Asked) -> None:
    mark = site.train(tables()).content.config_records[names.CONFIG][names.LEDGER_HEAD]
    account, [entry] = site.federation.ledger("a").read()
    assert account.ledger_head == mark  # which the server remembers
    assert account.spent == math.inf
    assert (entry.event.guarantee, entry.event.stated.status) == ("none", "none")
    assert entry.event.release == Unprotected("upload")


# ------------------------------------------------------------------------------------ scores


@pytest.fixture
def scoring(site: Asked) -> Asked:
    site.edit("metrics = false", "metrics = true")
    return site


def scores(site: Asked, content: dict[str, Any], weights: np.ndarray | None = None) -> dict[str, Any]:
    reply = site.ask(content, MessageType.EVALUATE, question(1, weights))
    return dict(reply.content.metric_records[names.METRICS])


def test_scores_are_told_once_for_an_experiment_that_the_site_took_part_in(scoring: Asked) -> None:
    """Nine scores of models of a server's choice read the labels of eight test records."""
    with pytest.raises(SiteRefused, match="took no part in this experiment"):
        scores(scoring, tables())
    assert scoring.charges == 0
    scoring.train(tables())
    found = scores(scoring, tables())
    assert found[names.RECORDS] == 20
    assert 0 <= found["accuracy"] <= 1
    assert all(round(value, 2) == value for value in found.values())
    assert scores(scoring, tables()) == found  # asked again, the same
    with pytest.raises(SiteRefused, match="scores of another model of this experiment"):
        scores(scoring, tables(), np.ones(SIZE, np.float32))
    account, entries = scoring.federation.ledger("a").read()
    assert account.scores == 1
    assert entries[-1].event.release == Unprotected("scores")


def test_scores_are_as_many_in_all_as_the_file_says(scoring: Asked) -> None:
    scoring.edit("metrics = true", "scores = 2\nmetrics = true")
    for seed in (1, 2, 3):
        scoring.train(tables(seed=seed))
        if seed < 3:
            scores(scoring, tables(seed=seed))
    with pytest.raises(SiteRefused, match=r"told scores 2 times: it tells no more \(share\.scores\)"):
        scores(scoring, tables(seed=3))


def test_the_file_is_consulted_before_scores_are_computed(scoring: Asked) -> None:
    scoring.train(tables())
    scoring.edit("without_noise = true", "without_noise = false")
    with pytest.raises(SiteRefused, match="adds no noise"):
        scores(scoring, tables())


def test_a_private_experiment_is_scored_after_its_release(scoring: Asked) -> None:
    scoring.train(PSGD)
    assert scores(scoring, PSGD)[names.RECORDS] == 20
    account = scoring.federation.ledger("a").read()[0]
    assert (account.number, account.scores, account.unprotected) == (2, 1, 0)
    assert account.spent < math.inf


# ------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("fault", ["missing", "damaged", "rolled back", "memory", "budget", "lock"])
def test_no_error_names_a_path_of_this_machine(
    site: Asked, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    home = site.federation.site("a")
    ledger, content = home / "ledger.sqlite", PRIVATE
    if fault == "memory":
        strategy = {**tables()["strategy"], "download_fraction": 0.5, "upload_fraction": 1.0}
        content = tables(strategy=strategy)
    site.train(content)
    if fault == "missing":
        ledger.unlink()
    elif fault == "damaged":
        ledger.write_bytes(b"damaged" * 999)
    elif fault == "rolled back":
        (home / "ledger.last").write_text("0" * 32 + " 1:" + "0" * 64)
    elif fault == "memory":
        [kept] = (home / "memory").iterdir()
        kept.write_bytes(b"damaged")
    elif fault == "budget":
        site.edit("epsilon = 100.0", "epsilon = 5.0")
    elif fault == "lock":
        (home / "ledger.sqlite.lock").unlink(missing_ok=True)
        (home / "ledger.sqlite.lock").mkdir()
    with pytest.raises(PrivacyError) as caught:
        site.train(content, 2)
    assert "/" not in str(caught.value)
    assert str(home) in caplog.text  # but the site's own log does


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ledger /srv/my site/a.sqlite is missing", "ledger a.sqlite is missing"),
        ("/a/b.npz is damaged (OSError); nothing", "b.npz is damaged (OSError); nothing"),
        ("add/remove one of 1/150", "add/remove one of 1/150"),
        ("neither '/a/b' nor (/c/d)", "neither 'b' nor (d)"),
        ("ledger /home/Dr. Who, MD's/site/ledger.sqlite is missing", "ledger ledger.sqlite is missing"),
        ("file:///home/Dr. Who, MD's/site/ledger.sqlite-wal", "file://ledger.sqlite-wal"),
    ],
)
def test_of_a_path_the_last_part_is_left(text: str, told: str) -> None:
    assert redaction.without_paths(text, "/home/Dr. Who, MD's/site/ledger.sqlite") == told


def test_an_error_of_another_kind_is_told_by_its_kind(site: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise FileNotFoundError(2, "No such file", "/proc/secret-place")

    monkeypatch.setattr(memory.OnDisk, "keep", fail)
    with pytest.raises(PrivacyError, match=r"^the site failed \(FileNotFoundError\); nothing was sent$"):
        site.train(PRIVATE)


def test_a_server_cannot_choose_which_records_are_scored(site: Asked) -> None:
    site.edit("metrics = false", "metrics = true")
    (site.federation.site("a") / "data" / "test.csv").unlink()
    greedy = tables(data={**tables()["data"], "test_fraction": 0.99})
    told = site.describe(greedy).content
    assert told.metric_records[names.METRICS][names.RECORDS] == RECORDS  # all are trained on
    assert told.config_records[names.CONFIG][names.SCORES] is False
    with pytest.raises(SiteRefused, match="no test records"):
        site.score(greedy)


def test_nothing_of_the_records_or_columns_is_told_or_logged(
    site: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    path = site.federation.site("a") / "data" / "train.csv"
    good = path.read_text()
    prying = tables(data={**tables()["data"], "label": "hiv"})
    by_column = tables(data={**tables()["data"], "bounds": {column: [-3.0, 3.0] for column in COLUMNS}})
    for content, text in ((by_column, good.replace("x5", "syphilis")), (prying, good)):
        path.write_text(text)
        with pytest.raises(DataError) as caught:
            site.train(content)
        for words in (str(caught.value), caplog.text):
            assert "cannot be used (" in words
            assert not any(word in words for word in ("Smith", "syphilis", "x1", "label", "train.csv"))


@pytest.mark.parametrize(
    "data",
    [
        {"categories": {"x0": ["someone"]}, "bounds": {c: [-3.0, 3.0] for c in COLUMNS[1:]}},
        {"categories": {"x0": ["Mrs Smith", "1"]}, "bounds": {c: [-3.0, 3.0] for c in COLUMNS[1:]}},
        {"classes": 2},
        {"classes": ["0", "nobody"]},
        {"gaps": True},
        {"label": "x1"},
        {"client": "x1"},
        {"label": None, "classes": None, "person": "x0", "time": "x1", "rises": "x2"},
        {"label": None, "classes": None, "person": "label", "time": "x1", "rises": "x2", "window": 50},
    ],
)
def test_whether_it_answers_says_nothing_about_which_values_occur(site: Asked, data: dict[str, Any]) -> None:
    """A server that could make reading fail on some values would learn, uncharged, whether they occur."""
    path = site.federation.site("a") / "data" / "train.csv"
    good = path.read_text().splitlines()
    content = with_noise(data={**tables()["data"], **data})
    odd = ["Mrs Smith", "", "NA", "1e999", "-inf", "0x1", "nobody"]
    answers = []
    for text in (good, [*good, *(",".join([word] * len(good[0].split(","))) for word in odd)]):
        path.write_text("\n".join(text) + "\n")
        told = site.describe(content).content.metric_records[names.METRICS]
        answers.append(told[names.RECORDS])  # which is protected, too, where a participant is
        size = len(decode_size(site, content))
        assert site.train(content, weights=np.zeros(size, np.float32)).has_content()
    assert answers == [0, 0]


def decode_size(site: Asked, content: dict[str, Any]) -> bytes:
    """As many bytes as the model has parameters."""
    config = tuple(sorted(to_run_config(build(content)).items()))
    return bytes(workplace.read_workplace(config, SiteFile.read(Path(site.node[names.SITE]))).size)


def test_one_record_changes_nothing_of_how_the_others_are_read(tmp_path: Path) -> None:
    """Types that are guessed for a whole column would: an empty cell turns 1 into 1.0."""
    options = FolderOptions(
        tmp_path, {"a": (0.0, 9.0)}, 2, "y", categories={"b": ("1", "2")}, gaps=True, lenient=True
    )
    rows = ["a,b,y", "1,1,0", "2,2,1"]
    seen = []
    for more in ([], [",,"], ["x,x,x"], ["1e5,1.0,9"]):
        (tmp_path / "train.csv").write_text("\n".join(rows + more) + "\n")
        found = read_part("train", options)
        seen.append((found.x[:2].tobytes(), found.y[:2].tobytes()))
    assert len(set(seen)) == 1


def test_two_copies_of_a_question_at_once_are_charged_once(site: Asked) -> None:
    """The one that trains does not end before all three have asked."""
    meeting = site.federation.folder / "meeting"
    meeting.mkdir()
    command = [sys.executable, "-c", ASK, str(site.node[names.SITE]), json.dumps(PRIVATE), str(meeting)]
    copies = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    sent_by = {copy.communicate(timeout=HANG)[0] for copy in copies}
    assert len(sent_by) == 1
    assert site.charges == 1


ASK = """
import json, os, sys
from pathlib import Path
from tests.clock import wait_until
from tests.clients.test_site_policy import question, sent, client_app, names, identify, RUN_ID
from flwr.app import Context, Message, MessageType, RecordDict
from fed_dp.experiment import build, to_run_config
identify()
fit, meeting = client_app.Pending.fit, Path(sys.argv[3])
def slow(pending):
    wait_until(lambda: len(list(meeting.iterdir())) == 3)
    return fit(pending)
client_app.Pending.fit = slow
config = dict(to_run_config(build(json.loads(sys.argv[2]))))
message = Message(question(1, None), 1, MessageType.TRAIN, group_id="1")
(meeting / str(os.getpid())).touch()
reply = client_app.app(message, Context(RUN_ID, 1, {names.SITE: sys.argv[1]}, RecordDict(), config))
print(sent(reply).hex())
"""


def test_a_repeated_question_gets_the_same_bytes_with_noise_and_without(
    site: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = site.train(PRIVATE)
    assert site.charges == 1
    assert sent(site.train(PRIVATE)) == sent(first)
    assert site.charges == 1
    other = np.full(SIZE, 0.1, np.float32)
    assert sent(site.train(PRIVATE, weights=other)) != sent(first)
    assert site.charges == 2
    plain = site.train(tables())
    assert site.charges == 3  # of which the third says that nothing protected what was sent
    monkeypatch.setattr(client_app.Pending, "fit", None)  # nothing is trained again
    assert sent(site.train(tables())) == sent(plain)
    assert site.charges == 3


def test_what_a_site_keeps_between_rounds_outlives_its_process(site: Asked) -> None:
    strategy = {**tables()["strategy"], "download_fraction": 0.5, "upload_fraction": 1.0}
    trainer = {**tables()["trainer"], "learning_rate_decay": 0.1}
    content = tables(strategy=strategy, trainer=trainer, rounds=4)
    nothing = SparseUpdate(np.empty(0, np.int64), np.empty(0, np.float32), SIZE)

    def change(turn: int) -> np.ndarray:
        return decode(sent(site.train(content, turn, nothing)), size=SIZE, most=SIZE).values

    changes = [change(turn) for turn in (1, 2, 3)]
    assert not np.array_equal(changes[0], changes[1])
    kept = sorted((site.federation.site("a") / "memory").iterdir())
    assert len(kept) == 2  # the last turn's, and the one before, from which the last can be repeated
    for path in kept:
        assert path.stat().st_mode & 0o777 == 0o600
    memory = OnDisk(kept[0].parent, build(content).digest, 4, "none")
    own = memory.own()
    assert own is not None
    from fed_dp.experiment.federation import at_site
    from fed_dp.experiment.start import starting_weights

    experiment = build(content)
    members = at_site(experiment, path=site.federation.site("a") / "data", client=0)
    expected = starting_weights(experiment, members)
    for each in changes:
        expected = expected + each
    np.testing.assert_allclose(own, expected, rtol=1e-6)
    assert memory.state()["steps"][0] == 3 * 4  # 60 records in batches of 16
    assert OnDisk(kept[0].parent, "another", 4, "none").own() is None
    kept[1].write_bytes(b"damaged")
    with pytest.raises(PrivacyError, match=r"is damaged \(.*\); nothing was sent"):
        site.train(content, 4, nothing)


def test_a_turn_that_is_repeated_begins_where_it_began(site: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after it had trained, before anything was kept to be sent."""
    strategy = {**tables()["strategy"], "download_fraction": 0.5, "upload_fraction": 1.0}
    content = tables(strategy=strategy)
    nothing = SparseUpdate(np.empty(0, np.int64), np.empty(0, np.float32), SIZE)
    site.train(content, 1, nothing)
    with monkeypatch.context() as patch:

        def die(*_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(SiteLedgerSession, "keep", die)
        with pytest.raises(KeyboardInterrupt):
            site.train(content, 2, nothing)
    again = sent(site.train(content, 2, nothing))
    other = Asked(site.federation.folder.parent / "other")
    other.train(content, 1, nothing)
    assert sent(other.train(content, 2, nothing)) == again


def test_a_site_without_a_ledger_does_nothing(site: Asked) -> None:
    (site.federation.site("a") / "ledger.sqlite").unlink()
    for content in (tables(), PRIVATE):
        with pytest.raises(FedDpError, match="is missing"):
            site.train(content)
