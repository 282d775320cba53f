"""Which trainer goes with which strategy and exchange: the table of docs/combinations.md, and that it is so.

`python -m tests.experiment.test_grid` writes the table anew.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fed_dp.errors import ConfigError
from fed_dp.experiment import Experiment, build
from tests.conftest import some
from tests.simulations.test_simulate import run

PAGE = Path(__file__).parent.parent.parent / "docs" / "combinations.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
GAUSSIAN = {"budget_epsilon": 8.0, "delta": 1e-5}
LAPLACE = {"budget_epsilon": 8.0}
PAPER = {"budget_epsilon": 8.0, "variant": "paper"}
SMALL = {"batch_size": 100}

Tables = dict[str, Any]
# Each form of a trainer: the network it trains, its own options, its privacy.
FORMS: dict[str, tuple[Tables, Tables, Tables]] = {
    "sgd": ({"name": "linear"}, {"name": "sgd"}, {}),
    "psgd": ({"name": "linear"}, {"name": "psgd", "sample_rate": 0.25}, GAUSSIAN),
    "psgd, learnt encoder": (
        {"name": "scattering", "components": 20, "groups": 27, "unit": False},
        {"name": "psgd", "sample_rate": 0.25, "clipping": "automatic"},
        GAUSSIAN,
    ),
    "psgd, on a paper's network": (
        {"name": "cdbn", "filters": 2, "hidden": 8},
        {"name": "psgd", "sample_rate": 0.25, "local_steps": 1},
        GAUSSIAN,
    ),
    "dpa": ({"name": "scattering-random", "features": 20}, {"name": "dpa"}, GAUSSIAN),
    "dpa, learnt encoder": ({"name": "scattering", "components": 20}, {"name": "dpa"}, GAUSSIAN),
    "pcdbn": ({"name": "patch-filters", "filters": 3, "components": 20}, {"name": "pcdbn"}, GAUSSIAN),
    "adlm": ({"name": "class-sums"}, {"name": "adlm"}, LAPLACE),
    "ilm": ({"name": "relevant-scattering", "features": 20}, {"name": "ilm"}, GAUSSIAN),
    "svm, hybrid": ({"name": "rbf", "features": 20}, {"name": "svm"}, GAUSSIAN),
    "svm, private": ({"name": "rbf", "features": 20}, {"name": "svm", "frequencies": "random"}, LAPLACE),
    "dpme": ({"name": "logistic"}, {"name": "dpme", "attributes": (20, 28, 36)}, LAPLACE),
    "filter-priority": (
        {"name": "logistic"},
        {"name": "filter-priority", "attributes": (20, 28, 36)},
        LAPLACE,
    ),
    "dpa, as its paper": ({"name": "auto-encoder", "hidden": 8, "layers": 1}, {"name": "dpa"} | SMALL, PAPER),
    "pcdbn, as its paper": ({"name": "cdbn", "filters": 2, "hidden": 8}, {"name": "pcdbn"} | SMALL, PAPER),
    "adlm, as its paper": ({"name": "adlm-cnn", "filters": 2, "hidden": 8}, {"name": "adlm"} | SMALL, PAPER),
    "ilm, as its paper": ({"name": "adlm-cnn", "filters": 2, "hidden": 8}, {"name": "ilm"} | SMALL, PAPER),
}
NOISELESS = {
    f"{name}, no noise": (model, {**trainer, "perturb": False}, {})
    for name, (model, trainer, _) in FORMS.items()
    if not name.startswith(("sgd", "psgd"))
}
ROWS = FORMS | NOISELESS
PUBLIC = ("adlm", "svm, hybrid")  # rows that need public records

EXCHANGES = ("round_robin", "random_order", "asynchronous", "parallel", "free_running")
COLUMNS: dict[str, Tables] = {
    "averaging": {"name": "averaging"},
    "statistics": {"name": "statistics"},
    **{f"dssgd, {exchange}": {"name": "dssgd", "exchange": exchange} for exchange in EXCHANGES},
    "dssgd, sparse_vector": {"name": "dssgd", "selection": "sparse_vector", "bound": 0.01},
    "dssgd, random_mask": {"name": "dssgd", "selection": "random_mask", "clip": 1.0},
    "standalone": {"name": "standalone"},
    "centralised": {"name": "centralised"},
    "public": {"name": "public"},
}
CELLS = [(row, column) for row, column in product(ROWS, COLUMNS)]


def combined(row: str, column: str) -> Experiment:
    """A few small rounds of it."""
    model, trainer, privacy = ROWS[row]
    if COLUMNS[column].get("selection") and not privacy:
        privacy = GAUSSIAN
    tables: Tables = {"seed": 1, "rounds": 4, "evaluate_every": 4, "clients": {"count": 3}, "model": model}
    if row.startswith(PUBLIC) or column == "public":
        tables["data"] = {"public_records": 100}
    return build({**tables, "trainer": trainer, "strategy": COLUMNS[column], "privacy": privacy})


def reason(error: ConfigError) -> str:
    """Why something is refused, without the names of this cell's own parts."""
    text = str(error).removeprefix("experiment: ")
    for model, trainer, _ in ROWS.values():
        text = text.replace(f"model.name = {model['name']!r}", "model.name")
        text = text.replace(f"trainer.name = {trainer['name']!r}", "trainer.name")
    return text


