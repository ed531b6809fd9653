"""The front: a process that ends the streams of agents, and decides nothing.

It takes reports in and hands their bytes on, packed, over one socket to the controller that started
it; what comes back it sends. A controller that is busy reads no more, then neither does the front,
and reports stay with their agents. It lives as long as that socket.
"""

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pacekeeper.controller import line
from pacekeeper.controller.outbox import Outbox
from pacekeeper.controller.rates import Limit, full, owe, report_cost
from pacekeeper.controller.relay import Relay, shown_by
from pacekeeper.core.errors import PacekeeperError
from pacekeeper.core.security_config import TlsConfig
from pacekeeper.protos import control_pb2, secure, wire

ATTACH = "/pacekeeper.v1.AgentControlService/Attach"
HELLO_WITHIN_S = 10.0
MOST_OF_A_HELLO = 64 << 10
FLUSH_S = 0.005  # what comes within so long is handed on together
UNSENT_BYTES = 4 << 20  # on the way to the controller; beyond it nothing more is read of agents
READ_BYTES = 1 << 18
LATE_S = 0.1
STREAMS_AT_REST = 1000  # so many rest as long as the loop was late, more of them longer
LONGEST_REST_S = 2.0  # agents wait for 15 s
DRAIN_S = 2.0
COMMAND_BYTES = 64 << 20
GARBAGE_AFTER = 100_000  # allocations: streams are many to walk over, and make no cycles
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_log = logging.getLogger(__name__)
Context = Any  # grpc.aio.ServicerContext: its type parameters say nothing here


class Line:
    """The socket to the controller, written to in packets."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        writer.transport.set_write_buffer_limits(high=UNSENT_BYTES)
        self._packet: list[bytes] = []
        self._size = 0
        self._due_s = 0.0
        self.late_s = 0.0  # how late the last packet was: how much there is to do
        self._loop = asyncio.get_running_loop()

    def put(self, kind: int, stream: int = 0, number: int = 0, data: bytes = b"") -> None:
        """Say something soon, in order."""
        if not self._packet:
            self._due_s = self._loop.time() + FLUSH_S
            self._loop.call_at(self._due_s, self._flush_in_time)
        self._packet.append(line.frame(kind, stream, number, data))
        self._size += len(data)

    def _flush_in_time(self) -> None:
        self.late_s = self._loop.time() - self._due_s
        self.flush()

    def flush(self) -> None:
        """Say all of it now."""
        if self._packet:
            self._writer.write(b"".join(self._packet))
            self._packet.clear()
            self._size = 0

    @property
    def is_full(self) -> bool:
        """Too much is on its way: nothing more should be read of agents."""
        return self._size + self._writer.transport.get_write_buffer_size() > UNSENT_BYTES

    async def ready(self) -> None:
        """Until there is room."""
        self.flush()
        await self._writer.drain()


@dataclass(slots=True, eq=False, kw_only=True)
class _Stream:
    """One agent's. `end`: why it is ended, a status code and words."""

    outbox: Outbox = field(default_factory=Outbox)
    is_heard: asyncio.Event = field(default_factory=asyncio.Event)
    end: tuple[grpc.StatusCode, str] | None = None


class Front(grpc.GenericRpcHandler):
    """All streams, and the relay for what is none."""

    def __init__(self, out: Line, *, relay: Relay, reports: Limit) -> None:
        self._out, self._relay, self._reports = out, relay, reports
        self._streams: dict[int, _Stream] = {}
        self._newest = 0

    def service(self, handler_call_details: Any) -> Any:
        """The handler of any method."""
        method = handler_call_details.method
        if method == ATTACH:
            return grpc.stream_stream_rpc_method_handler(self.attach)
        return self._relay.handler(method)

    async def attach(self, requests: Any, context: Context) -> None:
        """One agent's stream: what it says goes to the controller, which answers and ends it."""
        first: Any = b""
        with contextlib.suppress(TimeoutError):
            first = await asyncio.wait_for(context.read(), HELLO_WITHIN_S)
        if first is grpc.aio.EOF:
            first = b""
        if len(first) > MOST_OF_A_HELLO:  # of nobody, as far as is known yet
            why = f"the first message must be Hello: {len(first)} bytes are none"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
        self._newest = number = self._newest % 0xFFFFFFFF + 1
        stream = self._streams[number] = _Stream()
        self._out.put(line.OPENED, number, data=line.with_head(shown_by(context).to_bytes(), first))
        reader = asyncio.create_task(self._read(number, stream, context))
        try:
            while (told := await stream.outbox.get()) is not None:
                until_ms, message = told
                if until_ms and until_ms < time.monotonic() * 1e3:
                    continue  # said in a term that may be over: it is said again
                await context.write(message)
                stream.is_heard.set()
        finally:
            reader.cancel()
            del self._streams[number]
            self._out.put(line.CLOSED, number)
        if stream.end is not None:
            await context.abort(*stream.end)

    async def _read(self, number: int, stream: _Stream, context: Context) -> None:
        """Reports, once the agent is welcome, as fast as it may send them."""
        await stream.is_heard.wait()
        out, limit = self._out, self._reports
        bucket = full(limit, time.monotonic())
        while (data := await context.read()) is not grpc.aio.EOF:
            try:
                sequence = sequence_of(data)
            except ValueError as error:
                out.put(line.MALFORMED, number, data=str(error).encode())
                return
            bucket, wait_s = owe(bucket, limit, time.monotonic(), report_cost(len(data)))
            if wait_s > 0.0:
                await asyncio.sleep(wait_s)  # what is not read stays with its sender
            out.put(line.REPORT, number, sequence, data)
            if out.is_full:
                await out.ready()
            if (rest_s := rest(out.late_s, len(self._streams))) > 0.0:
                await asyncio.sleep(rest_s)
        out.put(line.FINISHED, number)

    def hear(self, kind: int, number: int, value: int, data: bytes) -> None:
        """One frame of the controller. Raises ValueError for what it can not have said."""
        match kind:
            case line.SEND:
                numbers, key, message = line.sent_in(data)
                for one in numbers:
                    if (stream := self._streams.get(one)) is not None:
                        stream.outbox.put(key, message, value)
            case line.ACKNOWLEDGE:
                self._acknowledge(data)
            case line.END:
                if (stream := self._streams.get(number)) is not None:
                    _end(stream, _CODES[value], data.decode())
            case line.PING:
                self._out.put(line.ALIVE)
            case _:
                raise ValueError(f"a frame of kind {kind} from the controller")

    def _acknowledge(self, data: bytes) -> None:
        term, until_ms, pairs = line.acknowledged_in(data)
        for number, sequence in pairs:
            if (stream := self._streams.get(number)) is not None:
                acknowledge = control_pb2.Acknowledge(sequence=sequence)
                message = control_pb2.AttachResponse(acknowledge=acknowledge, term=term)
                stream.outbox.put(b"", message.SerializeToString(), until_ms)

    def end_all(self) -> None:
        """The service is going down: agents come back by themselves."""
        for stream in self._streams.values():
            _end(stream, grpc.StatusCode.UNAVAILABLE, "the controller is going down")


