"""The agents' side of the controller: streams in, commands out. Decides nothing.

Reports go into one bounded inbox with a single consumer; commands go to the outbox of each named
node, where the newest of a kind replaces what it repeats. Two streams of one node never live side
by side: the newer one wins.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import grpc
import grpc.aio

from pacekeeper.controller.events import Event, NodeAttached, NodeDetached, NodeReported
from pacekeeper.controller.office import Alone, Office
from pacekeeper.controller.rates import Limit, full, owe
from pacekeeper.controller.sequences import Sequences
from pacekeeper.core.plain_text import one_line
from pacekeeper.core.reports import NodeReport
from pacekeeper.core.topology import JOB_NAME_RULE, NODE_NAME_RULE, is_job_name, is_node_name
from pacekeeper.protos import control_pb2, control_pb2_grpc, wire

OUTBOX_COMMANDS = 256  # per node; commands are said again, so the oldest may go
ACK_EVERY_REPORTS = 8
ACK_EVERY_S = 1.0
# Of a large fleet each is acknowledged less often, or acks would cost as much as all reports.
ACKS_PER_S = 2000
ACK_SPARSEST = 5.0  # times
HELLO_WITHIN_S = 10.0
MOST_OF_A_WORD = 64  # characters that an agent says of itself
NO_LEADER = "this controller leads no more"
NO_LIMIT = Limit(per_s=1e9, at_once=1 << 30)
OUR_VERSION = version("pacekeeper")
_log = logging.getLogger(__name__)

Context = Any  # grpc.aio.ServicerContext: its type parameters say nothing here


class _ForeignReportError(ValueError):
    """A report speaks of ranks of another node."""


def _anybody(node: str, peer: str) -> str:
    return ""


def _anything(node: str, report: NodeReport) -> str:
    return ""


@dataclass(slots=True, eq=False, kw_only=True)
class Outbox:
    """What one node is to be told, oldest first. A newer message with the same key takes over."""

    capacity: int = OUTBOX_COMMANDS
    _waiting: dict[tuple[str, str], control_pb2.AttachResponse] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _is_closed: bool = False

    def put(self, key: tuple[str, str], message: control_pb2.AttachResponse) -> None:
        """Queue `message`; beyond the capacity the oldest one goes."""
        self._waiting.pop(key, None)
        self._waiting[key] = message
        while len(self._waiting) > self.capacity:
            del self._waiting[next(iter(self._waiting))]
        self._news.set()

    def close(self) -> None:
        """Nothing more will come after what waits."""
        self._is_closed = True
        self._news.set()

    async def get(self) -> control_pb2.AttachResponse | None:
        """The oldest message; None once closed and empty."""
        while not self._waiting and not self._is_closed:
            self._news.clear()
            await self._news.wait()
        if not self._waiting:
            return None
        return self._waiting.pop(next(iter(self._waiting)))


@dataclass(slots=True, eq=False, kw_only=True)
class _Stream:
    """One agent's open stream. `end`: why we end it, a status code and words."""

    node: str
    life: str
    outbox: Outbox = field(default_factory=Outbox)
    handled: int = 0  # sequence of the newest report that went through the machine
    unacknowledged: int = 0
    ack_timer: asyncio.TimerHandle | None = None
    end: tuple[grpc.StatusCode, str] | None = None

    def taken_in(self, sequence: int, sparse: float) -> None:
        """One more report is stored: say so soon, and at once where many wait.

        `sparse`: so many times less often than to the agent of a small fleet.
        """
        self.handled = sequence
        self.unacknowledged += 1
        if self.unacknowledged >= ACK_EVERY_REPORTS * sparse:
            self.acknowledge()
        elif self.ack_timer is None:
            loop = asyncio.get_running_loop()
            self.ack_timer = loop.call_later(ACK_EVERY_S * sparse, self.acknowledge)

    def close(self, code: grpc.StatusCode | None = None, why: str = "") -> None:
        """End the stream: in peace, or with a code and the reason."""
        if code is not None and self.end is None:
            self.end = (code, why)
        if self.ack_timer is not None:
            self.ack_timer.cancel()
            self.ack_timer = None
        self.outbox.close()

    def acknowledge(self) -> None:
        """Everything handled so far needs not be sent again."""
        if self.ack_timer is not None:
            self.ack_timer.cancel()
            self.ack_timer = None
        self.unacknowledged = 0
        acknowledge = control_pb2.Acknowledge(sequence=self.handled)
        message = control_pb2.AttachResponse(acknowledge=acknowledge)
        self.outbox.put(("", "acknowledge"), message)


