"""Connections to the ingest process: TLS, the first call's kind, signs of life, age, room to write.

An agent's stream is served here (`connection.py`); a connection that begins with any other call is
handed on whole to the server of those. Thousands of agents cost neither a task nor a timer each.
"""

import asyncio
import contextlib
import random
import socket
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from pacekeeper.controller.api.auth.peer_identity import PeerIdentity
from pacekeeper.controller.ingest.http2.connection import Http2Connection
from pacekeeper.controller.ingest.http2.frames import Called, Cancelled, Finished, Happened, Wrong
from pacekeeper.controller.ingest.http2.proxy import ATTACH, SocketProxy
from pacekeeper.controller.ingest.http2.send_queue import Outbox
from pacekeeper.protos.convert import reports

HELLO_WITHIN_S = 10.0
HANDSHAKE_S = reports.HANDSHAKE_MS / 1e3
SILENT_S, DEAD_S = 20.0, 25.0  # then it is asked for a sign of life, then given up
LINGER_S = reports.CONNECTION_GRACE_MS / 1e3  # of a connection that was said goodbye to
AGE_SPREAD = 0.1
MOST_OF_A_HELLO = 64 << 10
OWED_BYTES = 1 << 16  # of answers to a caller that asks on and reads nothing
READ_BYTES = 1 << 16
# Whoever is read from hands all on before the next one is: one room for all.
_ROOM = memoryview(bytearray(READ_BYTES))


