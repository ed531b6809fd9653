"""One connection of the front on paper: its transport, its host and the pipes are notebooks."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from hpack import Encoder

from pacekeeper.controller.api.auth.peer_identity import PeerIdentity
from pacekeeper.controller.ingest.http2.agent_stream import AgentConnection, ConnectionConfig
from pacekeeper.controller.ingest.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    frame,
)
from pacekeeper.controller.ingest.http2.proxy import ATTACH
from support.http2_calls import ACKNOWLEDGED, frames_in, told_by


@dataclass
class Socket:
    """Notes what is set."""

    options: list[tuple[int, ...]] = field(default_factory=list)

    def setsockopt(self, *option: int) -> None:
        self.options.append(option)


@dataclass
class Transport:
    """Notes what is written, and whether it is read."""

    peer: tuple[Any, ...] = ("127.0.0.1", 7)
    written: bytearray = field(default_factory=bytearray)
    certificate: dict[str, Any] | None = None
    protocol: str | None = "h2"
    is_read: bool = True
    is_aborted: bool = False
    takes_bytes: int = 1 << 40  # until somebody reads
    on_full: Callable[[], None] = lambda: None
    socket: Socket = field(default_factory=Socket)

    def get_extra_info(self, name: str) -> Any:
        known = {"peername": self.peer, "socket": self.socket, "peercert": self.certificate}
        return self if name == "ssl_object" else known.get(name)

    def selected_alpn_protocol(self) -> str | None:
        return self.protocol

    def write(self, data: bytes) -> None:
        assert not self.is_aborted
        self.written += data
        if len(self.written) > self.takes_bytes:
            self.on_full()

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted


@dataclass
class Pipes:
    """Notes what is handed on."""

    heard: list[tuple[bytes, PeerIdentity]]

    def begin(self, transport: Transport, first: bytes, shown: PeerIdentity) -> None:
        self.heard.append((first, shown))


@dataclass
class World:
    """A lane, its transport, and what its host and the pipes heard."""

    age_s: float | None = None
    is_judging: bool = False  # and says welcome only later
    rest_s: float | None = 0.0
    start_tls: Callable[..., Awaitable[Any]] | None = None
    heard: list[object] = field(default_factory=list)
    handed_on: list[tuple[bytes, PeerIdentity]] = field(default_factory=list)
    transport: Transport = field(default_factory=Transport)
    connections: set[AgentConnection] = field(default_factory=set)
    encoder: Encoder = field(default_factory=Encoder)

    def begin(self) -> None:
        host: Any = self
        socket_proxy: Any = Pipes(self.handed_on)
        rules = ConnectionConfig(
            host=host,
            socket_proxy=socket_proxy,
            max_message_bytes=1000,
            age_s=self.age_s,
            tls=lambda: None if self.start_tls is None else ssl.create_default_context(),
        )
        self.lane = AgentConnection(rules, self.connections)
        if self.start_tls is not None:
            self.lane._loop.start_tls = self.start_tls  # type: ignore[method-assign, assignment]
        self.lane.connection_made(self.transport)

    def opened(self, lane: AgentConnection, first: bytes) -> None:
        lane.number = 1
        self.heard.append(("opened", first))
        if not self.is_judging:
            lane.tell(b"welcome", b"welcome", 0)

    def reported(self, lane: AgentConnection, data: bytes) -> float | None:
        self.heard.append(data)
        return self.rest_s

    def finished(self, lane: AgentConnection) -> None:
        self.heard.append("finished")

    def closed(self, lane: AgentConnection) -> None:
        self.heard.append("closed")

    def handshake_failed(self) -> None:
        self.heard.append("handshake_failed")

    def feed(self, *parts: bytes) -> None:
        sent = b"".join(parts)
        self.lane.get_buffer(-1)[: len(sent)] = sent
        self.lane.buffer_updated(len(sent))

    def called(self, path: str = ATTACH, stream: int = 1, flags: int = 0) -> bytes:
        told = [(":path", path), ("authorization", "Bearer x")]
        return frame(HEADERS, END_HEADERS | flags, stream, self.encoder.encode(told))

    def greet(self, *parts: bytes) -> None:
        """The first call, and what comes with it."""
        self.feed(PREFACE, frame(SETTINGS, 0, 0), ACKNOWLEDGED, self.called(), *parts)

    def said(self) -> list[tuple[int, int, int, bytes]]:
        found = frames_in(bytes(self.transport.written))
        self.transport.written.clear()
        return found

    def messages(self) -> list[bytes]:
        return [payload[5:] for kind, _, _, payload in self.said() if kind == DATA]

    def trailers(self) -> dict[str, str]:
        (block,) = (
            p for kind, flags, _, p in self.said() if kind == HEADERS and flags & END_STREAM
        )
        return told_by(block)


def on_paper(scene: Callable[[World], Awaitable[None]], **values: Any) -> World:
    """The scene with a connection that was just made."""

    async def run() -> World:
        world = World(**values)
        world.begin()
        await scene(world)
        return world

    return asyncio.run(run())
