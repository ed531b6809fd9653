"""The agents' side of the controller: streams in, commands out. Decides nothing.

Reports go into one bounded inbox with a single consumer; commands go to the outbox of each named
node. Two streams of one node never live side by side: the newer one wins.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from importlib.metadata import version

import grpc
import grpc.aio

from pacekeeper.controller.events import Event, NodeAttached, NodeDetached, NodeReported
from pacekeeper.protos import control_pb2, control_pb2_grpc, wire

OUTBOX_COMMANDS = 256  # per node; offers are said again, so the oldest may go
ACK_EVERY_REPORTS = 8
ACK_EVERY_S = 1.0
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Stream:
    """One agent's open stream."""

    node: str
    life: str
    outbox: asyncio.Queue[control_pb2.AttachResponse | None]
    handled: int = 0  # sequence of the newest report that went through the machine
    acknowledged: int = 0
    reports_since: int = 0
    acknowledged_s: float = 0.0


@dataclass(kw_only=True)
class AgentControl(control_pb2_grpc.AgentControlServiceServicer):
    """The servicer. `put` takes an event and returns when the machine has taken it in."""

    put: Callable[[Event], Awaitable[None]]
    on_rejected: Callable[[], None]
    streams: dict[str, _Stream] = field(default_factory=dict)

    async def Attach(
        self,
        request_iterator: AsyncIterator[control_pb2.AttachRequest],
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> AsyncIterator[control_pb2.AttachResponse]:
        """One agent, from its Hello to the end of its stream."""
        hello = await self._greet(request_iterator, context)
        stream = _Stream(
            node=hello.node,
            life=hello.agent_life,
            outbox=asyncio.Queue(OUTBOX_COMMANDS),
        )
        older = self.streams.get(hello.node)
        if older is not None:
            _end(older)
        self.streams[hello.node] = stream
        await self.put(
            NodeAttached(
                node=hello.node,
                product_version=hello.product_version,
                agent_life=hello.agent_life,
            )
        )
        yield control_pb2.AttachResponse(
            welcome=control_pb2.Welcome(
                protocol_version=wire.PROTOCOL_VERSION, product_version=version("pacekeeper")
            )
        )
        failure: list[str] = []
        reader = asyncio.create_task(self._read(stream, request_iterator, failure))
        try:
            while (message := await stream.outbox.get()) is not None:
                yield message
        finally:
            reader.cancel()
            if self.streams.get(stream.node) is stream:
                del self.streams[stream.node]
                await self.put(NodeDetached(node=stream.node, agent_life=stream.life))
        if failure:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, failure[0])

    def send(self, node: str, message: control_pb2.AttachResponse) -> None:
        """Queue a command for a node; nothing where it is away (it is said again)."""
        stream = self.streams.get(node)
        if stream is not None:
            _enqueue(stream, message)

    def end_all(self) -> None:
        """The service is going down: end all streams, agents come back by themselves."""
        for stream in self.streams.values():
            _end(stream)

    async def _greet(
        self,
        requests: AsyncIterator[control_pb2.AttachRequest],
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> control_pb2.Hello:
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "hello" or not first.hello.node:
            self.on_rejected()
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Hello with a node name"
            )
        assert first is not None, "abort raises"
        theirs = first.hello
        if theirs.protocol_version != wire.PROTOCOL_VERSION:
            self.on_rejected()
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"agent {theirs.product_version or '?'} speaks protocol {theirs.protocol_version}, "
                f"controller {version('pacekeeper')} speaks {wire.PROTOCOL_VERSION}; install the "
                "same pacekeeper on both",
            )
        return theirs

    async def _read(
        self,
        stream: _Stream,
        requests: AsyncIterator[control_pb2.AttachRequest],
        failure: list[str],
    ) -> None:
        """Reports into the inbox until the agent goes; then end the stream's other half."""
        loop = asyncio.get_running_loop()
        try:
            async for request in requests:
                report = wire.report_from_message(request.report)
                await self.put(
                    NodeReported(node=stream.node, agent_life=stream.life, report=report)
                )
                stream.handled = report.sequence
                stream.reports_since += 1
                is_due = loop.time() - stream.acknowledged_s > ACK_EVERY_S
                if is_due or stream.reports_since >= ACK_EVERY_REPORTS:
                    stream.reports_since, stream.acknowledged_s = 0, loop.time()
                    _enqueue(
                        stream,
                        control_pb2.AttachResponse(
                            acknowledge=control_pb2.Acknowledge(sequence=stream.handled)
                        ),
                    )
        except ValueError as error:
            self.on_rejected()
            _log.warning("node=%s sent an impossible report: %s", stream.node, error)
            failure.append(str(error))
        except grpc.aio.AioRpcError as error:
            _log.info("node=%s stream broke: %s", stream.node, error.code().name)
        finally:
            _end(stream)


def _enqueue(stream: _Stream, message: control_pb2.AttachResponse) -> None:
    while stream.outbox.full():
        stream.outbox.get_nowait()
    stream.outbox.put_nowait(message)


def _end(stream: _Stream) -> None:
    while stream.outbox.full():
        stream.outbox.get_nowait()
    stream.outbox.put_nowait(None)
