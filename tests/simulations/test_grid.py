from __future__ import annotations

from pathlib import Path

import pytest
from flwr.app import Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fed_dp.errors import BudgetExceeded, ResumeError
from fed_dp.simulations.grid import InProcessGrid, SimulationGrid
from fed_dp.strategies.failures import Failure, failure_of


def counting(*, then: Exception | None = None) -> ClientApp:
    """An app that counts its messages in its state, and may raise after it has."""
    app = ClientApp()

    @app.query()
    def count(message: Message, context: Context) -> Message:
        before = context.state.get("count", MetricRecord({"n": 0}))
        assert isinstance(before, MetricRecord)
        context.state["count"] = MetricRecord({"n": int(str(before["n"])) + 1})
        if then is not None:
            raise then
        return Message(RecordDict({"metrics": context.state["count"]}), reply_to=message)

    return app


def ask(grid: SimulationGrid, *nodes: int) -> list[Message]:
    questions = [Message(RecordDict(), node, MessageType.QUERY, group_id="1") for node in nodes]
    return list(grid.send_and_receive(questions))


def test_a_node_keeps_its_state_between_messages() -> None:
    grid = InProcessGrid(3, {}, counting())
    replies = ask(grid, 1, 2, 1, 1)
    assert [r.content.metric_records["metrics"]["n"] for r in replies] == [1, 1, 2, 3]
    assert [r.metadata.src_node_id for r in replies] == [1, 2, 1, 1]


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ValueError("bad luck"), Failure("ValueError", "ValueError: bad luck")),
        (BudgetExceeded("over budget"), Failure("BudgetExceeded", "over budget")),
    ],
)
def test_an_exception_becomes_an_error_reply_and_changes_no_state(error: Exception, failure: Failure) -> None:
    grid = InProcessGrid(1, {}, counting(then=error))
    (reply,) = ask(grid, 1)
    assert reply.has_error()
    found = failure_of(reply.error)
    assert (found.code, found.reason) == (failure.code, failure.reason)
    assert (str(error) in found.traceback) == isinstance(error, ValueError)  # fed_dp's own say it all
    assert "count" not in grid.contexts[1].state


def test_what_the_nodes_keep_survives_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    grid = InProcessGrid(2, {}, counting())
    ask(grid, 1, 1, 2)
    grid.save(tmp_path, 7)
    again = InProcessGrid(2, {}, counting())
    again.load(tmp_path, 7)
    assert [r.content.metric_records["metrics"]["n"] for r in ask(again, 1, 2)] == [3, 2]
    with pytest.raises(ResumeError, match="holds 2 clients, the experiment 3"):
        InProcessGrid(3, {}, counting()).load(tmp_path, 7)
    with pytest.raises(ResumeError, match="cannot be read"):
        again.load(tmp_path, 8)
    path = tmp_path / "checkpoint" / "clients-000007.pickle"
    for damaged in (path.read_bytes()[:10], b"", b"text", b"cno.such\nmodule\n."):
        path.write_bytes(damaged)
        with pytest.raises(ResumeError, match="cannot be read"):
            again.load(tmp_path, 7)