def cells() -> dict[tuple[str, str], str]:
    """What is refused, and why; empty where it is not."""
    found = {}
    for row, column in CELLS:
        try:
            combined(row, column)
            found[row, column] = ""
        except ConfigError as error:
            found[row, column] = reason(error)
    return found


def page() -> str:
    """The table, and every reason once."""
    found = cells()
    reasons = list(dict.fromkeys(why for why in found.values() if why))
    lines = ["| | " + " | ".join(COLUMNS) + " |", "| --- |" + " :-: |" * len(COLUMNS)]
    for row in ROWS:
        marks = [
            f"{reasons.index(found[row, column]) + 1}" if found[row, column] else "✓" for column in COLUMNS
        ]
        lines.append(f"| {row} | " + " | ".join(marks) + " |")
    refused = sum(map(bool, found.values()))
    lines += ["", f"{len(found) - refused} work, {refused} are refused. What each refusal says:", ""]
    lines += [f"{number}. {why}" for number, why in enumerate(reasons, 1)]
    return "\n".join(lines) + "\n"


def test_the_page_says_what_goes_together_and_why_the_rest_does_not() -> None:
    text = PAGE.read_text()
    assert text.split(BEGIN)[1].split(END)[0] == page()


ALLOWED = [cell for cell, why in cells().items() if not why]
DISTINCT = [
    ("psgd, learnt encoder", "averaging"),
    ("psgd, learnt encoder", "dssgd, round_robin"),
    ("psgd, on a paper's network", "averaging"),
    ("dpa, learnt encoder", "dssgd, asynchronous"),
    ("ilm", "dssgd, parallel"),
    ("svm, private", "dssgd, free_running"),
    ("pcdbn, as its paper", "dssgd, random_order"),
    ("adlm, as its paper", "dssgd, parallel"),
    ("pcdbn, no noise", "dssgd, sparse_vector"),
    ("svm, hybrid, no noise", "dssgd, random_mask"),
    ("dpa, as its paper, no noise", "dssgd, sparse_vector"),
    ("ilm, as its paper, no noise", "dssgd, random_mask"),
]


@pytest.mark.parametrize(("row", "column"), some(ALLOWED, DISTINCT))
def test_what_goes_together_runs_and_costs_what_was_budgeted(row: str, column: str, tmp_path: Path) -> None:
    experiment = combined(row, column)
    _, summary = run(experiment, tmp_path)
    assert summary["failures"] == 0
    assert summary["rounds"] == 4
    if not experiment.private:
        assert summary["privacy"] is None
        return
    privacy = summary["privacy"]
    assert 0 < privacy["epsilon_total"] <= 8.0 * (1 + 1e-9)
    of_strategy = COLUMNS[column].get("selection") is not None
    assert privacy["unit"] == ("participant" if of_strategy else "record")
    claimed = row.endswith("as its paper")
    assert privacy["guarantee"] == ("claimed" if claimed else "proved")


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + page() + END + rest.split(END)[1])
