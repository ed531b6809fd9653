"""The agents' gRPC service of an ingest process: one `AgentStream` for each Attach call.

A stream's first message goes to the controller, which welcomes the agent or ends the stream; only
then are reports read. Layouts too large for a stream are offered by their digest and fetched with
a call of their own, so that a plan for a thousand nodes is in memory once.
"""

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pacekeeper.controller.api.auth.peer_identity import PeerIdentity, host_of, peer_identity
from pacekeeper.controller.api.auth.rate_limit import Bucket
from pacekeeper.protos import control_pb2

ATTACH = "/pacekeeper.v1.AgentControlService/Attach"
FETCH_LAYOUT = "/pacekeeper.v1.AgentControlService/FetchLayout"
FIRST_MESSAGES = 64  # read at once: each may have the size of the largest report
UNANSWERED = 1024  # streams at once between their first message and the controller's answer
HELLO_WITHIN_S = 5.0
MAX_HELLO_BYTES = 64 << 10
MAX_WAITING = 256  # messages to one agent; commands are repeated, so the oldest may go
FLUSH_WITHIN_S = 5.0  # of what an agent is sent before its stream ends
AGE_RANGE = (0.75, 0.85)  # of the age at which gRPC itself ends the connection
FETCHES, FETCH_WITHIN_S = 16, 30.0  # at once
MAX_LAYOUTS = 64
Context = Any  # grpc.aio.ServicerContext: its type parameters say nothing here


class StreamHost(Protocol):
    """Callbacks of agents' streams, implemented by the ingest process."""

    def opened(self, stream: "AgentStream", first: bytes) -> None:
        """Called with the first message; it is empty if the stream ended or sent none in time."""

    def reported(self, stream: "AgentStream", data: bytes) -> float | None:
        """Called with each later message.

        Returns:
            Seconds to wait before the next message is read; None: read no more.
        """

    async def ready(self) -> None:
        """Return when the next message may be read."""

    def finished(self, stream: "AgentStream") -> None:
        """Called when the agent has closed its side of the stream."""

    def closed(self, stream: "AgentStream") -> None:
        """Called when the stream has ended."""


@dataclass(slots=True)
class Outbox:
    """Queue of messages to one agent, by key; a newer message replaces a waiting one of its key."""

    capacity: int = MAX_WAITING
    _waiting: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)

    def put(self, key: bytes, message: bytes, until_ms: int = 0) -> None:
        """Queue `message`; beyond the capacity the oldest one is dropped.

        Args:
            key: Kind of the message.
            message: The encoded AttachResponse.
            until_ms: CLOCK_MONOTONIC in ms after which it is not sent; 0: no limit.
        """
        self._waiting.pop(key, None)
        self._waiting[key] = until_ms, message
        while len(self._waiting) > self.capacity:
            del self._waiting[next(iter(self._waiting))]

    def next(self, now_s: float) -> bytes | None:
        """Remove and return the oldest message that may still be sent; None: there is none."""
        while self._waiting:
            until_ms, message = self._waiting.pop(next(iter(self._waiting)))
            if not until_ms or until_ms >= now_s * 1e3:
                return message
        return None


class AgentStream:
    """One agent's Attach call; messages to it are queued and written by a task.

    Attributes:
        number: The stream's number in frames to the controller; 0: not assigned yet.
        bucket: State of its rate limit.
        answered: Set once the controller has sent a message or ended the stream.
    """

    __slots__ = (
        "_context",
        "_loop",
        "_outbox",
        "_over",
        "_writing",
        "answered",
        "bucket",
        "number",
    )

    def __init__(self, context: Context) -> None:
        self.number = 0
        self.bucket: Bucket | None = None
        self.answered = asyncio.Event()
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox()
        self._over: asyncio.Future[tuple[int, str]] = self._loop.create_future()
        self._writing: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether `end` was called."""
        return self._over.done()

    def identity(self) -> PeerIdentity:
        """The caller's identity: its address, certificate and headers."""
        return peer_identity(self._context)

    def send(self, key: bytes, message: bytes, until_ms: int) -> None:
        """Queue a message, see `Outbox.put`; ignored once the stream is over."""
        if self.is_over:
            return
        self._outbox.put(key, message, until_ms)
        self.answered.set()
        if self._writing is None:
            self._writing = self._loop.create_task(self._write())

    def end(self, code: int, reason: str) -> None:
        """End the stream with this gRPC status once the queued messages are written."""
        if not self.is_over:
            self._over.set_result((code, reason))
        self.answered.set()

    async def ended(self) -> tuple[int, str]:
        """Wait for `end` and for the queued messages, at most FLUSH_WITHIN_S; return the status."""
        over = await self._over
        if self._writing is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_WITHIN_S):
                    await asyncio.shield(self._writing)
        return over

    async def _write(self) -> None:
        try:
            while (message := self._outbox.next(self._loop.time())) is not None:
                await self._context.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            pass  # the agent is gone; its stream ends by itself
        finally:
            self._writing = None


