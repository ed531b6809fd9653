"""Connections to the front: who is silent, floods or grows old goes; what may not be read waits."""

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hpack import Decoder, Encoder

from pacekeeper.controller.ingest.http2 import agent_stream, listener
from pacekeeper.controller.ingest.http2.agent_stream import AgentConnection, ConnectionConfig
from pacekeeper.controller.ingest.http2.frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
)
from pacekeeper.controller.ingest.http2.listener import listening
from pacekeeper.controller.ingest.http2.proxy import ATTACH, SocketProxy

PATIENCE_S = 60.0


def said(message: bytes, stream: int = 1) -> bytes:
    return frame(DATA, 0, stream, struct.pack(">BI", 0, len(message)) + message)


@dataclass
class Host:
    """Notes what agents say; `busy`: no more may come after these."""

    heard: list[object] = field(default_factory=list)
    busy: set[bytes] = field(default_factory=set)
    lane: AgentConnection | None = None
    is_slow: bool = False  # to judge

    def opened(self, lane: AgentConnection, first: bytes) -> None:
        lane.number = 1 + sum(one == "closed" for one in self.heard)
        self.lane = lane
        self.heard.append(("opened", first, lane.shown().authorization))
        if not self.is_slow:
            lane.tell(b"welcome", b"welcome", 0)

    def reported(self, lane: AgentConnection, data: bytes) -> float | None:
        self.heard.append(data)
        return None if data in self.busy else 0.0

    def finished(self, lane: AgentConnection) -> None:
        self.heard.append("finished")

    def closed(self, lane: AgentConnection) -> None:
        self.heard.append("closed")

    def handshake_failed(self) -> None:
        self.heard.append("handshake_failed")