class Host(Protocol):
    """What agents' streams are led to."""

    def opened(self, lane: "AgentConnection", first: bytes) -> None:
        """A stream said its first message; empty: none."""

    def reported(self, lane: "AgentConnection", data: bytes) -> float | None:
        """One message: for how many seconds no more should come; None: until it says so."""

    def finished(self, lane: "AgentConnection") -> None:
        """The agent will say no more."""

    def closed(self, lane: "AgentConnection") -> None:
        """The stream is over."""

    def handshake_failed(self) -> None:
        """A TLS handshake failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionConfig:
    """Of all connections. `tls`: the context of now; `age_s`: None: for ever."""

    host: Host
    socket_proxy: SocketProxy
    max_message_bytes: int
    age_s: float | None
    tls: Callable[[], ssl.SSLContext | None]


class AgentConnection(asyncio.BufferedProtocol):
    """One connection, and the agent's stream in it."""

    __slots__ = (
        *("rules", "connections", "number", "outbox", "bucket", "is_heard", "is_deaf"),
        "_connection",
        *(
            "_transport",
            "_loop",
            "_waiting",
            "_is_held",
            "_is_finishing",
            "_is_writable",
            "_is_stuck",
        ),
        *("_made_s", "_called_s", "_heard_s", "_moved_s", "_over_s", "_left_s", "_upgrade"),
        *("_authorization", "_peer", "_early", "_owed"),
    )

    def __init__(self, rules: ConnectionConfig, connections: "set[AgentConnection]") -> None:
        self.rules, self.connections = rules, connections
        self.number = 0  # of the stream; 0: none
        self.outbox = Outbox()
        self.bucket: Any = None
        self.is_heard = False  # it was told something: it may report
        self.is_deaf = False  # to what this stream still brings
        self._connection = Http2Connection(rules.max_message_bytes, MOST_OF_A_HELLO)
        self._transport: Any = None
        self._waiting: deque[bytes] = deque()  # messages that came and may not be handed on yet
        self._is_held = self._is_finishing = False
        self._is_writable, self._is_stuck = True, False
        self._loop = asyncio.get_running_loop()
        self._made_s = self._heard_s = self._loop.time()
        self._moved_s = 0.0  # when it last took some of what it is told
        self._called_s = 0.0  # since when its Hello is waited for
        self._over_s = 0.0  # when it was said goodbye to
        spread = random.uniform(1.0 - AGE_SPREAD, 1.0 + AGE_SPREAD)
        self._left_s = None if rules.age_s is None else self._made_s + rules.age_s * spread
        self._upgrade: asyncio.Task[None] | None = None
        self._authorization: tuple[str, ...] = ()
        self._peer, self._early, self._owed = "", b"", 0

    # --- of asyncio ---

    def connection_made(self, transport: Any) -> None:
        """A connection; with TLS it is one only after the handshake."""
        self._transport = transport
        self.connections.add(self)
        self._peer = _peer(transport.get_extra_info("peername"))
        with contextlib.suppress(OSError, AttributeError):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if (context := self.rules.tls()) is None:
            self._write()
        else:
            self._upgrade = self._loop.create_task(self._begin_tls(context))

    async def _begin_tls(self, context: ssl.SSLContext) -> None:
        plain = self._transport
        try:
            made = await self._loop.start_tls(
                plain, self, context, server_side=True, ssl_handshake_timeout=HANDSHAKE_S
            )
        except (OSError, ssl.SSLError, ConnectionError):  # a stranger, or it went away
            plain.abort()
            self.rules.host.handshake_failed()
            self._forget()
            return
        assert made is not None, "it is there once its handshake is over"
        self._transport, self._upgrade = made, None
        if made.get_extra_info("ssl_object").selected_alpn_protocol() != "h2":
            made.abort()
            return
        self._feed(self._early)  # and what we begin with is said

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where bytes are put."""
        return _ROOM

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes came."""
        if self._upgrade is None:
            self._feed(bytes(_ROOM[:nbytes]))
        else:
            self._early += bytes(_ROOM[:nbytes])  # right behind the handshake

    def _feed(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        connection = self._connection
        try:
            for happened in connection.feed(data):
                self._meet(happened)
        except ValueError:
            self._transport.abort()
            return
        if self._is_stuck:
            self._tell()
        if connection.replies:
            self._owed = 0 if self._is_writable else self._owed + len(connection.replies)
            self._write()
            if self._owed > OWED_BYTES:
                self._transport.abort()

    def eof_received(self) -> bool:
        """It will say no more: nothing is left to do for it."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """It is gone."""
        self._forget()

    def pause_writing(self) -> None:
        """It reads slower than it is written to: what it is to be told waits, the newest of each
        kind.
        """
        self._is_writable = self._connection.may_push = False

    def resume_writing(self) -> None:
        """It has read."""
        self._is_writable = self._connection.may_push = True
        self._moved_s = self._loop.time()
        self._connection.push()
        self._tell()

    # --- of the agent ---

    def _meet(self, happened: Happened) -> None:
        match happened:
            case bytes():
                self._hear(happened)
            case Called(path=path, authorization=authorization):
                self._call(path, authorization)
            case Finished():
                self._finish()
            case Cancelled():
                self._close()
            case Wrong(code=code, why=why):
                if not self.number:  # of nobody, as far as is known yet
                    code = grpc.StatusCode.INVALID_ARGUMENT.value[0]
                    why = f"the first message must be Hello: {why}"
                self.end(code, why)

    def _call(self, path: str, authorization: tuple[str, ...]) -> None:
        """The first call says whose connection it is."""
        is_first = not self._connection.is_taken
        if path == ATTACH:
            self._authorization, self._called_s = authorization, self._loop.time()
            for happened in self._connection.take() if is_first else ():
                self._meet(happened)
        elif is_first:
            self._hand_on()
        else:
            why = "an agent's connection takes no other call"
            self.end(grpc.StatusCode.UNIMPLEMENTED.value[0], why)

    def _hear(self, message: bytes) -> None:
        if not self.number:
            if not self._called_s:
                return  # the call is over
            self._called_s = 0.0
            self.rules.host.opened(self, message)
            if not self.is_heard:
                self._hold()  # until it is judged, nothing more of it is held here
        elif self.is_deaf:
            pass
        elif self._is_held or not self.is_heard:
            self._waiting.append(message)
            self._hold()
        else:
            self._report(message)

    def _report(self, message: bytes) -> None:
        rest_s = self.rules.host.reported(self, message)
        if rest_s is None:
            self._hold()
        elif rest_s > 0.0:
            self._hold()
            self._loop.call_later(rest_s, self.go_on)

    def _hold(self) -> None:
        """What is not read stays with its sender."""
        if not self._is_held:
            self._is_held = True
            self._transport.pause_reading()

    def go_on(self) -> None:
        """What waited is handed on, as far as it may be, then more is read."""
        self._is_held = False
        while self._waiting and not self._is_held:
            self._report(self._waiting.popleft())
        if self._is_held or self._transport.is_closing():
            return
        self._heard_s = self._moved_s = self._loop.time()
        self._transport.resume_reading()
        if self._is_finishing and self.number:
            self._is_finishing = False
            self.rules.host.finished(self)

    def _finish(self) -> None:
        if self._called_s:
            self._called_s = 0.0
            self.rules.host.opened(self, b"")
        if self._waiting or self._is_held:
            self._is_finishing = True
        elif self.number:
            self.rules.host.finished(self)

    def tell(self, key: bytes, message: bytes, until_ms: int) -> None:
        """Say something to the agent; a newer message of that key takes over."""
        self.outbox.put(key, message, until_ms)
        self._tell()

    def _tell(self) -> None:
        connection = self._connection
        while True:
            if not connection.is_clear:
                self._write()
            if not (self._is_writable and connection.is_clear and connection.is_open):
                break
            told = self.outbox.next(self._loop.time())
            if told is None:
                break
            self._moved_s = self._loop.time()
            connection.send(told)
            if not self.is_heard:
                self.is_heard = True
                if self._is_held:
                    self._loop.call_soon(self.go_on)
        self._write()
        self._is_stuck = not (self._is_writable and connection.is_clear)

    def end(self, code: int, why: str) -> None:
        """The stream is over, after what is to be said."""
        while (told := self.outbox.next(self._loop.time())) is not None:
            self._connection.send(told)
        self._connection.end(code, why)
        self._write()
        self._close()

    def say_goodbye(self) -> None:
        """The connection is over, too."""
        if not self._over_s and self._upgrade is None:
            self._over_s = self._loop.time()
            self._connection.say_goodbye()
            self._write()

    def shown(self) -> PeerIdentity:
        """Who calls."""
        return shown_of(self._transport, self._peer, self._authorization)

    # --- of the connection ---

    def _write(self) -> None:
        """All that is to be said, as long as the caller takes it."""
        connection, transport = self._connection, self._transport
        while connection.replies:
            data = bytes(connection.replies)
            connection.replies.clear()
            if not transport.is_closing():
                transport.write(data)  # which may say that it is enough
                connection.push()

    def look(self, now_s: float) -> None:
        """What only time tells."""
        if self._upgrade is not None:
            return
        if self._over_s:
            if now_s - self._over_s > LINGER_S:
                self._transport.abort()
        elif self._called_s and now_s - self._called_s > HELLO_WITHIN_S:
            self._called_s = 0.0
            self.rules.host.opened(self, b"")
        elif not self._connection.is_taken and now_s - self._made_s > HANDSHAKE_S:
            self._transport.abort()
        elif not self.number and not self._called_s and now_s - self._heard_s > HANDSHAKE_S:
            self.say_goodbye()  # its call is over, and no other came
        elif self._left_s is not None and now_s > self._left_s:
            if self.number:
                self.end(grpc.StatusCode.UNAVAILABLE.value[0], "this connection is old: come again")
            self.say_goodbye()
        elif self._is_held:
            pass  # it is we who do not listen
        elif now_s - self._heard_s > DEAD_S or (self._is_stuck and now_s - self._moved_s > DEAD_S):
            self._transport.abort()
        elif now_s - self._heard_s > SILENT_S:
            self._connection.ping()
            self._write()

    def _hand_on(self) -> None:
        """It is no agent's: the server of all else has it from its first byte on."""
        self.connections.discard(self)
        shown = shown_of(self._transport, self._peer, ())
        self.rules.socket_proxy.begin(self._transport, self._connection.held(), shown)

    def _close(self) -> None:
        self._called_s = 0.0
        self.is_heard = self.is_deaf = self._is_finishing = False
        self._waiting.clear()
        if self.number:
            self.rules.host.closed(self)
            self.number, self.outbox = 0, Outbox()
        if self._is_held:
            self.go_on()

    def _forget(self) -> None:
        self.connections.discard(self)
        self._close()


def shown_of(transport: Any, peer: str, authorization: tuple[str, ...]) -> PeerIdentity:
    """Who is at the other end of a connection, for a gate."""
    certificate = transport.get_extra_info("peercert") or {}
    names: tuple[tuple[str, str], ...] = certificate.get("subjectAltName", ())
    return PeerIdentity(
        peer=peer,
        authorization=authorization,
        has_certificate=bool(certificate),
        uris=tuple(value for kind, value in names if kind == "URI"),
        names=tuple(value for kind, value in names if kind == "DNS"),
    )


def _peer(name: Any) -> str:
    """As gRPC writes it."""
    host, port = name[:2]
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