class LayoutStore:
    """Offered layouts by SHA-256 digest. Only nodes that received the offer know the digest."""

    def __init__(self) -> None:
        self._layouts: dict[bytes, bytes] = {}

    def keep(self, offer: control_pb2.OfferPlan) -> None:
        """Keep the layout of an offer; beyond MAX_LAYOUTS the least recently offered is dropped."""
        self._layouts.pop(offer.sha256, None)
        self._layouts[offer.sha256] = offer.layout_json
        while len(self._layouts) > MAX_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]

    def get(self, sha256: bytes) -> bytes | None:
        """The layout with this digest; None: it is not on offer."""
        return self._layouts.get(sha256)


class FairSlots:
    """A semaphore that serves waiting hosts in turn, so that no host can starve the others.

    Args:
        count: Number of slots.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by host; the first is next

    @contextlib.asynccontextmanager
    async def taken(self, host: str) -> AsyncIterator[None]:
        """Hold a slot while the block runs; waits until one is free and it is the host's turn."""
        if self._free:
            self._free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(host, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()  # it was granted meanwhile
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Give the slot to the oldest caller of the next host; free it if no caller waits."""
        while self._waiting:
            host, turns = next(iter(self._waiting.items()))
            del self._waiting[host]
            turn = turns.popleft()
            if turns:
                self._waiting[host] = turns  # behind the other hosts
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class AgentHandler(grpc.GenericRpcHandler):
    """The methods of AgentControlService, on encoded messages."""

    def __init__(self, host: StreamHost, layouts: LayoutStore, age_s: float | None) -> None:
        """Create the handler.

        Args:
            host: Receives the streams.
            layouts: Layouts on offer.
            age_s: Age at which gRPC ends connections; streams end before, with OK. None: never.
        """
        self._host, self._layouts, self._age_s = host, layouts, age_s
        self._first = FairSlots(FIRST_MESSAGES)
        self._unanswered = FairSlots(UNANSWERED)
        self._fetches = asyncio.Semaphore(FETCHES)
        self._reading: set[asyncio.Task[None]] = set()

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a method; None for methods of other services."""
        handlers = {ATTACH: self._attach, FETCH_LAYOUT: self._fetch}
        handler = handlers.get(handler_call_details.method)
        return None if handler is None else grpc.stream_stream_rpc_method_handler(handler)

    async def _attach(self, _requests: object, context: Context) -> None:
        stream = AgentStream(context)
        ageing = None
        try:
            host = host_of(context.peer())
            async with self._first.taken(host):
                first = await _first_message(context)
                if len(first) > MAX_HELLO_BYTES:
                    stream.end(
                        grpc.StatusCode.INVALID_ARGUMENT.value[0],
                        f"the first message must be Hello: {len(first)} bytes are none",
                    )
                    first = b""
            if not stream.is_over:
                async with self._unanswered.taken(host):
                    self._host.opened(stream, first)
                    await stream.answered.wait()
            if not stream.is_over:
                task = asyncio.create_task(self._read(stream, context))
                self._reading.add(task)
                task.add_done_callback(self._reading.discard)
                if self._age_s is not None:
                    age_s = self._age_s * random.uniform(*AGE_RANGE)
                    ageing = asyncio.get_running_loop().call_later(age_s, stream.end, 0, "")
            code, reason = await stream.ended()
        finally:
            stream.end(0, "")  # nothing more of it is read or written
            if ageing is not None:
                ageing.cancel()
            if stream.number:
                self._host.closed(stream)
        if code:
            await context.abort(_STATUS[code], reason)

    async def _read(self, stream: AgentStream, context: Context) -> None:
        # Ends with the call; cancelling a read would leave it to gRPC's core.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            while (data := await context.read()) is not grpc.aio.EOF:
                if stream.is_over:
                    return
                wait_s = self._host.reported(stream, data)
                if wait_s is None:
                    return
                if wait_s > 0.0:
                    await asyncio.sleep(wait_s)
                await self._host.ready()
            if not stream.is_over:
                self._host.finished(stream)

    async def _fetch(self, _requests: object, context: Context) -> None:
        """Answer with the layout of the requested digest.

        A unary call for the agent; a stream here, so that the slot is held until it is written.
        """
        try:
            request = control_pb2.FetchLayoutRequest.FromString(await _first_message(context))
        except DecodeError:
            request = control_pb2.FetchLayoutRequest()
        layout = self._layouts.get(request.sha256)
        if layout is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no layout on offer has this digest")
            return
        async with self._fetches, asyncio.timeout(FETCH_WITHIN_S):
            response = control_pb2.FetchLayoutResponse(layout_json=layout)
            await context.write(response.SerializeToString())


async def _first_message(context: Context) -> bytes:
    """The first message of a call; empty if none comes in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HELLO_WITHIN_S):
            data: Any = await context.read()
            return b"" if data is grpc.aio.EOF else bytes(data)
    return b""


_STATUS = {status.value[0]: status for status in grpc.StatusCode}
