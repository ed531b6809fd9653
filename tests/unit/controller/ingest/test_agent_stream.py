"""The agents' service on a real gRPC server, with a host that notes what happens."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest

from pacekeeper.controller.ingest import agent_stream
from pacekeeper.controller.ingest.agent_stream import (
    ATTACH,
    AgentHandler,
    AgentStream,
    FairSlots,
    LayoutStore,
    Outbox,
)
from pacekeeper.protos import control_pb2

PATIENCE_S = 60.0


@dataclass
class Host:
    """Welcomes each stream, unless the test wants something else."""

    is_welcoming: bool = True
    streams: list[AgentStream] = field(default_factory=list)
    firsts: list[bytes] = field(default_factory=list)
    reports: list[bytes] = field(default_factory=list)
    num_finished: int = 0
    num_closed: int = 0
    room: asyncio.Event = field(default_factory=asyncio.Event)

    def opened(self, stream: AgentStream, first: bytes) -> None:
        self.streams.append(stream)
        self.firsts.append(first)
        stream.number = len(self.streams)
        if self.is_welcoming:
            stream.send(b"welcome", b"welcome", 0)

    def reported(self, stream: AgentStream, data: bytes) -> float | None:
        self.reports.append(data)
        return None if data == b"nonsense" else 0.0

    async def ready(self) -> None:
        await self.room.wait()

    def finished(self, stream: AgentStream) -> None:
        self.num_finished += 1

    def closed(self, stream: AgentStream) -> None:
        self.num_closed += 1


@contextlib.asynccontextmanager
async def served(host: Host, age_s: float | None) -> AsyncIterator[Any]:
    """The method Attach, on bytes, of a server of this host."""
    server = grpc.aio.server(handlers=(AgentHandler(host, LayoutStore(), age_s),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel.stream_stream(ATTACH)
    finally:
        await server.stop(None)


def play(scene: Callable[[Host, Any], Awaitable[None]], age_s: float | None = None) -> Host:
    async def run() -> Host:
        host = Host()
        host.room.set()
        async with asyncio.timeout(PATIENCE_S), served(host, age_s) as attach:
            await scene(host, attach)
        return host

    return asyncio.run(run())


async def holds(answer: Callable[[], object]) -> None:
    while not answer():
        await asyncio.sleep(0.005)


async def welcomed(attach: Any, **more: Any) -> Any:
    call = attach(**more)
    await call.write(b"hello")
    assert await call.read() == b"welcome"
    return call


def test_reports_come_in_order_and_the_end_after_what_was_sent() -> None:
    async def scene(host: Host, attach: Any) -> None:
        call = await welcomed(attach)
        for report in (b"1", b"2", b"3"):
            await call.write(report)
        await call.done_writing()
        await holds(lambda: host.num_finished)
        host.streams[0].send(b"a", b"last words", 0)
        host.streams[0].end(grpc.StatusCode.ABORTED.value[0], "enough")
        host.streams[0].send(b"a", b"too late", 0)
        assert await call.read() == b"last words"
        assert (await call.code(), await call.details()) == (grpc.StatusCode.ABORTED, "enough")

    host = play(scene)
    assert (host.firsts, host.reports, host.num_closed) == ([b"hello"], [b"1", b"2", b"3"], 1)


def test_nothing_is_read_before_the_controller_has_answered() -> None:
    async def scene(host: Host, attach: Any) -> None:
        host.is_welcoming = False
        call = attach()
        await call.write(b"hello")
        await call.write(b"1")
        await holds(lambda: host.streams)
        await asyncio.sleep(0.05)
        assert host.reports == []
        host.streams[0].send(b"welcome", b"welcome", 0)
        await holds(lambda: host.reports == [b"1"])

    play(scene)


def test_a_refused_agent_gets_the_reason() -> None:
    async def scene(host: Host, attach: Any) -> None:
        host.is_welcoming = False
        call = attach()
        await call.write(b"hello")
        await holds(lambda: host.streams)
        host.streams[0].end(grpc.StatusCode.PERMISSION_DENIED.value[0], "not this node")
        assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
        assert await call.details() == "not this node"

    assert play(scene).num_closed == 1


def test_an_agent_that_goes_away_leaves_nothing_behind() -> None:
    async def scene(host: Host, attach: Any) -> None:
        (await welcomed(attach)).cancel()
        await holds(lambda: host.num_closed == 1)
        assert not host.reports

    play(scene)


def test_what_is_no_report_is_the_last_that_is_read() -> None:
    async def scene(host: Host, attach: Any) -> None:
        call = await welcomed(attach)
        await call.write(b"nonsense")
        await call.write(b"1")
        await holds(lambda: host.reports)
        await asyncio.sleep(0.05)
        assert host.reports == [b"nonsense"]

    play(scene)


def test_without_room_the_next_report_stays_with_its_agent() -> None:
    async def scene(host: Host, attach: Any) -> None:
        call = await welcomed(attach)
        host.room.clear()
        await call.write(b"1")
        await call.write(b"2")
        await holds(lambda: host.reports)
        await asyncio.sleep(0.05)
        assert host.reports == [b"1"]
        host.room.set()
        await holds(lambda: host.reports == [b"1", b"2"])

    play(scene)


def test_a_call_without_hello_is_announced_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_stream, "HELLO_WITHIN_S", 0.05)

    async def scene(host: Host, attach: Any) -> None:
        silent = attach()
        await silent.wait_for_connection()
        await holds(lambda: host.firsts == [b""])

    play(scene)


def test_streams_that_wait_for_their_answer_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_stream, "UNANSWERED", 2)

    async def scene(host: Host, attach: Any) -> None:
        host.is_welcoming = False
        calls = [attach() for _ in range(3)]
        for call in calls:
            await call.write(b"hello")
        await holds(lambda: len(host.streams) == 2)
        await asyncio.sleep(0.05)
        assert len(host.streams) == 2
        host.streams[0].send(b"welcome", b"welcome", 0)
        await holds(lambda: len(host.streams) == 3)

    play(scene)


def test_silent_callers_do_not_keep_an_agent_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_stream, "FIRST_MESSAGES", 1)
    monkeypatch.setattr(agent_stream, "HELLO_WITHIN_S", 0.05)

    async def scene(host: Host, attach: Any) -> None:
        silent = [attach() for _ in range(3)]
        for call in silent:
            await call.wait_for_connection()
        await welcomed(attach)

    play(scene)


def test_hosts_take_turns_for_slots() -> None:
    async def scene() -> list[str]:
        slots, granted = FairSlots(2), list[str]()
        may_end = asyncio.Event()

        async def call(host: str) -> None:
            async with slots.taken(host):
                granted.append(host)
                await may_end.wait()

        calls = [asyncio.create_task(call("stranger")) for _ in range(6)]
        calls += [asyncio.create_task(call(host)) for host in ("a", "b")]
        await asyncio.sleep(0)
        assert granted == ["stranger", "stranger"]
        may_end.set()
        await asyncio.gather(*calls)
        return granted[2:]

    assert asyncio.run(scene())[:4] == ["stranger", "a", "b", "stranger"]


def test_a_caller_that_goes_away_while_it_waits_takes_no_slot_with_it() -> None:
    async def scene() -> None:
        slots, taken = FairSlots(1), list[str]()

        async def call(host: str) -> None:
            async with slots.taken(host):
                taken.append(host)

        async with slots.taken("first"):
            leaving = [asyncio.create_task(call("leaving")) for _ in range(2)]
            staying = asyncio.create_task(call("staying"))
            await asyncio.sleep(0)
            leaving[0].cancel()
            await asyncio.sleep(0)
        leaving[1].cancel()  # just granted
        await asyncio.wait([*leaving, staying])
        async with slots.taken("last"):
            assert taken == ["staying"]

    asyncio.run(scene())


def test_an_old_stream_ends_in_peace_so_that_its_agent_comes_back_at_once() -> None:
    async def scene(host: Host, attach: Any) -> None:
        call = await welcomed(attach)
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK

    play(scene, age_s=0.05)


def test_the_identity_is_that_of_the_connection_and_its_token() -> None:
    async def scene(host: Host, attach: Any) -> None:
        await welcomed(attach, metadata=(("authorization", "Bearer t"),))
        identity = host.streams[0].identity()
        assert identity.peer.startswith("ipv4:127.0.0.1:")
        assert (identity.uris, identity.authorization) == ((), ("Bearer t",))

    play(scene)


def test_of_what_waits_the_newest_of_a_kind_is_sent_and_nothing_too_late() -> None:
    outbox = Outbox(capacity=2)
    outbox.put(b"a", b"a1")
    outbox.put(b"b", b"b1", 1)
    outbox.put(b"a", b"a2")
    assert [outbox.next(10.0), outbox.next(10.0)] == [b"a2", None], "b1 was too late"
    for key in (b"a", b"b", b"c"):
        outbox.put(key, key)
    assert [outbox.next(0.0) for _ in range(3)] == [b"b", b"c", None], "the oldest went"


def test_layouts_on_offer_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_stream, "MAX_LAYOUTS", 2)
    store = LayoutStore()
    for sha256 in (b"1", b"2", b"1", b"3"):
        store.keep(control_pb2.OfferPlan(sha256=sha256, layout_json=sha256))
    assert [store.get(sha256) for sha256 in (b"1", b"2", b"3")] == [b"1", None, b"3"]