def rest(late_s: float, num_streams: int) -> float:
    """How long a stream is not read, in seconds, by how late everything is.

    gRPC lets one newcomer in for each round of the loop: where a round serves hundreds of reports
    of those who are in, the others would wait for a minute. What is not read stays with its agent.
    """
    if late_s < LATE_S:
        return 0.0
    return min(LONGEST_REST_S, late_s * num_streams / STREAMS_AT_REST)


def sequence_of(data: bytes) -> int:
    """The number of the report in an AttachRequest: read whole here, so that nobody else needs to.

    Raises ValueError for anything else.
    """
    try:
        request = control_pb2.AttachRequest.FromString(data)
    except DecodeError:
        raise ValueError("what came is no message of this protocol") from None
    if request.WhichOneof("message") != "report":
        raise ValueError("expected a report after Hello")
    return request.report.sequence


def _end(stream: _Stream, code: grpc.StatusCode, why: str) -> None:
    if code is not grpc.StatusCode.OK and stream.end is None:
        stream.end = code, why
    stream.outbox.close()


def _open(server: grpc.aio.Server, settings: Any, out: Line) -> tuple[int, str]:
    """The port it listens on; 0 and why where it can not."""
    loop, tls = asyncio.get_running_loop(), TlsConfig(**settings["tls"])

    def connected() -> None:  # by any thread
        loop.call_soon_threadsafe(out.put, line.CONNECTED)

    try:
        if not tls.cert:
            return server.add_insecure_port(settings["listen"]), ""
        credentials = secure.server_credentials(tls, on_connection=connected)
        return server.add_secure_port(settings["listen"], credentials), ""
    except RuntimeError:
        return 0, ""
    except PacekeeperError as error:
        return 0, str(error)


async def serve(own: socket.socket) -> None:
    """Until the controller says so, or is gone. Raises ValueError for what it can not have said."""
    reader, writer = await asyncio.open_unix_connection(sock=own)
    out, frames = Line(writer), line.Frames(COMMAND_BYTES)
    server: grpc.aio.Server | None = None
    front: Front | None = None
    while data := await reader.read(READ_BYTES):
        for kind, number, value, content in frames.feed(data):
            if kind == line.SERVE:
                settings = json.loads(content)
                front = Front(
                    out, relay=Relay(settings["inner"]), reports=Limit(**settings["reports"])
                )
                server = grpc.aio.server(
                    handlers=(front,),
                    options=wire.server_options(
                        settings["max_report_bytes"], settings["connection_s"]
                    ),
                )
                port, why = _open(server, settings, out)
                if port:
                    await server.start()
                out.put(line.LISTENS, 0, port, why.encode())
            elif kind == line.DRAIN:
                if front is not None and server is not None:
                    front.end_all()
                    await server.stop(DRAIN_S)
                out.flush()
                await writer.drain()
                return
            elif front is not None:
                front.hear(kind, number, value, content)


async def _run(own: socket.socket) -> None:
    """Ends the process from inside the loop: to cancel thousands of streams first takes for ever,
    and meanwhile the port is taken for whoever comes next.
    """
    code = 0
    try:
        await serve(own)
    except ConnectionError:
        pass  # the controller is gone
    except Exception:
        _log.exception("the front fails")
        code = 1
    logging.shutdown()
    os._exit(code)


def main() -> None:
    """`python -m pacekeeper.controller.front FD`: the controller starts it, nobody else."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s front %(message)s", stream=sys.stderr
    )
    # A terminal and systemd send these to both processes: it is the controller that ends this one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    gc.set_threshold(GARBAGE_AFTER, 50, 1000)
    asyncio.run(_run(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