class Caller:
    """The other end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.encoder, self.decoder = Encoder(), Decoder()

    def call(self, path: str = ATTACH, stream: int = 1) -> None:
        told = [(":path", path), ("authorization", "Bearer x")]
        self.writer.write(frame(HEADERS, END_HEADERS, stream, self.encoder.encode(told)))

    async def frame(self) -> tuple[int, int, bytes]:
        head = await self.reader.readexactly(9)
        payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
        return head[3], head[4], payload

    async def until(self, kind: int) -> tuple[int, bytes]:
        while True:
            found, flags, payload = await self.frame()
            if found == kind:
                return flags, payload

    async def trailers(self) -> dict[str, str]:
        while True:
            flags, payload = await self.until(HEADERS)
            told = self.decoder.decode(payload, raw=True)
            if flags & END_STREAM:
                return {name.decode(): value.decode() for name, value in told}

    async def is_dropped(self) -> None:
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            while True:
                await self.frame()


def play(
    scene: Callable[[Host, Caller], Awaitable[None]], *, age_s: float | None = None
) -> list[object]:
    """What the host heard."""
    host = Host()

    @asynccontextmanager
    async def served() -> AsyncIterator[Caller]:
        rules = ConnectionConfig(
            host=host,
            socket_proxy=SocketProxy(Path("/nowhere")),
            max_message_bytes=1 << 20,
            age_s=age_s,
            tls=lambda: None,
        )
        async with listening("127.0.0.1:0", rules) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0))
            try:
                yield Caller(reader, writer)
            finally:
                writer.close()

    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S), served() as caller:
            await scene(host, caller)

    asyncio.run(run())
    return host.heard


async def holds(answer: Callable[[], object]) -> None:
    while not answer():
        await asyncio.sleep(0.005)


OPENED = ("opened", b"hello", ("Bearer x",))


def test_an_agent_is_heard_in_order_and_its_end_comes_last() -> None:
    async def scene(host: Host, caller: Caller) -> None:
        caller.call()
        caller.writer.write(said(b"hello") + said(b"1") + said(b"2") + frame(DATA, END_STREAM, 1))
        assert (await caller.until(DATA))[1][5:] == b"welcome"
        await holds(lambda: "finished" in host.heard)
        assert host.lane is not None
        host.lane.end(0, "")
        assert (await caller.trailers())["grpc-status"] == "0"

    assert play(scene) == [OPENED, b"1", b"2", "finished", "closed"]


def test_what_may_not_be_handed_on_waits_with_all_that_comes_behind() -> None:
    async def scene(host: Host, caller: Caller) -> None:
        host.busy = {b"1", b"3"}
        caller.call()
        caller.writer.write(said(b"hello") + b"".join(map(said, (b"1", b"2", b"3", b"4"))))
        await holds(lambda: host.heard == [OPENED, b"1"])
        caller.writer.write(said(b"5"))
        await asyncio.sleep(0.05)
        assert host.lane is not None
        assert host.heard == [OPENED, b"1"]
        host.lane.go_on()
        assert host.heard == [OPENED, b"1", b"2", b"3"]
        host.lane.go_on()
        await holds(lambda: host.heard == [OPENED, b"1", b"2", b"3", b"4", b"5"])

    play(scene)


@pytest.mark.parametrize("is_welcome", [True, False])
def test_until_it_is_judged_nothing_more_than_its_hello_is_held(is_welcome: bool) -> None:
    large = b"x" * 1_000_000
    data = struct.pack(">BI", 0, len(large)) + large

    async def scene(host: Host, caller: Caller) -> None:
        host.is_slow = True
        caller.call()
        caller.writer.write(said(b"hello"))
        for at in range(0, len(data), 16384):
            caller.writer.write(frame(DATA, 0, 1, data[at : at + 16384]))
        await holds(lambda: host.heard)
        await asyncio.sleep(0.1)  # all that would come has come
        lane = host.lane
        assert lane is not None
        held = [*lane._connection._parts, *lane._waiting]
        assert sum(map(len, held)) <= agent_stream.READ_BYTES
        if is_welcome:
            lane.tell(b"welcome", b"welcome", 0)
            await holds(lambda: large in host.heard)
        else:
            lane.end(16, "nobody")
            assert (await caller.trailers())["grpc-status"] == "16"
            await asyncio.sleep(0.05)
            assert not lane._connection._parts

    heard = play(scene)
    assert heard[0] == ("opened", b"hello", ("Bearer x",))
    assert (large in heard) == is_welcome


def test_an_agent_may_begin_anew_on_its_connection_but_make_no_other_call() -> None:
    async def scene(host: Host, caller: Caller) -> None:
        caller.call()
        caller.writer.write(said(b"hello") + frame(RST_STREAM, 0, 1, b"\0\0\0\x08"))
        caller.call(stream=3)
        caller.writer.write(said(b"hello", stream=3))
        await holds(lambda: host.heard == [OPENED, "closed", OPENED])
        caller.writer.write(frame(RST_STREAM, 0, 3, b"\0\0\0\x08"))
        caller.call("/pacekeeper.v1.StatusService/ListJobs", stream=5)
        assert (await caller.trailers())["grpc-status"] == "12"

    assert play(scene) == [OPENED, "closed", OPENED, "closed"]


def test_the_newest_of_a_kind_waits_for_a_caller_that_reads_nothing() -> None:
    async def scene(host: Host, caller: Caller) -> None:
        caller.call()
        caller.writer.write(said(b"hello"))
        await caller.until(DATA)
        assert host.lane is not None
        host.lane.tell(b"plan", b"0" * 70_000, 0)  # more than its windows have room for
        for number in range(5):
            host.lane.tell(b"plan", b"%d" % number, 0)
        got = b""
        while len(got) < 60_000:
            got += (await caller.until(DATA))[1]
        caller.writer.write(frame(8, 0, 0, b"\0\1\0\0") + frame(8, 0, 1, b"\0\1\0\0"))
        while len(got) < 70_011:
            got += (await caller.until(DATA))[1]
        assert got[5 + 70_000 :] == b"\0\0\0\0\x014"

    play(scene)


@pytest.mark.parametrize("is_called", [False, True])
def test_who_says_nothing_is_not_waited_for(
    is_called: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "LOOK_S", 0.01)
    monkeypatch.setattr(agent_stream, "HELLO_WITHIN_S" if is_called else "HANDSHAKE_S", 0.1)

    async def scene(host: Host, caller: Caller) -> None:
        if is_called:
            caller.call()
            await holds(lambda: host.heard == [("opened", b"", ("Bearer x",))])
        else:
            await caller.is_dropped()

    play(scene)


def test_a_silent_agent_is_asked_for_a_sign_of_life_and_then_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "LOOK_S", 0.01)
    for name, value in {"SILENT_S": 0.1, "DEAD_S": 2.0}.items():
        monkeypatch.setattr(agent_stream, name, value)

    async def scene(host: Host, caller: Caller) -> None:
        caller.call()
        caller.writer.write(said(b"hello"))
        await caller.until(PING)
        assert host.heard == [OPENED]
        await caller.is_dropped()
        await holds(lambda: host.heard == [OPENED, "closed"])

    play(scene)


def test_an_old_connection_is_ended_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "LOOK_S", 0.01)
    monkeypatch.setattr(agent_stream, "LINGER_S", 0.05)

    async def scene(host: Host, caller: Caller) -> None:
        caller.call()
        caller.writer.write(said(b"hello"))
        assert (await caller.trailers())["grpc-status"] == "14"
        await caller.until(GOAWAY)
        await caller.is_dropped()

    assert play(scene, age_s=1.0) == [OPENED, "closed"]


def test_a_caller_that_asks_and_asks_and_reads_nothing_is_given_up() -> None:
    async def scene(host: Host, caller: Caller) -> None:
        caller.call()
        caller.writer.write(said(b"hello"))
        await holds(lambda: host.heard == [OPENED])
        with pytest.raises(ConnectionError):
            while True:
                caller.writer.write(frame(PING, 0, 0, b"12345678") * 4096)
                await caller.writer.drain()

    assert play(scene) == [OPENED, "closed"]


def test_who_says_that_it_will_say_no_more_is_let_go() -> None:
    async def scene(host: Host, caller: Caller) -> None:
        caller.call()
        caller.writer.write(said(b"hello"))
        await caller.until(DATA)
        caller.writer.write_eof()
        await caller.is_dropped()

    assert play(scene) == [OPENED, "closed"]
