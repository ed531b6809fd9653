"""Hands calls that are no agent's stream on to the controller's server, bytes for bytes.

They come by pipes (`pipes.py`). The controller serves them on a socket that only its own user can
open; who really calls stands in one header, which nobody else can set: the caller's own headers of
that name are left out.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from pacekeeper.controller.api.auth.peer_identity import (
    CALLER_HEADER,
    PeerIdentity,
)
from pacekeeper.protos.convert import reports


class _End(asyncio.Protocol):
    """One end of a pipe. What the other end can not take is not read here."""

    def __init__(self, transport: Any = None) -> None:
        self.transport = transport
        self.other: _End | None = None

    def connection_made(self, transport: Any) -> None:
        """It is open."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """To the other end."""
        if self.other is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        """The other end waits."""
        if self.other is not None:
            with contextlib.suppress(RuntimeError):
                self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        """It goes on."""
        if self.other is not None:
            with contextlib.suppress(RuntimeError):
                self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Both end."""
        if self.other is not None:
            self.other.transport.close()


class _Inner(_End):
    """The end at the server."""

    def __init__(self, socket_proxy: "SocketProxy", name: str) -> None:
        super().__init__()
        self._pipes, self._name = socket_proxy, name

    def connection_lost(self, error: Exception | None) -> None:
        """And nobody has its name any more."""
        super().connection_lost(error)
        self._pipes.forget(self._name)


class SocketProxy:
    """All of them, to a server that listens at `address` in a folder of ours."""

    def __init__(self, address: Path) -> None:
        self._address = address
        self._callers: dict[str, PeerIdentity] = {}
        self._newest = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_open(self) -> bool:
        """The server's socket is there."""
        return self._address.is_socket()

    def caller(self, peer: str) -> PeerIdentity | None:
        """Whose connection has this name."""
        return self._callers.get(peer)

    def begin(self, transport: Any, first: bytes, shown: PeerIdentity) -> None:
        """Hand a connection on, which began with these bytes."""
        transport.pause_reading()
        outer = _End(transport)
        transport.set_protocol(outer)
        task = asyncio.get_running_loop().create_task(self._join(outer, first, shown))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, outer: _End, first: bytes, shown: PeerIdentity) -> None:
        self._newest += 1
        name = f"{self._address}-{os.getpid()}-{self._newest}"
        made = socket.socket(socket.AF_UNIX)
        try:
            made.setblocking(False)
            made.bind(name)
            self._callers[f"unix:{name}"] = shown
            loop = asyncio.get_running_loop()
            await loop.sock_connect(made, str(self._address))
            _, inner = await loop.create_unix_connection(lambda: _Inner(self, name), sock=made)
        except OSError:
            made.close()
            self.forget(name)
            outer.transport.abort()
            return
        outer.other, inner.other = inner, outer
        inner.transport.write(first)
        if outer.transport.is_closing():
            inner.transport.close()
        else:
            outer.transport.resume_reading()

    def forget(self, name: str) -> None:
        """Its connection is over."""
        self._callers.pop(f"unix:{name}", None)
        with contextlib.suppress(OSError):
            os.unlink(name)


ATTACH = "/pacekeeper.v1.AgentControlService/Attach"
DRAIN_S = 2.0
LOOKS, LOOK_S = 200, 0.01
_OURS = "x-pacekeeper-"
_CUT_OFF = "Internal error from Core"  # what grpc.aio says of a message that could not be sent
_HOPS = ("grpc-", ":", "te", "content-type", "user-agent")  # of one connection each
End = tuple[grpc.StatusCode, str | None, Any]
Context = Any  # grpc.aio.ServicerContext: its type parameters say nothing here


def with_authorization(context: Context, connection: PeerIdentity) -> PeerIdentity:
    """The identity of a connection with the authorization headers of one call."""
    return replace(
        connection,
        authorization=tuple(
            value
            for name, value in context.invocation_metadata() or ()
            if name.lower() == "authorization" and isinstance(value, str)
        ),
    )


