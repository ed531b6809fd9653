"""Changes are stored once before any command leaves, whatever disk, server and rivals do."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from pacekeeper.controller.app import controller as app
from pacekeeper.controller.app.controller import Controller
from pacekeeper.controller.ha.leadership import Standalone
from pacekeeper.controller.machine import machine
from pacekeeper.controller.state.events import Command, Event, SaveDecision, Tick
from pacekeeper.controller.state.state import State
from pacekeeper.controller.storage import write_batch
from pacekeeper.controller.storage.postgres import FencedError
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.errors import ConfigError
from pacekeeper.core.incidents.findings import Decision, MitigationLevel
from support.agents import PATIENCE_S, until
from support.stores import execute

FEW, MANY = 3, 60  # rows of `ROW_BYTES`: fewer than fit in `FREE_PAGES`, and more
ROW_BYTES, FREE_PAGES = 4096, 16


def deciding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each event leads to as many decisions as its offset says."""

    def advance(state: State, event: Event, *, config: ControllerConfig, now_s: float) -> Any:
        assert isinstance(event, Tick)
        decision = Decision(level=MitigationLevel.NOTHING, layout=None, reason="r" * ROW_BYTES)
        number = int(event.unix_offset_s or 0)
        return state, [SaveDecision(job="j", step=i, decision=decision) for i in range(number)]

    monkeypatch.setattr(machine, "advance", advance)
    monkeypatch.setattr(app, "STORE_RETRY_S", 0.01)


def refuse_writes(store: Store) -> Callable[[], object]:
    """As a full disk does; the result lets it have room again."""
    ((pages,),) = execute(store, "PRAGMA page_count")
    ((most,),) = execute(store, "PRAGMA max_page_count")
    execute(store, f"PRAGMA max_page_count = {pages + FREE_PAGES}")
    return lambda: execute(store, f"PRAGMA max_page_count = {most}")


def retries(controller: Controller) -> float:
    value = controller.metrics.registry.get_sample_value("pacekeeper_store_retries_total")
    assert value is not None
    return value


