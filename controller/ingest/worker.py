"""The ingest process: a process that ends the streams of agents, and decides nothing.

It takes reports in and hands their bytes on, packed, over one socket to the controller that started
it; what comes back it sends. A controller that is busy reads no more, then neither does the
ingest process, and reports stay with their agents. It lives as long as that socket.
"""

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pacekeeper.controller.api.auth.rate_limit import Limit, charge, full_bucket, report_cost
from pacekeeper.controller.ingest import ipc
from pacekeeper.controller.ingest.http2.agent_stream import AgentConnection, ConnectionConfig
from pacekeeper.controller.ingest.http2.batching_selector import CoalescingSelector
from pacekeeper.controller.ingest.http2.listener import hold_little, listening
from pacekeeper.controller.ingest.http2.proxy import SocketProxy, relaying
from pacekeeper.controller.ingest.http2.send_queue import SendBuffer
from pacekeeper.controller.ingest.runtime_dir import no_folder
from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.errors import PacekeeperError
from pacekeeper.protos import control_pb2
from pacekeeper.protos import tls as secure

FLUSH_S = 0.005  # what comes within so long is handed on together
UNSENT_BYTES = 4 << 20  # on the way to the controller; beyond it nothing more is read of agents
READ_BYTES = 1 << 18
REST_S, REST_S_PER_STREAM = 0.005, 5e-7
COMMAND_BYTES = 64 << 20
WAITING_BYTES = 256 << 20  # of all that is to be told to agents, each message once
GARBAGE_AFTER = 100_000  # allocations: streams are many to walk over, and make no cycles
_log = logging.getLogger(__name__)


class ControllerLink:
    """The socket to the controller, written to in packets."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        writer.transport.set_write_buffer_limits(high=UNSENT_BYTES)
        self._packet: list[bytes] = []
        self._size = 0
        self._loop = asyncio.get_running_loop()

    def put(self, kind: int, stream: int = 0, number: int = 0, data: bytes = b"") -> None:
        """Say something soon, in order."""
        if not self._packet:
            self._loop.call_later(FLUSH_S, self.flush)
        self._packet.append(ipc.frame(kind, stream, number, data))
        self._size += len(data)

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


class IngestWorker:
    """All agents' streams."""

    def __init__(
        self, out: ControllerLink, *, reports: Limit, looks: CoalescingSelector | None = None
    ) -> None:
        self._out, self._reports, self._looks = out, reports, looks
        self._streams: dict[int, AgentConnection] = {}
        self._shelf, self._is_full = SendBuffer(WAITING_BYTES), False
        self._newest = 0
        self.socket_proxy: SocketProxy | None = None
        self._waiting: list[AgentConnection] = []  # for room on the line
        self._making_room: asyncio.Task[None] | None = None

    def opened(self, lane: AgentConnection, first: bytes) -> None:
        """One agent's stream begins: the controller answers, and ends it."""
        self._newest = lane.number = self._newest % 0xFFFFFFFF + 1
        lane.bucket = full_bucket(self._reports, time.monotonic())
        self._streams[lane.number] = lane
        self._rest()
        shown = lane.shown().to_bytes()
        self._out.put(ipc.OPENED, lane.number, data=ipc.join_header(shown, first))

    def reported(self, lane: AgentConnection, data: bytes) -> float | None:
        """A report, as fast as the agent may send them; None: until there is room for more."""
        try:
            sequence = sequence_of(data)
        except ValueError as error:
            self._out.put(ipc.MALFORMED, lane.number, data=str(error).encode())
            lane.is_deaf = True  # the controller ends it
            return 0.0
        cost = report_cost(len(data))
        lane.bucket, wait_s = charge(lane.bucket, self._reports, time.monotonic(), cost)
        self._out.put(ipc.REPORT, lane.number, sequence, data)
        if not self._out.is_full:
            return wait_s
        self._waiting.append(lane)
        if self._making_room is None:
            self._making_room = asyncio.get_running_loop().create_task(self._make_room())
        return None

    async def _make_room(self) -> None:
        await self._out.ready()
        self._making_room = None
        waiting, self._waiting = self._waiting, []
        for lane in waiting:
            lane.go_on()

    def finished(self, lane: AgentConnection) -> None:
        """The agent will send no more."""
        self._out.put(ipc.FINISHED, lane.number)

    def closed(self, lane: AgentConnection) -> None:
        """The stream is over."""
        del self._streams[lane.number]
        self._rest()
        self._out.put(ipc.CLOSED, lane.number)

    def handshake_failed(self) -> None:
        """Report a failed TLS handshake, which the controller audits."""
        self._out.put(ipc.HANDSHAKE_FAILED)

    def _rest(self) -> None:
        if self._looks is not None:
            self._looks.rest_s = min(REST_S, REST_S_PER_STREAM * len(self._streams))

    def handle_frame(self, kind: int, number: int, value: int, data: bytes) -> None:
        """One frame of the controller. Raises ValueError for what it can not have said, and
        HostError where calls that are no agent's can not be handed on any more.
        """
        match kind:
            case ipc.SEND:
                numbers, key, message = ipc.decode_send(data)
                self._send(numbers, key, message, value)
            case ipc.ACKNOWLEDGE:
                self._acknowledge(data)
            case ipc.END:
                if (lane := self._streams.get(number)) is not None:
                    lane.end(value, data.decode())
            case ipc.PING:
                if self.socket_proxy is not None and not self.socket_proxy.is_open:
                    raise no_folder(
                        "the ingest process's own socket is gone: something takes files away"
                    )
                self._out.put(ipc.ALIVE)
            case _:
                raise ValueError(f"a frame of kind {kind} from the controller")

    def _send(self, numbers: Sequence[int], key: bytes, message: bytes, until_ms: int) -> None:
        """To these streams, if there is room until the slowest has read it."""
        shared = self._shelf.put(message)
        if (shared is None) != self._is_full:
            self._is_full = shared is None
            held = f"{self._shelf.held_bytes} bytes wait for agents that read slowly"
            _log.warning("%s: %s", held, "large messages are left out" if self._is_full else "room")
        if shared is None:
            return
        for one in numbers:
            if (lane := self._streams.get(one)) is not None:
                lane.tell(key, shared, until_ms)

    def _acknowledge(self, data: bytes) -> None:
        term, until_ms, pairs = ipc.decode_acknowledge(data)
        for number, sequence in pairs:
            if (lane := self._streams.get(number)) is not None:
                acknowledge = control_pb2.Acknowledge(sequence=sequence)
                message = control_pb2.AttachResponse(acknowledge=acknowledge, term=term)
                lane.tell(b"", message.SerializeToString(), until_ms)

    def end_all(self) -> None:
        """The service is going down: agents come back by themselves."""
        for lane in list(self._streams.values()):
            lane.end(grpc.StatusCode.UNAVAILABLE.value[0], "the controller is going down")


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