class GrpcProxy(grpc.GenericRpcHandler):
    """Hands calls on to `address`, all kinds as streams: on the wire they are the same."""

    def __init__(self, address: str) -> None:
        """`pipes`, once it is there, knows whose connection a call came by."""
        self.socket_proxy: SocketProxy | None = None
        self._channel = grpc.aio.insecure_channel(address, options=reports.GRPC_OPTIONS_CLIENT)

    def service(self, handler_call_details: Any) -> Any:
        """The handler of any method."""
        method = handler_call_details.method

        async def hand_on(requests: AsyncIterator[bytes], context: Context) -> None:
            left_s = context.time_remaining()
            assert self.socket_proxy is not None, "calls come by them"
            connection = self.socket_proxy.caller(context.peer())
            if connection is None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection is over")
                return
            if method == ATTACH:
                why = "an agent's stream begins with the first call of its connection"
                await context.abort(grpc.StatusCode.UNAVAILABLE, why)
            stub: Any = self._channel.stream_stream(method)
            headers = _headers(context, with_authorization(context, connection))
            call = stub(requests, metadata=headers, timeout=left_s)
            ends = CallOutcome(call)
            try:
                async for message in call:
                    await context.write(message)
                await call.code()
            except grpc.aio.AioRpcError:
                pass  # it is among its ends
            finally:
                call.cancel()
            code, words, trailing = await ends.answer()
            context.set_trailing_metadata(_own(trailing))
            if code is not grpc.StatusCode.OK:
                await context.abort(code, words or "")

        return grpc.stream_stream_rpc_method_handler(hand_on)

    async def close(self) -> None:
        """Calls that are open end."""
        await self._channel.close()


class CallOutcome:
    """What grpc.aio says of the end of a call: more than once, where it is refused while its
    request is still being sent. Then it says INTERNAL, before or after the answer itself.
    """

    def __init__(self, call: Any) -> None:
        self._answer: End | None = None
        self._last: End | None = None
        call.add_done_callback(self._hear)

    async def answer(self) -> End:
        """The other side's; what there is where none comes."""
        for _ in range(LOOKS):
            if self._answer is not None:
                break
            await asyncio.sleep(LOOK_S)
        end = self._answer or self._last
        assert end is not None, "the call is over"
        return end

    def _hear(self, call: Any) -> None:
        self._last = _known(call.code()), _known(call.details()), _known(call.trailing_metadata())
        is_answer = self._last[:2] != (grpc.StatusCode.INTERNAL, _CUT_OFF)
        self._answer = self._answer or (self._last if is_answer else None)


def _known(answer: Coroutine[Any, Any, Any]) -> Any:
    """Of a call that is over: nothing is waited for."""
    try:
        answer.send(None)
    except StopIteration as said:
        return said.value
    raise AssertionError("the call is over")


@contextlib.asynccontextmanager
async def relaying(inner: Path, settings: Mapping[str, Any]) -> AsyncIterator[SocketProxy]:
    """The way for connections that are no agent's to the server at `inner`. Raises OSError."""
    relay = GrpcProxy(f"unix:{inner}")
    own = inner.with_name(f"ingest-{os.getpid()}")
    options = reports.server_options(settings["max_report_bytes"], settings["connection_s"])
    server = grpc.aio.server(handlers=(relay,), options=options)
    try:
        server.add_insecure_port(f"unix:{own}")
    except RuntimeError as error:
        raise OSError(f"no socket at {own}") from error
    relay.socket_proxy = SocketProxy(own)
    await server.start()
    try:
        yield relay.socket_proxy
    finally:
        await server.stop(DRAIN_S)
        await relay.close()


def _headers(context: Context, shown: PeerIdentity) -> list[tuple[str, str | bytes]]:
    own = _own(context.invocation_metadata())
    kept = [(name, value) for name, value in own if not name.lower().startswith(_OURS)]
    return [*kept, (CALLER_HEADER, shown.to_bytes())]


def _own(metadata: Any) -> tuple[tuple[str, str | bytes], ...]:
    return tuple((name, value) for name, value in metadata or () if not name.startswith(_HOPS))
