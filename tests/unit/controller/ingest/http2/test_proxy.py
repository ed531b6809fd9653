"""A connection that is handed on: every byte both ways, its name, both its ends."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pacekeeper.controller.api.auth.peer_identity import PeerIdentity
from pacekeeper.controller.ingest.http2.proxy import SocketProxy, _End
from pacekeeper.controller.ingest.runtime_dir import own_folder

SHOWN = PeerIdentity(peer="ipv4:127.0.0.1:7")
PATIENCE_S = 60.0


@dataclass
class Server:
    """The server of all other calls: who came, by the name of its socket."""

    streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(default_factory=list)

    def come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.streams.append((reader, writer))


async def holds(answer: Callable[[], object]) -> None:
    while not answer():
        await asyncio.sleep(0.002)


@asynccontextmanager
async def piped(folder: Path, first: bytes) -> AsyncIterator[tuple[SocketProxy, Server, Any]]:
    """Pipes with one connection handed on, its server, and the caller's streams."""
    server, address = Server(), folder / "inner"
    listening = await asyncio.start_unix_server(server.come, address)
    pipes = SocketProxy(address)
    ours, theirs = socket.socketpair()
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
    caller = await asyncio.open_connection(sock=theirs)
    pipes.begin(transport, first, SHOWN)
    try:
        yield pipes, server, caller
    finally:
        caller[1].close()
        for _, writer in server.streams:
            writer.close()
        listening.close()


def play(scene: Callable[[Path], Any]) -> None:
    async def run() -> None:
        with own_folder() as folder:
            async with asyncio.timeout(PATIENCE_S):
                await scene(Path(folder))

    asyncio.run(run())


def test_every_byte_goes_both_ways_and_the_caller_is_known_by_its_name() -> None:
    large = os.urandom(3 << 20)

    async def scene(folder: Path) -> None:
        async with piped(folder, b"first") as (pipes, server, (reader, writer)):
            writer.write(large)
            await holds(lambda: server.streams)
            ((inner, back),) = server.streams
            assert await inner.readexactly(5) == b"first"
            assert await inner.readexactly(len(large)) == large
            back.write(large)
            assert await reader.readexactly(len(large)) == large
            name = back.get_extra_info("peername")
            assert pipes.caller(f"unix:{name}") == SHOWN
            assert pipes.caller("unix:another") is None
            assert Path(name).exists()
            writer.close()
            assert await inner.read() == b""
            await holds(lambda: pipes.caller(f"unix:{name}") is None)
            assert not Path(name).exists()
            assert not pipes._tasks

    play(scene)


def test_when_the_server_ends_it_the_caller_is_let_go() -> None:
    async def scene(folder: Path) -> None:
        async with piped(folder, b"first") as (pipes, server, (reader, _)):
            await holds(lambda: server.streams)
            server.streams[0][1].close()
            assert await reader.read() == b""
            await holds(lambda: not pipes._callers)

    play(scene)


def test_a_server_that_is_not_there_costs_the_connection_and_leaves_nothing() -> None:
    async def scene(folder: Path) -> None:
        before = len(os.listdir("/proc/self/fd"))
        pipes = SocketProxy(folder / "nowhere")
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
        reader, writer = await asyncio.open_connection(sock=theirs)
        pipes.begin(transport, b"first", SHOWN)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        assert list(folder.iterdir()) == []
        assert len(os.listdir("/proc/self/fd")) == before
        assert not pipes._callers

    play(scene)


def test_two_connections_have_two_names() -> None:
    async def scene(folder: Path) -> None:
        async with piped(folder, b"1") as (pipes, server, _):
            ours, theirs = socket.socketpair()
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
            pipes.begin(transport, b"2", PeerIdentity(peer="another"))
            await holds(lambda: len(server.streams) == 2)
            names = [writer.get_extra_info("peername") for _, writer in server.streams]
            found = {pipes.caller(f"unix:{name}") for name in names}
            assert {one.peer for one in found if one is not None} == {SHOWN.peer, "another"}
            theirs.close()
            await holds(lambda: len(pipes._callers) == 1)

    play(scene)


def test_a_caller_that_left_meanwhile_leaves_no_connection_behind() -> None:
    async def scene(folder: Path) -> None:
        async with piped(folder, b"first") as (pipes, server, (_, writer)):
            pass
        assert not writer.transport.get_write_buffer_size()
        server, address = Server(), folder / "again"
        listening = await asyncio.start_unix_server(server.come, address)
        pipes = SocketProxy(address)
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
        pipes.begin(transport, b"first", SHOWN)
        transport.abort()
        await holds(lambda: server.streams)
        assert await server.streams[0][0].read() in (b"", b"first")
        server.streams[0][1].close()
        await holds(lambda: not pipes._callers)
        theirs.close()
        listening.close()

    play(scene)


@dataclass
class Transport:
    """Notes whether it is read."""

    is_read: bool = True
    written: bytes = b""
    is_closed: bool = False

    def pause_reading(self) -> None:
        if self.is_closed:
            raise RuntimeError("closed")
        self.is_read = False

    def resume_reading(self) -> None:
        if self.is_closed:
            raise RuntimeError("closed")
        self.is_read = True

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True


def test_what_one_end_can_not_take_is_not_read_at_the_other() -> None:
    one, other = _End(Transport()), _End(Transport())
    for alone in (one.pause_writing, one.resume_writing, lambda: one.connection_lost(None)):
        alone()
    one.data_received(b"to nobody")
    one.other, other.other = other, one
    one.pause_writing()
    assert (one.transport.is_read, other.transport.is_read) == (True, False)
    one.resume_writing()
    assert other.transport.is_read
    other.transport.close()
    one.pause_writing()
    one.resume_writing()
    one.connection_lost(None)
    assert (one.transport.is_closed, other.transport.is_closed) == (False, True)