async def serve(own: socket.socket, looks: CoalescingSelector) -> None:
    """Until the controller says so, or is gone. Raises ValueError for what it can not have said.

    `looks`: the loop's own, to rest with as many streams need.
    """
    reader, writer = await asyncio.open_unix_connection(sock=own)
    out, frames = ControllerLink(writer), ipc.Frames(COMMAND_BYTES)
    worker: IngestWorker | None = None
    async with contextlib.AsyncExitStack() as stack:
        while data := await reader.read(READ_BYTES):
            for kind, number, value, content in frames.feed(data):
                if kind == ipc.SERVE:
                    settings = json.loads(content)
                    worker = IngestWorker(out, reports=Limit(**settings["reports"]), looks=looks)
                    port, why = await _open(stack, worker, out, settings)
                    out.put(ipc.LISTENS, 0, port, why.encode())
                elif kind == ipc.DRAIN:
                    if worker is not None:
                        worker.end_all()
                    await stack.aclose()
                    out.flush()
                    await writer.drain()
                    return
                elif worker is not None:
                    worker.handle_frame(kind, number, value, content)


async def _open(
    stack: contextlib.AsyncExitStack, worker: IngestWorker, out: ControllerLink, settings: Any
) -> tuple[int, str]:
    """The port it listens on; 0 and why where it can not."""
    tls = TlsConfig(**settings["tls"])
    inner = Path(settings["inner"].removeprefix("unix:"))
    try:
        pipes = worker.socket_proxy = await stack.enter_async_context(relaying(inner, settings))
        files = secure.ServerContexts(tls, protocols=("h2",)) if tls.cert else None

        def context() -> ssl.SSLContext | None:
            return None if files is None else files.now()

        rules = ConnectionConfig(
            host=worker,
            socket_proxy=pipes,
            max_message_bytes=settings["max_report_bytes"],
            age_s=settings["connection_s"],
            tls=context,
        )
        return await stack.enter_async_context(listening(settings["listen"], rules)), ""
    except OSError:
        return 0, ""
    except PacekeeperError as error:
        return 0, str(error)


async def _run(own: socket.socket, looks: CoalescingSelector) -> None:
    """Ends the process from inside the loop: to cancel thousands of streams first takes for ever,
    and meanwhile the port is taken for whoever comes next.
    """
    code = 0
    try:
        await serve(own, looks)
    except ConnectionError:
        pass  # the controller is gone
    except Exception:
        _log.exception("the ingest process fails")
        code = 1
    logging.shutdown()
    os._exit(code)


def main() -> None:
    """`python -m pacekeeper.controller.ingest.worker FD`: the controller starts it, nobody else."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s ingest %(message)s", stream=sys.stderr
    )
    # A terminal and systemd send these to both processes: it is the controller that ends this one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    gc.set_threshold(GARBAGE_AFTER, 50, 1000)
    hold_little()
    looks = CoalescingSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(looks)) as runner:
        runner.run(_run(socket.socket(fileno=int(sys.argv[1])), looks))


if __name__ == "__main__":
    main()