@dataclass(kw_only=True)
class AgentControl(control_pb2_grpc.AgentControlServiceServicer):
    """The servicer. `put` takes an event and returns when the machine has taken it in.

    `on_rejected` counts what an agent did wrong, `on_failure` what we did. `may_attach(node, peer)`
    and `foreign(node, report)` say why the caller may not speak for that node; empty: it may.
    `reports`: how many of them one stream may bring. `office`: whether anything may be said now.
    """

    put: Callable[[Event], Awaitable[None]]
    on_rejected: Callable[[], None]
    on_failure: Callable[[str, Exception], None]
    may_attach: Callable[[str, str], str] = _anybody
    foreign: Callable[[str, NodeReport], str] = _anything
    reports: Limit = NO_LIMIT
    office: Office = field(default_factory=Alone)
    streams: dict[str, _Stream] = field(default_factory=dict)
    sequences: Sequences = field(default_factory=Sequences)

    async def Attach(
        self, request_iterator: AsyncIterator[control_pb2.AttachRequest], context: Context
    ) -> AsyncIterator[control_pb2.AttachResponse]:
        """One agent, from its Hello to the end of its stream."""
        hello = await self._greet(request_iterator, context)
        stream = _Stream(node=hello.node, life=hello.agent_life)
        self._replace(stream)
        reader: asyncio.Task[None] | None = None
        try:
            await self.put(
                NodeAttached(
                    node=hello.node,
                    product_version=hello.product_version,
                    agent_life=hello.agent_life,
                    rack=hello.rack,
                )
            )
            welcome = control_pb2.Welcome(
                protocol_version=wire.PROTOCOL_VERSION,
                product_version=OUR_VERSION,
                answer_within_s=self.office.answer_within_s,
            )
            message: control_pb2.AttachResponse | None
            message = control_pb2.AttachResponse(welcome=welcome)
            reader = asyncio.create_task(self._read(stream, request_iterator))
            while message is not None:
                term = self.office.term()
                if term is None:  # at the last moment: what waited here may be of a past term
                    stream.close(grpc.StatusCode.UNAVAILABLE, NO_LEADER)
                    break
                message.term = term
                yield message
                message = await stream.outbox.get()
        finally:
            stream.close()
            if reader is not None:
                reader.cancel()
            if self.streams.get(stream.node) is stream:
                del self.streams[stream.node]
                await self.put(NodeDetached(node=stream.node, agent_life=stream.life))
        if stream.end is not None:
            await context.abort(*stream.end)

    def send(self, node: str, kind: str, job: str, message: control_pb2.AttachResponse) -> None:
        """Queue a command for a node; nothing where it is away (it is said again)."""
        stream = self.streams.get(node)
        if stream is not None:
            stream.outbox.put((job, kind), message)

    def end_all(self) -> None:
        """The service is going down: end all streams, agents come back by themselves."""
        for stream in self.streams.values():
            stream.close(grpc.StatusCode.UNAVAILABLE, "the controller is going down")

    @property
    def _sparse(self) -> float:
        # Well within what agents were promised: else they would look for another controller.
        promised_s = self.office.answer_within_s
        sparsest = min(ACK_SPARSEST, promised_s / 3.0) if promised_s else ACK_SPARSEST
        return max(1.0, min(sparsest, len(self.streams) / ACKS_PER_S))

    def _replace(self, stream: _Stream) -> None:
        older = self.streams.get(stream.node)
        self.streams[stream.node] = stream
        if older is None:
            return
        if older.life != stream.life:
            _log.warning(
                "node=%s attached anew: agent %s replaces %s", stream.node, stream.life, older.life
            )
        older.close(
            grpc.StatusCode.ABORTED,
            f"another agent attached as node {stream.node}; give each its own --node",
        )

    async def _greet(
        self, requests: AsyncIterator[control_pb2.AttachRequest], context: Context
    ) -> control_pb2.Hello:
        first = None
        with contextlib.suppress(StopAsyncIteration, TimeoutError):
            first = await asyncio.wait_for(_next(requests), HELLO_WITHIN_S)
        if first is None or first.WhichOneof("message") != "hello":
            await self._refuse(
                context, grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Hello"
            )
        assert first is not None, "refusing raises"
        theirs = first.hello
        theirs.product_version = one_line(theirs.product_version, MOST_OF_A_WORD)
        theirs.agent_life = one_line(theirs.agent_life, MOST_OF_A_WORD)
        # First the version: with another one nothing else can be trusted.
        if theirs.protocol_version != wire.PROTOCOL_VERSION:
            await self._refuse(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                f"agent {theirs.product_version or '?'} speaks protocol {theirs.protocol_version}, "
                f"controller {OUR_VERSION} speaks {wire.PROTOCOL_VERSION}; install the "
                "same pacekeeper on both",
            )
        if not is_node_name(theirs.node):
            await self._refuse(
                context, grpc.StatusCode.INVALID_ARGUMENT, f"node name: expected {NODE_NAME_RULE}"
            )
        if theirs.rack and not is_node_name(theirs.rack):
            await self._refuse(
                context, grpc.StatusCode.INVALID_ARGUMENT, f"rack name: expected {NODE_NAME_RULE}"
            )
        if why := self.may_attach(theirs.node, context.peer()):
            await self._refuse(context, grpc.StatusCode.PERMISSION_DENIED, why)
        # Last: what is said of terms ends a leader's term, so who says it must be known.
        if theirs.seen_term > (self.office.term() or 0):
            why = self.office.outdated(theirs.seen_term)
            await self._refuse(context, grpc.StatusCode.UNAVAILABLE, f"{theirs.node}: {why}")
        return theirs

    async def _refuse(self, context: Context, code: grpc.StatusCode, why: str) -> None:
        self.on_rejected()
        _log.warning("refused an agent from %s: %s", context.peer(), why)
        await context.abort(code, why)

    async def _read(
        self, stream: _Stream, requests: AsyncIterator[control_pb2.AttachRequest]
    ) -> None:
        """Reports into the inbox until the agent goes; then end the stream's other half."""
        bucket, is_greeting = full(self.reports, time.monotonic()), True
        node, life, sequences = stream.node, stream.life, self.sequences
        try:
            async for request in requests:
                number = request.report.sequence
                is_again = number > 0 and not sequences.is_news(node, life, number)
                if is_again and not is_greeting:
                    stream.taken_in(number, self._sparse)
                    continue
                report = report_in(request)
                if why := self.foreign(node, report):
                    raise _ForeignReportError(why)
                bucket, wait_s = owe(bucket, self.reports, time.monotonic())
                if wait_s > 0.0:
                    await asyncio.sleep(wait_s)  # what is not read stays with its sender
                await self.put(NodeReported(node=node, agent_life=life, report=report))
                sequences.take(node, life, number, is_greeting=is_greeting)
                stream.taken_in(number, self._sparse)
                is_greeting = False
        except ValueError as error:
            self.on_rejected()
            _log.warning("node=%s sent an impossible report: %s", stream.node, error)
            # Acknowledged all the same: sent again, it would block the good ones for ever.
            stream.handled = request.report.sequence
            sequences.take(node, life, stream.handled, is_greeting=is_greeting)
            stream.acknowledge()
            is_foreign = isinstance(error, _ForeignReportError)
            wrong = grpc.StatusCode.INVALID_ARGUMENT
            stream.close(grpc.StatusCode.PERMISSION_DENIED if is_foreign else wrong, str(error))
        except grpc.aio.AioRpcError as error:
            _log.info("node=%s stream broke: %s", stream.node, error.code().name)
        except Exception as error:
            # Our bug: this stream ends, the agent comes back and sends its reports again.
            self.on_failure(f"node={stream.node} reader failed", error)
            stream.close(grpc.StatusCode.INTERNAL, "the controller failed to read a report")
        finally:
            stream.close()


async def _next(requests: AsyncIterator[control_pb2.AttachRequest]) -> control_pb2.AttachRequest:
    return await anext(requests)


def report_in(request: control_pb2.AttachRequest) -> NodeReport:
    """Raises ValueError for anything but a whole report."""
    if request.WhichOneof("message") != "report":
        raise ValueError("expected a report after Hello")
    report = wire.report_from_message(request.report)
    for job in report.jobs:
        if not is_job_name(job.job):
            raise ValueError(f"job name {job.job!r}: expected {JOB_NAME_RULE}")
        strangers = sorted({attached.job for attached in job.attached} - {job.job})
        if strangers:
            raise ValueError(f"job {job.job}: attachments of other jobs {strangers}")
    return report
