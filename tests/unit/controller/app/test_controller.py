"""A commit is shipped before anything else runs: no command leaves before the copies have it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from pacekeeper.controller.app import controller as app
from pacekeeper.controller.app.controller import Controller
from pacekeeper.controller.ha.leader_election import LeaseLeadership
from pacekeeper.controller.ha.leadership import Standalone
from pacekeeper.controller.ha.replica import Replica
from pacekeeper.controller.machine import machine
from pacekeeper.controller.state.events import Command, Event, SaveDecision, Tick
from pacekeeper.controller.state.state import State
from pacekeeper.controller.storage.change_log import Change
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.errors import ConfigError
from pacekeeper.core.incidents.findings import Decision, MitigationLevel
from support.agents import PATIENCE_S, until
from support.replication import PaperKeeper

SERVING = health_pb2.HealthCheckResponse.SERVING
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
    execute = store.journal.execute
    (pages,) = execute("PRAGMA page_count").fetchone()
    (most,) = execute("PRAGMA max_page_count").fetchone()
    execute(f"PRAGMA max_page_count = {pages + FREE_PAGES}")
    return lambda: execute(f"PRAGMA max_page_count = {most}")


def number_of_decisions(store: Store | Path) -> int:
    opened = Store.open(store) if isinstance(store, Path) else store
    (number,) = opened.journal.execute("SELECT count(*) FROM decisions").fetchone()
    if isinstance(store, Path):
        opened.close()
    return int(number)


def retries(controller: Controller) -> float:
    value = controller.metrics.registry.get_sample_value("pacekeeper_store_retries_total")
    assert value is not None
    return value


class OneCopy(Standalone):
    """An office with one copy, which stores what is shipped when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.shipped = list[Change]()
        self.stores = asyncio.Event()

    def opened(self, store: Store) -> None:
        super().opened(store)
        store.journal.is_kept = True

    async def ship(self, changes: Sequence[Change]) -> None:
        if changes:
            self.shipped += changes
            await self.stores.wait()


def in_the_gap(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, do: Callable[[], Awaitable[None]]
) -> None:
    """What runs while the controller waits for its health service to show the store as well."""
    real = controller._health.set

    async def set_health(service: str, status: Any) -> None:
        if status == SERVING:
            await do()
        await real(service, status)

    monkeypatch.setattr(controller._health, "set", set_health)


def config_in(folder: Path) -> ControllerConfig:
    config = ControllerConfig()
    return replace(config, listen="127.0.0.1:0", store=str(folder / "store"), tick_interval_s=0.001)


def test_a_cost_model_that_cannot_be_imported_is_refused_before_anything_is_opened(
    tmp_path: Path,
) -> None:
    config = replace(config_in(tmp_path), detector=DetectorConfig(cost_model="nowhere.Trees"))
    with pytest.raises(ConfigError, match="nowhere cannot be imported"):
        Controller(config)
    assert list(tmp_path.iterdir()) == []


def test_no_tick_takes_the_changes_of_commands_that_have_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deciding(monkeypatch)
    ticks = list[None]()

    async def scene() -> None:
        office = OneCopy()
        controller = Controller(config_in(tmp_path), office)
        obeyed = list[Command]()
        monkeypatch.setattr(type(controller._executor), "execute", lambda _, c: obeyed.append(c))
        monkeypatch.setattr(type(controller.history), "on_tick", lambda *_: ticks.append(None))

        async def no_event(event: Event) -> None:
            """The tick waits for no event of its own: it may run at any moment."""

        monkeypatch.setattr(controller, "_put", no_event)

        async def ticks_pass() -> None:
            before = len(ticks)
            await until(lambda: len(ticks) > before + 1 or office.shipped, "ticks pass")

        in_the_gap(controller, monkeypatch, ticks_pass)
        has_room = refuse_writes(controller.store)
        parts = [asyncio.create_task(part) for part in (controller._consume(), controller._tick())]
        putting = asyncio.create_task(controller._put_all([Tick(unix_offset_s=MANY)]))
        await until(lambda: retries(controller) >= 4, "it is refused")
        assert not office.shipped, "nothing is stored"
        has_room()
        await until(lambda: office.shipped, "it is on its way")
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not obeyed and not putting.done(), "the copy has not stored it"
        office.stores.set()
        await putting
        assert len(obeyed) == len(office.shipped) == MANY
        for part in parts:
            part.cancel()
        controller.store.close()

    async def with_patience() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scene()

    asyncio.run(with_patience())


@asynccontextmanager
async def leading(folder: Path) -> AsyncIterator[tuple[Controller, PaperKeeper, str]]:
    """A controller of one term with its intake running, and the address of its copies' service."""
    config, keeper = config_in(folder), PaperKeeper()
    office = LeaseLeadership(keeper, 3, config)  # type: ignore[arg-type]
    controller = Controller(config, office)
    server = grpc.aio.server()
    office.serve(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    consuming = asyncio.create_task(controller._consume())
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield controller, keeper, f"127.0.0.1:{port}"
    finally:
        consuming.cancel()
        await server.stop(None)
        controller.store.close()


def test_after_a_full_disk_leader_and_copy_hold_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deciding(monkeypatch)

    async def scene() -> None:
        async with leading(tmp_path / "leader") as (controller, keeper, address):
            path = tmp_path / "standby" / "store"
            copy = Replica(path, lambda _: None)
            following = asyncio.create_task(copy.follow(address, "b", TlsConfig()))
            await until(lambda: keeper.named and len(keeper.named[-1]) == 2, "it is in sync")
            await controller._put_all([Tick(unix_offset_s=FEW)])
            has_room = refuse_writes(controller.store)
            putting = asyncio.create_task(controller._put_all([Tick(unix_offset_s=MANY)]))
            await until(lambda: retries(controller) >= 4, "it is refused")
            has_room()
            await putting
            assert number_of_decisions(controller.store) == FEW + MANY
            following.cancel()
            copy.close()
            assert number_of_decisions(path) == FEW + MANY

    asyncio.run(scene())


def test_a_standby_that_joins_between_a_commit_and_what_follows_has_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its snapshot holds the transaction: to send that again would double its decisions."""
    deciding(monkeypatch)

    async def scene() -> None:
        async with leading(tmp_path / "leader") as (controller, keeper, address):
            path = tmp_path / "standby" / "store"
            copy = Replica(path, lambda _: None)
            following = list[asyncio.Task[str]]()

            async def a_standby_joins() -> None:
                if not following:
                    hello = copy.follow(address, "b", TlsConfig())
                    following.append(asyncio.create_task(hello))
                    await until(lambda: keeper.named and len(keeper.named[-1]) == 2, "in sync")

            in_the_gap(controller, monkeypatch, a_standby_joins)
            has_room = refuse_writes(controller.store)
            putting = asyncio.create_task(controller._put_all([Tick(unix_offset_s=MANY)]))
            await until(lambda: retries(controller) >= 1, "it is refused")
            has_room()
            await putting
            await controller._put_all([Tick(unix_offset_s=FEW)])  # stored there, too, by now
            assert following
            following[0].cancel()
            copy.close()
            assert number_of_decisions(controller.store) == MANY + FEW
            assert number_of_decisions(path) == MANY + FEW

    asyncio.run(scene())
