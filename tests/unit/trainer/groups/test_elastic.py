"""Groups of a generation over a backend that does what a test says."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from pacekeeper.trainer.groups import elastic, waiting
from pacekeeper.trainer.groups.elastic import Members
from pacekeeper.trainer.groups.group import Group, PeerLost, SingleProcess
from pacekeeper.trainer.groups.waiting import WaitLimits

PATIENCE_S = 60.0
TIMEOUT_S, TICK_S = 30.0, 0.1


class Work:
    """A collective: ends after so many looks, or never; `fails_with` an error then."""

    def __init__(self, ends_after: float = 0.0, fails_with: str = "", stopped_s: float = 0.0):
        self.left, self.fails_with, self.stopped_s = ends_after, fails_with, stopped_s
        self.clock: Clock | None = None

    def is_completed(self) -> bool:
        return self.left <= 0.0

    def wait(self, tick: timedelta | None = None) -> None:
        if self.left > 0.0:
            self.left -= 1.0
            if self.clock is not None and tick is not None:
                self.clock.now_s += tick.total_seconds() + self.stopped_s
                self.stopped_s = 0.0
            raise RuntimeError("Operation timed out!")
        if self.fails_with:
            raise RuntimeError(self.fails_with)


class Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class Connection:
    def __init__(self, blocks_host: bool = True) -> None:
        self.backend: Any = self
        self.blocks_host = blocks_host
        self.works: list[Work] = []
        self.ended: list[str] = []
        self.is_retired = threading.Event()

    def allreduce(self, tensors: object, options: object) -> Work:
        work = self.works.pop(0)
        if work.fails_with == "at once":
            raise dist.DistBackendError("[x.cpp:3] NCCL is gone. This is typically so")
        return work

    def interrupt(self) -> None:
        self.ended.append("interrupted")

    def retire(self, *, is_idle: bool) -> None:
        self.ended.append("idle" if is_idle else "stuck")
        self.is_retired.set()


class Connector:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def connect(self, store: Store, position: int, size: int, limits: WaitLimits) -> Connection:
        return self.connection


def made(
    connection: Connection, is_aborted: Callable[[], bool] = lambda: False, **limits: float
) -> tuple[Members, Group]:
    members = Members(
        name="7",
        rank=2,
        ranks=(2, 5),
        store=HashStore(),
        is_aborted=is_aborted,
        limits=WaitLimits(**({"tick_s": TICK_S, "timeout_s": TIMEOUT_S} | limits)),
    )
    return members, members.connect(Connector(connection), "all")


def reduce(group: Group, connection: Connection, work: Work) -> None:
    connection.works.append(work)
    group.all_reduce(torch.ones(1)).wait()


def test_a_collective_that_ends_well_is_no_loss() -> None:
    connection = Connection()
    _, group = made(connection)
    reduce(group, connection, Work())
    reduce(group, connection, Work(ends_after=3))


@pytest.mark.parametrize("stopped_s", [0.0, 600.0])
def test_a_member_is_silent_after_the_timeout_by_the_clock_of_a_rank_that_runs(
    monkeypatch: pytest.MonkeyPatch, stopped_s: float
) -> None:
    clock, connection = Clock(), Connection()
    monkeypatch.setattr(elastic, "time", clock)
    monkeypatch.setattr(waiting.Deadline.__init__, "__defaults__", (clock.monotonic,))
    _, group = made(connection)
    work = Work(ends_after=float("inf"), stopped_s=stopped_s)
    work.clock = clock
    with pytest.raises(PeerLost) as raised:
        reduce(group, connection, work)
    assert raised.value.is_silence
    assert TIMEOUT_S - 2 * waiting.STOPPED_S < clock.now_s - stopped_s < TIMEOUT_S + 2.0


def test_time_since_the_collective_before_counts_up_to_a_quarter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, connection = Clock(), Connection()
    monkeypatch.setattr(elastic, "time", clock)
    monkeypatch.setattr(waiting.Deadline.__init__, "__defaults__", (clock.monotonic,))
    _, group = made(connection)
    clock.now_s = 1000.0  # computed meanwhile
    work = Work(ends_after=float("inf"))
    work.clock = clock
    with pytest.raises(PeerLost):
        reduce(group, connection, work)
    assert clock.now_s - 1000.0 == pytest.approx(0.75 * TIMEOUT_S, abs=3 * TICK_S)


@pytest.mark.parametrize("work", [Work(1, "reset by peer"), Work(0, "reset"), Work(0, "at once")])
def test_a_collective_that_fails_is_a_lost_peer_and_no_silence(work: Work) -> None:
    connection = Connection()
    _, group = made(connection)
    with pytest.raises(PeerLost) as raised:
        reduce(group, connection, work)
    assert not raised.value.is_silence


def test_a_mistake_of_the_caller_is_no_lost_peer() -> None:
    connection = Connection()
    _, group = made(connection)
    with pytest.raises(IndexError):  # what the backend raises when it is given nonsense
        group.all_reduce(torch.ones(1))


def test_a_dead_member_ends_the_wait_and_leaves_the_generation_to_the_caller() -> None:
    connection, dead = Connection(), list[int]()
    members, group = made(connection, lambda: bool(dead))
    members.check()
    dead.append(5)
    with pytest.raises(PeerLost) as raised:
        reduce(group, connection, Work(ends_after=float("inf")))
    assert not raised.value.is_silence and not connection.ended
    with pytest.raises(PeerLost):
        members.check()


def test_abort_from_another_thread_ends_a_wait_and_every_later_call() -> None:
    connection = Connection()
    members, group = made(connection, tick_s=0.005)
    work = Work(ends_after=float("inf"))
    threading.Timer(0.05, members.abort).start()
    with pytest.raises(PeerLost) as raised:
        reduce(group, connection, work)
    assert not raised.value.is_silence
    for _ in range(3):
        members.abort()
        with pytest.raises(PeerLost):
            group.all_reduce(torch.ones(1))
        with pytest.raises(PeerLost):
            members.check()
    work.left = 0.0
    assert connection.is_retired.wait(PATIENCE_S)
    assert connection.ended == ["interrupted", "idle"], "once"


def test_a_backend_with_a_stuck_collective_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "_STUCK_S", 0.05)
    connection = Connection()
    members, group = made(connection)
    connection.works.append(Work(ends_after=float("inf")))
    group.all_reduce(torch.ones(1))
    members.abort()
    assert connection.is_retired.wait(PATIENCE_S)
    assert connection.ended == ["interrupted", "stuck"]


def test_a_group_that_connects_while_the_generation_is_left_is_given_up() -> None:
    connection = Connection()
    members, _ = made(Connection())

    class Late(Connector):
        def connect(self, *given: Any) -> Connection:
            members.abort()
            return self.connection

    with pytest.raises(PeerLost):
        members.connect(Late(connection), "late")
    assert connection.is_retired.wait(PATIENCE_S)


def test_nothing_keeps_a_collective_that_was_left() -> None:
    """Its group lives as long: with threads, descriptors and buffers."""
    connection = Connection()
    members, group = made(connection, tick_s=0.001, timeout_s=0.01)
    work = Work(ends_after=10_000)
    gc.disable()
    try:
        with pytest.raises(PeerLost):
            reduce(group, connection, work)
        members.abort()
        work.left = 0.0
        assert connection.is_retired.wait(PATIENCE_S)
        seen = weakref.ref(work)
        del work
        assert seen() is None
    finally:
        gc.enable()


class TestOnDevice:
    """The host does not block: a thread of the generation watches."""

    def test_a_wait_does_not_ask_for_a_tick(self) -> None:
        connection = Connection(blocks_host=False)
        members, group = made(connection)
        asked = list[object]()
        work = Work()
        work.wait = lambda tick=None: asked.append(tick)  # type: ignore[method-assign]
        reduce(group, connection, work)
        assert asked == [None], "with a time-out the host would wait for the device"
        members.abort()

    @pytest.mark.parametrize("is_told", [False, True])
    def test_dead_and_silent_members_are_noticed_while_the_host_is_elsewhere(
        self, is_told: bool
    ) -> None:
        connection, dead = Connection(blocks_host=False), list[int]()
        _, group = made(
            connection, lambda: bool(dead), tick_s=0.005, timeout_s=PATIENCE_S if is_told else 0.05
        )
        connection.works.append(Work(ends_after=float("inf")))
        group.all_reduce(torch.ones(1))
        if is_told:
            dead.append(5)
        give_up_s = time.monotonic() + PATIENCE_S
        while "interrupted" not in connection.ended:
            assert time.monotonic() < give_up_s
            time.sleep(0.005)
        with pytest.raises(PeerLost) as raised:
            group.all_reduce(torch.ones(1))
        assert raised.value.is_silence is not is_told

    def test_a_device_that_goes_on_is_not_silent(self) -> None:
        connection = Connection(blocks_host=False)
        members, group = made(connection, tick_s=0.005, timeout_s=0.05)
        for _ in range(20):
            reduce(group, connection, Work())
            time.sleep(0.005)
        members.check()
        members.abort()


def test_a_group_of_this_rank_alone_needs_nobody() -> None:
    members, _ = made(Connection())
    assert isinstance(members.connect(Connector(Connection()), "own", (2,)), SingleProcess)


def test_not_all_come() -> None:
    members, _ = made(Connection(), tick_s=0.005, timeout_s=0.05)
    with pytest.raises(PeerLost) as raised:
        members.meet()
    assert raised.value.is_silence


def test_a_store_that_does_not_answer_is_left() -> None:
    class Frozen(HashStore):
        pass

    goes_on = threading.Event()
    members, _ = made(Connection(), tick_s=0.005, timeout_s=PATIENCE_S, answer_s=0.05)
    store: Any = Frozen()
    store.add = lambda *_: goes_on.wait(PATIENCE_S)
    members.store = store
    with pytest.raises(PeerLost) as raised:
        members.meet()
    goes_on.set()
    assert raised.value.is_silence


def test_a_lost_peer_travels_through_the_backward_pass() -> None:
    from pacekeeper.trainer.parallel.experts import NoClock
    from pacekeeper.trainer.parallel.row_exchange import exchange_rows

    class Once(SingleProcess):
        is_lost = False

        def all_to_all_rows(self, output: Any, rows: Any, receive: Any, send: Any) -> Any:
            if self.is_lost:
                raise PeerLost("gone", is_silence=True)
            return super().all_to_all_rows(output, rows, receive, send)

    group = Once()
    rows = torch.ones(3, 2, requires_grad=True)
    answer = exchange_rows(rows, group, [3], [3], NoClock())
    group.is_lost = True
    with pytest.raises(PeerLost) as raised:
        answer.sum().backward()
    assert raised.value.is_silence
