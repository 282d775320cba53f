"""What stands between Flower's SuperNode and our program."""

from __future__ import annotations

import pytest

from fed_dp.deploy import supernode
from fed_dp.deploy.supernode import BoundedClock


def test_a_reply_whose_process_died_is_not_waited_for_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(supernode.time, "sleep", slept.append)

    def yield_object_contents() -> None:
        for _ in range(1000):
            BoundedClock.sleep(0.5)

    def patiently() -> None:  # training may take as long as it takes
        for _ in range(1000):
            BoundedClock.sleep(3)

    patiently()
    assert max(slept) == 0.5
    slept.clear()
    with pytest.raises(TimeoutError, match="did not come"):
        yield_object_contents()
    assert sum(slept) == pytest.approx(supernode.LONGEST, abs=1)
    with pytest.raises(TimeoutError):  # and the next one has its own time
        yield_object_contents()


def test_flower_still_has_the_names_that_are_replaced() -> None:
    import inspect

    from flwr.supercore.superexec import run_superexec
    from flwr.supernode import start_client_internal
    from flwr.supernode.runtime import run_clientapp

    for name in ("install_from_fab", "get_project_dir", "get_load_client_app_fn"):
        assert f"{name}(" in inspect.getsource(run_clientapp.run_clientapp)
    assert "get_executor(" in inspect.getsource(run_superexec.run_superexec)
    assert f"def {supernode.HANDING_OVER}(" in inspect.getsource(start_client_internal._push_messages)
    for module in supernode.BEATING:
        found = __import__(module, fromlist=["*"])
        assert "HEARTBEAT_DEFAULT_INTERVAL" in inspect.getsource(found)
    with pytest.raises(SystemExit, match="has no magic"):
        supernode._replaced("flwr.supernode.runtime.run_clientapp", magic=1)


def test_other_tasks_than_messages_are_not_run() -> None:
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec.executor.types import ExecutionSpec

    program = supernode.InstalledAppExecutor(10.0)
    assert program.get_eligible_capacity(set(TaskType))[0] == {TaskType.CLIENT_APP}
    for kind in set(TaskType) - {TaskType.CLIENT_APP}:
        spec = ExecutionSpec(kind, "127.0.0.1:1", "token", True, None, False, None, True, 1)
        assert program.launch(spec).status == "failed"
