"""The ingest process: serves agents' streams over gRPC and decides nothing.

It forwards the bytes of reports in packed frames over one socket to the controller that started it,
and sends the controller's messages to agents. While the controller does not read, neither does the
ingest process, so reports stay in the agents' spools. The process ends when the socket closes.
"""

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pacekeeper.controller.api.auth.rate_limit import Limit, charge, full_bucket, report_cost
from pacekeeper.controller.api.refusals import for_agents_only
from pacekeeper.controller.ingest import ipc
from pacekeeper.controller.ingest.agent_stream import AgentHandler, AgentStream, LayoutStore
from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.errors import PacekeeperError
from pacekeeper.protos import control_pb2
from pacekeeper.protos import tls as secure
from pacekeeper.protos.convert import reports

FLUSH_S = 0.005  # frames of this time are sent together
UNSENT_BYTES = 4 << 20  # to the controller; beyond it agents' streams are not read
READ_BYTES = 1 << 18
COMMAND_BYTES = 64 << 20
ON_STREAM_BYTES = 64 << 10  # an offer beyond it is sent without its layout, which is fetched
MAX_NUMBER = 0xFFFF0000  # of streams, in 32 bits
ACK_KEY = b"acknowledge"  # a newer acknowledgement replaces a queued one
DRAIN_S = 2.0
GARBAGE_AFTER = 100_000  # allocations between collections: streams are many and have no cycles
_log = logging.getLogger(__name__)


class ControllerLink:
    """The socket to the controller; frames are written in packets."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        writer.transport.set_write_buffer_limits(high=UNSENT_BYTES)
        self._packet: list[bytes] = []
        self._size = 0
        self._loop = asyncio.get_running_loop()

    def put(self, kind: int, stream: int = 0, number: int = 0, data: bytes = b"") -> None:
        """Queue a frame; it is sent within FLUSH_S, in order."""
        if not self._packet:
            self._loop.call_later(FLUSH_S, self.flush)
        self._packet.append(ipc.frame(kind, stream, number, data))
        self._size += len(data)

    def flush(self) -> None:
        """Send all queued frames."""
        if self._packet:
            self._writer.write(b"".join(self._packet))
            self._packet.clear()
            self._size = 0

    @property
    def is_full(self) -> bool:
        """Whether more than UNSENT_BYTES are unsent, so that agents' streams should not be read."""
        return self._size + self._writer.transport.get_write_buffer_size() > UNSENT_BYTES

    async def ready(self) -> None:
        """Wait until the socket accepts more."""
        self.flush()
        await self._writer.drain()


class IngestWorker:
    """All agents' streams of one ingest process.

    Args:
        out: The connection to the controller.
        reports: Rate limit of reports on one stream.
        first_number: Number of the first stream; those of `step` ingest processes never collide.
        step: Number of ingest processes.
    """

    def __init__(
        self, out: ControllerLink, *, reports: Limit, first_number: int = 1, step: int = 1
    ) -> None:
        self._out, self._reports = out, reports
        self._next, self._first, self._step = first_number, first_number, step
        self._streams: dict[int, AgentStream] = {}
        self.layouts = LayoutStore()

    def opened(self, stream: AgentStream, first: bytes) -> None:
        """Announce a stream: the controller welcomes the agent or ends the stream."""
        stream.number = self._next
        self._next += self._step
        if self._next > MAX_NUMBER:
            self._next = self._first
        stream.bucket = full_bucket(self._reports, time.monotonic())
        self._streams[stream.number] = stream
        shown = stream.identity().to_bytes()
        self._out.put(ipc.OPENED, stream.number, data=ipc.join_header(shown, first))

    def reported(self, stream: AgentStream, data: bytes) -> float | None:
        """Forward a report. Returns seconds until the next may be read; None: read no more."""
        try:
            sequence = sequence_of(data)
        except ValueError as error:
            self._out.put(ipc.MALFORMED, stream.number, data=str(error).encode())
            return None
        assert stream.bucket is not None, "the stream is open"
        cost = report_cost(len(data))
        stream.bucket, wait_s = charge(stream.bucket, self._reports, time.monotonic(), cost)
        self._out.put(ipc.REPORT, stream.number, sequence, data)
        return wait_s

    async def ready(self) -> None:
        """Wait while the controller does not keep up; unread reports stay with the agents."""
        while self._out.is_full:
            await self._out.ready()

    def finished(self, stream: AgentStream) -> None:
        """The agent will send no more."""
        self._out.put(ipc.FINISHED, stream.number)

    def closed(self, stream: AgentStream) -> None:
        """The stream has ended."""
        if self._streams.pop(stream.number, None) is not None:
            self._out.put(ipc.CLOSED, stream.number)

    def handle_frame(self, kind: int, number: int, value: int, data: bytes) -> None:
        """Handle one frame of the controller. Raises ValueError for an impossible one."""
        match kind:
            case ipc.SEND:
                numbers, key, message = ipc.decode_send(data)
                message = self._without_layout(message)
                for one in numbers:
                    if (stream := self._streams.get(one)) is not None:
                        stream.send(key, message, value)
            case ipc.ACKNOWLEDGE:
                self._acknowledge(data)
            case ipc.END:
                if (stream := self._streams.get(number)) is not None:
                    stream.end(value, data.decode())
            case ipc.PING:
                self._out.put(ipc.ALIVE)
            case _:
                raise ValueError(f"a frame of kind {kind} from the controller")

    def _without_layout(self, message: bytes) -> bytes:
        """Remove a large layout from an offer, so that agents fetch it; other messages stay."""
        if len(message) <= ON_STREAM_BYTES:
            return message
        response = control_pb2.AttachResponse.FromString(message)
        if response.WhichOneof("message") != "offer_plan":
            return message
        self.layouts.keep(response.offer_plan)
        response.offer_plan.layout_json = b""
        return bytes(response.SerializeToString())

    def _acknowledge(self, data: bytes) -> None:
        term, until_ms, pairs = ipc.decode_acknowledge(data)
        for number, sequence in pairs:
            if (stream := self._streams.get(number)) is not None:
                acknowledge = control_pb2.Acknowledge(sequence=sequence)
                message = control_pb2.AttachResponse(acknowledge=acknowledge, term=term)
                stream.send(ACK_KEY, message.SerializeToString(), until_ms)

    def end_all(self) -> None:
        """End all streams because the controller stops; agents reconnect by themselves."""
        for stream in list(self._streams.values()):
            stream.end(grpc.StatusCode.UNAVAILABLE.value[0], "the controller is going down")