class Rivalled(Standalone):
    """A leadership that notes what is reported to it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_lost = False

    def term(self) -> int | None:
        return None if self.is_lost else super().term()

    def lost(self) -> None:
        self.is_lost = True


def played(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    scene: Callable[[Controller, list[Command], Rivalled], Any],
) -> None:
    """A scene with a consuming controller, the commands it executed, and its leadership."""
    deciding(monkeypatch)
    executed = list[Command]()

    async def whole() -> None:
        config = replace(
            ControllerConfig(),
            listen="127.0.0.1:0",
            api_listen="127.0.0.1:0",
            store=str(folder / "store"),
        )
        leadership = Rivalled()
        controller = Controller(config, leadership)
        monkeypatch.setattr(type(controller._executor), "execute", lambda _, c: executed.append(c))
        consuming = asyncio.create_task(controller._consume())
        async with asyncio.timeout(PATIENCE_S):
            await scene(controller, executed, leadership)
        consuming.cancel()
        await controller._close_store()

    asyncio.run(whole())


def test_a_cost_model_that_cannot_be_imported_is_refused_before_anything_is_opened(
    tmp_path: Path,
) -> None:
    config = replace(
        ControllerConfig(),
        listen="127.0.0.1:0",
        api_listen="127.0.0.1:0",
        store=str(tmp_path / "store"),
    )
    config = replace(config, detector=DetectorConfig(cost_model="nowhere.Trees"))
    with pytest.raises(ConfigError, match="No module named 'nowhere'"):
        Controller(config)
    assert list(tmp_path.iterdir()) == []


def test_what_a_full_disk_refused_is_stored_once_before_any_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(controller: Controller, executed: list[Command], office: Rivalled) -> None:
        await controller._put_all([Tick(unix_offset_s=FEW)])
        has_room = refuse_writes(controller.store)
        putting = asyncio.create_task(controller._put_all([Tick(unix_offset_s=MANY)]))
        await until(lambda: retries(controller) >= 4, "it is refused")
        assert len(executed) == FEW and not putting.done()
        waits_s = controller.write_waits_s()
        await until(lambda: retries(controller) >= 5, "it is refused again")
        assert controller.write_waits_s() > waits_s > 0.0, "since the first attempt"
        await controller._thread.run(has_room)
        await putting
        assert len(executed) == FEW + MANY and controller.write_waits_s() == 0.0
        rows = execute(controller.store, "SELECT decision_id FROM decisions ORDER BY decision_id")
        assert [number for (number,) in rows] == [*range(1, FEW + MANY + 1)]

    played(tmp_path, monkeypatch, scene)


def test_a_write_without_an_answer_waits_since_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked, may_answer = threading.Event(), threading.Event()

    def write_all(*values: Any) -> None:
        is_asked.set()
        assert may_answer.wait(PATIENCE_S)
        write_batch.write_all(*values)

    async def scene(controller: Controller, executed: list[Command], office: Rivalled) -> None:
        monkeypatch.setattr(app, "write_all", write_all)
        putting = asyncio.create_task(controller._put_all([Tick(unix_offset_s=FEW)]))
        await until(is_asked.is_set, "the write is asked for")
        assert controller.write_waits_s() > 0.0 and not executed
        may_answer.set()
        await putting
        assert controller.write_waits_s() == 0.0 and len(executed) == FEW

    played(tmp_path, monkeypatch, scene)


def test_no_write_waits_once_an_internal_error_has_ended_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise sa.exc.ProgrammingError("INSERT", None, ValueError("a bug"))

    async def scene(controller: Controller, executed: list[Command], office: Rivalled) -> None:
        monkeypatch.setattr(app, "write_all", failing)
        await controller._put_all([Tick(unix_offset_s=FEW)])
        failures = controller.metrics.registry.get_sample_value("pacekeeper_advance_failures_total")
        assert (failures, executed) == (1.0, [])
        assert controller.write_waits_s() == 0.0

    played(tmp_path, monkeypatch, scene)


def test_a_store_that_accepts_writes_again_after_an_internal_error_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = sa.exc.OperationalError("INSERT", None, sqlite3.OperationalError("full"))
    errors = [full, sa.exc.ProgrammingError("INSERT", None, ValueError("a bug"))]

    def write_all(*values: Any) -> None:
        if errors:
            raise errors.pop(0)
        write_batch.write_all(*values)

    async def scene(controller: Controller, executed: list[Command], office: Rivalled) -> None:
        monkeypatch.setattr(app, "write_all", write_all)
        refusing = controller.metrics.registry.get_sample_value
        await controller._put_all([Tick(unix_offset_s=FEW)])
        assert refusing("pacekeeper_store_refusing", {"reason": "full"}) == 1.0 and not executed
        await controller._put_all([Tick(unix_offset_s=FEW)])
        assert refusing("pacekeeper_store_refusing", {"reason": "full"}) is None
        assert len(executed) == FEW

    played(tmp_path, monkeypatch, scene)


def test_where_another_leads_nothing_is_executed_nor_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fenced(*_: Any) -> None:
        raise FencedError("term 3 is over")

    async def scene(controller: Controller, executed: list[Command], office: Rivalled) -> None:
        monkeypatch.setattr(app, "write_all", fenced)
        putting = asyncio.create_task(controller._put_all([Tick(unix_offset_s=FEW)]))
        await until(lambda: office.is_lost, "the leadership is told")
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not executed and not putting.done()
        assert controller.write_waits_s() > 0.0
        putting.cancel()

    played(tmp_path, monkeypatch, scene)


class Ends:
    """In place of ingest processes and server: which of their ends was asked for."""

    def __init__(self) -> None:
        self.asked = list[str]()

    async def abort(self) -> None:
        self.asked.append("abort")

    async def drain(self) -> None:
        self.asked.append("drain")

    async def stop(self, grace_s: float) -> None:
        self.asked.append("stop")


@pytest.mark.parametrize(("is_lost", "how"), [(False, "drain"), (True, "abort")])
def test_reports_that_can_be_stored_are_waited_for_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool, how: str
) -> None:
    async def scene(controller: Controller, executed: list[Command], office: Rivalled) -> None:
        office.is_lost = is_lost
        ends: Any = Ends()
        await controller._drain(ends, ends, [])
        assert ends.asked == [how, "stop"]

    played(tmp_path, monkeypatch, scene)


def test_a_lost_answer_to_a_commit_leads_to_no_second_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ["lost"]

    def write_all(*values: Any) -> None:
        write_batch.write_all(*values)
        if answers:
            answers.pop()
            raise sa.exc.OperationalError("COMMIT", None, OSError("no answer"))

    async def scene(controller: Controller, executed: list[Command], office: Rivalled) -> None:
        monkeypatch.setattr(controller.store.database, "is_temporary", lambda error: True)
        monkeypatch.setattr(app, "write_all", write_all)
        writing = controller.store._next_decision_id
        await controller._put_all([Tick(unix_offset_s=FEW)])
        assert writing is None and not answers and len(executed) == FEW

    played(tmp_path, monkeypatch, scene)


def test_a_ctrl_c_from_before_it_runs_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio answers a Ctrl-C by cancelling the task, which hears it where it waits next."""
    started: list[str] = []
    monkeypatch.setattr(Controller, "_serve_people", lambda _: started.append("people"))

    async def run() -> None:
        controller = Controller(ControllerConfig(store=str(tmp_path / "c.sqlite")))
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await controller.run()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert started == []