def sequence_of(data: bytes) -> int:
    """The sequence number of the report in an AttachRequest, which is validated completely.

    Raises ValueError if it is not a report.
    """
    try:
        request = control_pb2.AttachRequest.FromString(data)
    except DecodeError:
        raise ValueError("the message is not of this protocol") from None
    if request.WhichOneof("message") != "report":
        raise ValueError("expected a report after Hello")
    return request.report.sequence


async def serve(own: socket.socket) -> None:
    """Serve until drained or the socket closes; then the caller ends the process.

    Raises ValueError for an invalid frame.
    """
    reader, writer = await asyncio.open_unix_connection(sock=own)
    out, frames = ControllerLink(writer), ipc.Frames(COMMAND_BYTES)
    worker: IngestWorker | None = None
    server: grpc.aio.Server | None = None
    while data := await reader.read(READ_BYTES):
        for kind, number, value, content in frames.feed(data):
            if kind == ipc.SERVE:
                settings = json.loads(content)
                worker = IngestWorker(
                    out,
                    reports=Limit(**settings["reports"]),
                    first_number=settings["index"] + 1,
                    step=settings["processes"],
                )
                server, port, reason = await _open(worker, settings)
                out.put(ipc.LISTENS, 0, port, reason.encode())
            elif kind == ipc.DRAIN:
                if worker is not None and server is not None:
                    worker.end_all()
                    await server.stop(DRAIN_S)
                out.flush()
                await writer.drain()
                return
            elif worker is not None:
                worker.handle_frame(kind, number, value, content)


async def _open(worker: IngestWorker, settings: Any) -> tuple[grpc.aio.Server | None, int, str]:
    """Start the gRPC server.

    Returns:
        The server and its port; None, 0 and the reason if it cannot listen.
    """
    tls, age_s = TlsConfig(**settings["tls"]), settings["connection_s"]
    options = {
        **dict(reports.server_options(settings["max_report_bytes"], age_s)),
        "grpc.so_reuseport": int(settings["processes"] > 1),
    }
    server = grpc.aio.server(
        handlers=(
            AgentHandler(worker, worker.layouts, age_s),
            for_agents_only(settings["api_listen"]),
        ),
        options=tuple(options.items()),
    )
    try:
        if tls.cert:
            port = server.add_secure_port(settings["listen"], secure.server_credentials(tls))
        else:
            port = server.add_insecure_port(settings["listen"])
    except RuntimeError:
        return None, 0, ""
    except PacekeeperError as error:
        return None, 0, str(error)
    await server.start()
    return server, port, ""


async def _run(own: socket.socket) -> None:
    """Serve, then end the process from inside the loop, with all streams.

    Ending thousands of streams one by one takes seconds, in which their agents do not reconnect.
    """
    code = 0
    try:
        await serve(own)
    except ConnectionError:
        pass  # the controller is gone
    except Exception:
        _log.exception("the ingest process fails")
        code = 1
    logging.shutdown()
    os._exit(code)


def main() -> None:
    """Run `python -m pacekeeper.controller.ingest.worker FD`, which the controller starts."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s ingest %(message)s", stream=sys.stderr
    )
    # Terminals and systemd send these to both processes; the controller ends this one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    gc.set_threshold(GARBAGE_AFTER, 50, 1000)
    asyncio.run(_run(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
