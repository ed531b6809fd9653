"""Agents' streams in the controller: turns frames of the ingest processes into events.

Reports of many agents are processed together and acknowledged once they are stored; a repeated
report is acknowledged and ignored. A node has one stream: a newer one ends the older one. Commands
to agents are sent from here.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import DecodeError

import pacekeeper
from pacekeeper.controller.api.auth.attach_policy import AttachPolicy, RejectedError
from pacekeeper.controller.api.auth.peer_identity import (
    PeerIdentity,
    decode_peer_identity,
    host_of,
)
from pacekeeper.controller.api.auth.rate_limit import LogRateLimiter
from pacekeeper.controller.api.auth.rbac import Principal
from pacekeeper.controller.ha.leadership import Leadership, Standalone
from pacekeeper.controller.ingest import ipc
from pacekeeper.controller.ingest.deduplication import Sequences
from pacekeeper.controller.ingest.ipc import Frame
from pacekeeper.controller.ingest.report_pacing import Pacing, pacing_for
from pacekeeper.controller.state.events import (
    Event,
    NodeAttached,
    NodeDetached,
    NodeReported,
)
from pacekeeper.core.config.controller import LeaseConfig
from pacekeeper.core.telemetry.attachment import (
    JOB_NAME_RULE,
    NODE_NAME_RULE,
    is_job_name,
    is_node_name,
)
from pacekeeper.core.telemetry.node_report import NodeReport
from pacekeeper.core.text import one_line
from pacekeeper.protos import control_pb2
from pacekeeper.protos.convert import reports

ACK_EVERY_REPORTS = 8
ACK_EVERY_S = 1.0
# In a large fleet agents are acknowledged less often: acknowledgements cost as much as reports.
ACKS_PER_S = 2000
ACK_SPARSEST = 8.0  # times less often, at most: an agent leaves a stream that is silent for 15 s
ACK_LOOK_S = 0.05
PACING_S = 2.0  # between two looks at the number of agents
FRESH_S = 0.5  # that a command may wait in the ingest process, if the lease's margin is long enough
MAX_TEXT = 64  # characters of an agent's version and incarnation
NO_LEADER = "this controller is not the leader any more"
OUR_VERSION = pacekeeper.__version__
_PARTS = control_pb2.ReportRequestParts
_log = logging.getLogger(__name__)


class _ForeignReportError(ValueError):
    """A report contains ranks of another node."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Stream:
    """One agent's open stream.

    Attributes:
        number: Its number in frames of the ingest processes.
        node: The agent's node.
        incarnation: Identifies one start of the agent.
        principal: The authenticated caller.
        newest: Sequence of the last report received; -1: none.
        handled: Sequence of the newest report that was processed.
        unacknowledged: Number of processed reports that are not acknowledged yet.
        is_over: Whether the stream was ended; its later reports are ignored.
    """

    number: int
    node: str
    incarnation: str
    principal: Principal
    newest: int = -1
    handled: int = 0
    unacknowledged: int = 0
    is_over: bool = False


@dataclass(slots=True, kw_only=True)
class _IngestResult:
    """The answers to one batch of frames, sent once all its events are stored.

    Attributes:
        welcomes: New streams of admitted agents.
        taken: Processed reports: stream, sequence, whether it is the stream's first report.
        again: Repeated reports: stream, sequence.
        ends: Streams to end: status, reason.
    """

    welcomes: list[_Stream] = field(default_factory=list)
    taken: list[tuple[_Stream, int, bool]] = field(default_factory=list)
    again: list[tuple[_Stream, int]] = field(default_factory=list)
    ends: list[tuple[_Stream, grpc.StatusCode, str]] = field(default_factory=list)


@dataclass(slots=True, eq=False, kw_only=True)
class AgentControl:
    """Handles frames of the ingest processes and sends commands to agents.

    Attributes:
        put: Processes events; returns when they are stored.
        on_rejected: Counts invalid calls and reports.
        on_failure: Reports an internal error.
        send_frame: Sends a frame to the ingest processes.
        attach_policy: Admits agents and reports.
        leadership: Whether this controller may command; checked before each message.
        lease_margin_s: Seconds between the end of a leader's term and the next term.
        sequences: The newest processed report of each agent.
    """

    put: Callable[[Sequence[Event]], Awaitable[None]]
    on_rejected: Callable[[], None]
    on_failure: Callable[[str, Exception], None]
    send_frame: Callable[[bytes], None]
    attach_policy: AttachPolicy = field(default_factory=AttachPolicy)
    leadership: Leadership = field(default_factory=Standalone)
    lease_margin_s: float = LeaseConfig().margin_s
    sequences: Sequences = field(default_factory=Sequences)
    _log_limiter: LogRateLimiter = field(default_factory=LogRateLimiter)
    _streams: dict[int, _Stream] = field(default_factory=dict)
    _of_node: dict[str, _Stream] = field(default_factory=dict)
    _to_acknowledge: deque[tuple[float, _Stream]] = field(default_factory=deque)
    _pacing: Pacing = field(default_factory=lambda: pacing_for(0))

    async def handle_frames(self, frames: Sequence[Frame]) -> None:
        """Handle frames of the ingest process in order; return once all is stored and answered.

        `put` drops an event that an internal error prevents, and counts it; its report is
        acknowledged, since it would fail again and hold up those behind it.
        """
        events, outcome = list[Event](), _IngestResult()
        for kind, number, value, data in frames:
            if kind == ipc.OPENED:
                await self._open(number, data, events, outcome)
                continue
            stream = self._streams.get(number)
            if stream is None:
                continue  # rejected, or of an ingest process that has ended
            if kind == ipc.CLOSED:
                del self._streams[number]
                self._leave(stream, events)
            elif stream.is_over:
                continue  # its later reports are not acknowledged, so the agent sends them again
            elif kind == ipc.REPORT:
                self._report(stream, value, data, events, outcome)
            elif kind == ipc.FINISHED:
                outcome.ends.append((stream, grpc.StatusCode.OK, ""))
            elif kind == ipc.MALFORMED:
                self._reject(stream, ValueError(data.decode()), outcome)
        try:
            if events:
                await self.put(events)
        except Exception as error:
            # Nothing is stored: these streams end, their agents send their reports again.
            self.on_failure("processing reports failed", error)
            affected = {stream for stream, *_ in (*outcome.taken, *outcome.ends)}
            for stream in affected.union(outcome.welcomes):
                why = "the controller failed to read a report"
                self._end(stream, grpc.StatusCode.INTERNAL, why)
            return
        self._answer(outcome)

    def drop_streams(self, is_of: Callable[[int], bool] = lambda number: True) -> list[Event]:
        """Forget the streams of an ingest process that is gone.

        Args:
            is_of: Selects its streams by number.

        Returns:
            The events of their nodes.
        """
        events: list[Event] = []
        for number in [number for number in self._streams if is_of(number)]:
            self._leave(self._streams.pop(number), events)
        return events

    def send(
        self, nodes: Sequence[str], kind: str, job: str, message: control_pb2.AttachResponse
    ) -> None:
        """Send a message to the connected ones of these nodes; the machine repeats commands."""
        found = (self._of_node.get(node) for node in nodes)
        receivers = [stream for stream in found if stream is not None]
        self._send(receivers, f"{job}/{kind}", message, until_ms=self._until_ms())

    async def acknowledge(self) -> None:
        """Acknowledge stored reports, in one frame for all streams, until cancelled."""
        while True:
            await asyncio.sleep(ACK_LOOK_S)
            due_s = time.monotonic() - ACK_EVERY_S * self._sparse
            due: list[_Stream] = []
            while self._to_acknowledge and self._to_acknowledge[0][0] <= due_s:
                due.append(self._to_acknowledge.popleft()[1])
            self._acknowledge(due)

    async def keep_pace(self) -> None:
        """Send all agents their report interval when the fleet's size changes. Until cancelled."""
        while True:
            await asyncio.sleep(PACING_S)
            pacing = pacing_for(len(self._of_node))
            if pacing.differs_from(self._pacing):
                self._pacing = pacing
                message = control_pb2.AttachResponse(set_pacing=_pacing_message(pacing))
                self._send(list(self._of_node.values()), "pacing", message, until_ms=0)

    @property
    def _sparse(self) -> float:
        """The factor by which acknowledgements are less frequent than in a small fleet."""
        # A third of `answer_within_s`, after which agents try another controller.
        promised_s = self.leadership.answer_within_s
        sparsest = min(ACK_SPARSEST, promised_s / 3.0) if promised_s else ACK_SPARSEST
        return max(1.0, min(sparsest, len(self._streams) / ACKS_PER_S))

    def _answer(self, outcome: _IngestResult) -> None:
        for stream in outcome.welcomes:
            welcome = control_pb2.Welcome(
                protocol_version=reports.PROTOCOL_VERSION,
                product_version=OUR_VERSION,
                answer_within_s=self.leadership.answer_within_s,
                pacing=_pacing_message(self._pacing),
            )
            response = control_pb2.AttachResponse(welcome=welcome)
            self._send([stream], "welcome", response, until_ms=0)
        now_s, many = time.monotonic(), ACK_EVERY_REPORTS * self._sparse
        for stream, number, is_greeting in outcome.taken:
            self.sequences.record(stream.node, stream.incarnation, number, is_greeting=is_greeting)
        at_once: list[_Stream] = []
        taken = [(stream, number) for stream, number, _ in outcome.taken]
        for stream, number in (*taken, *outcome.again):
            stream.handled = max(stream.handled, number)
            stream.unacknowledged += 1
            if stream.unacknowledged == 1:
                self._to_acknowledge.append((now_s, stream))
            elif stream.unacknowledged >= many:
                at_once.append(stream)
        self._acknowledge([*at_once, *(stream for stream, *_ in outcome.ends)])
        for stream, code, why in outcome.ends:
            self._end(stream, code, why)

    async def _open(
        self, number: int, data: bytes, events: list[Event], outcome: _IngestResult
    ) -> None:
        """Admit the caller of a new stream, so that its node attaches, or end the stream."""
        shown, first = ipc.split_header(data)
        identity = decode_peer_identity(shown)
        try:
            principal = await self.attach_policy.authenticate(identity)
            hello = self._greeted(identity, principal, first)
        except RejectedError as refusal:
            self.send_frame(
                ipc.frame(ipc.END, number, refusal.code.value[0], refusal.reason.encode())
            )
            return
        stream = _Stream(
            number=number, node=hello.node, incarnation=hello.agent_incarnation, principal=principal
        )
        self._streams[number] = stream
        self._replace(stream)
        events.append(
            NodeAttached(
                node=hello.node,
                product_version=hello.product_version,
                agent_incarnation=hello.agent_incarnation,
                rack=hello.rack,
            )
        )
        outcome.welcomes.append(stream)

    def _greeted(
        self, identity: PeerIdentity, principal: Principal, first: bytes
    ) -> control_pb2.Hello:
        """The Hello of an agent that may attach. Raises RejectedError."""
        invalid = grpc.StatusCode.INVALID_ARGUMENT
        try:
            request = control_pb2.AttachRequest.FromString(first)
        except DecodeError:
            request = control_pb2.AttachRequest()
        if request.WhichOneof("message") != "hello":
            # An agent that was stopped before it sent its Hello may reconnect.
            code = invalid if first else grpc.StatusCode.UNAVAILABLE
            raise self._refused(identity, code, "the first message must be Hello")
        theirs = request.hello
        theirs.product_version = one_line(theirs.product_version, MAX_TEXT)
        theirs.agent_incarnation = one_line(theirs.agent_incarnation, MAX_TEXT)
        # First the version: with another one nothing else can be trusted.
        if theirs.protocol_version != reports.PROTOCOL_VERSION:
            raise self._refused(
                identity,
                grpc.StatusCode.FAILED_PRECONDITION,
                f"agent {theirs.product_version or '?'} speaks protocol {theirs.protocol_version}, "
                f"controller {OUR_VERSION} speaks {reports.PROTOCOL_VERSION}; install the "
                "same pacekeeper on both",
            )
        if not is_node_name(theirs.node):
            raise self._refused(identity, invalid, f"node name: expected {NODE_NAME_RULE}")
        if theirs.rack and not is_node_name(theirs.rack):
            raise self._refused(identity, invalid, f"rack name: expected {NODE_NAME_RULE}")
        decision = self.attach_policy.check_attach(principal, theirs.node, identity.peer)
        if not decision.is_allowed:
            raise self._refused(identity, grpc.StatusCode.PERMISSION_DENIED, decision.reason)
        term = self.leadership.term()
        if term is None:
            raise self._refused(identity, grpc.StatusCode.UNAVAILABLE, NO_LEADER)
        # Last: a reported term can end a leader's term, so the caller must be authorised.
        if theirs.highest_term > term:
            why = f"{theirs.node}: {self.leadership.describe_newer_term(theirs.highest_term)}"
            raise self._refused(identity, grpc.StatusCode.UNAVAILABLE, why)
        return theirs

    def _refused(self, identity: PeerIdentity, code: grpc.StatusCode, why: str) -> RejectedError:
        self.on_rejected()
        self._log_caller(host_of(identity.peer), "refused an agent from %s: %s", identity.peer, why)
        return RejectedError(code, why)

    def _log_caller(self, caller: str, words: str, *about: object) -> None:
        """Log a line that callers can cause, within a rate limit."""
        ending = self._log_limiter.suffix(caller, time.monotonic())
        if ending is not None:
            _log.warning(words + "%s", *about, ending)

    def _replace(self, stream: _Stream) -> None:
        older = self._of_node.get(stream.node)
        self._of_node[stream.node] = stream
        if older is None:
            return
        if older.incarnation != stream.incarnation:
            words = "node=%s attached anew: agent %s replaces %s"
            self._log_caller(stream.node, words, stream.node, stream.incarnation, older.incarnation)
        why = f"another agent attached as node {stream.node}; give each its own --node"
        self._end(older, grpc.StatusCode.ABORTED, why)

    def _leave(self, stream: _Stream, events: list[Event]) -> None:
        stream.is_over = True
        if self._of_node.get(stream.node) is stream:
            del self._of_node[stream.node]
            events.append(NodeDetached(node=stream.node, agent_incarnation=stream.incarnation))

    def _report(
        self, stream: _Stream, number: int, data: bytes, events: list[Event], outcome: _IngestResult
    ) -> None:
        """Process one report; a repeated one is ignored, an invalid one ends the stream."""
        is_greeting = stream.newest < 0
        is_again = number > 0 and (
            number <= stream.newest
            or not self.sequences.is_news(stream.node, stream.incarnation, number)
        )
        stream.newest = max(stream.newest, number)
        if is_again and not is_greeting:
            outcome.again.append((stream, number))
            return
        try:
            report = report_in(data)
            decision = self.attach_policy.check_report(stream.principal, stream.node, report)
            if not decision.is_allowed:
                raise _ForeignReportError(decision.reason)
        except ValueError as error:
            # Acknowledged nevertheless: sent again, it would block the valid ones forever.
            outcome.taken.append((stream, number, is_greeting))
            self._reject(stream, error, outcome)
        except Exception as error:
            self.on_failure(f"node={stream.node} reader failed", error)
            stream.is_over = True
            why = "the controller failed to read a report"
            outcome.ends.append((stream, grpc.StatusCode.INTERNAL, why))
        else:
            events.append(
                NodeReported(node=stream.node, agent_incarnation=stream.incarnation, report=report)
            )
            outcome.taken.append((stream, number, is_greeting))

    def _reject(self, stream: _Stream, error: ValueError, outcome: _IngestResult) -> None:
        self.on_rejected()
        self._log_caller(stream.node, "node=%s sent an impossible report: %s", stream.node, error)
        stream.is_over = True
        is_foreign = isinstance(error, _ForeignReportError)
        wrong = grpc.StatusCode.INVALID_ARGUMENT
        code = grpc.StatusCode.PERMISSION_DENIED if is_foreign else wrong
        outcome.ends.append((stream, code, str(error)))

    def _acknowledge(self, streams: Sequence[_Stream]) -> None:
        pairs = []
        for stream in streams:
            if stream.unacknowledged and self._streams.get(stream.number) is stream:
                pairs.append((stream.number, stream.handled))
            stream.unacknowledged = 0
        if not pairs:
            return
        term = self.leadership.term()
        if term is not None:
            # Without a time limit: a stored report stays stored in later terms.
            self.send_frame(ipc.encode_acknowledge(term, 0, pairs))

    def _send(
        self,
        streams: Sequence[_Stream],
        key: str,
        message: control_pb2.AttachResponse,
        *,
        until_ms: int,
    ) -> None:
        """Send one message to streams in the present term; `until_ms`: as in `ipc.encode_send`.

        It is encoded once: an offer may have 700 kB and 1,000 receivers.
        """
        term = self.leadership.term()
        if term is None:
            for stream in streams:
                self._end(stream, grpc.StatusCode.UNAVAILABLE, NO_LEADER)
            return
        message.term = term
        numbers = [stream.number for stream in streams]
        data = message.SerializeToString()
        self.send_frame(ipc.encode_send(numbers, until_ms, key.encode(), data))

    def _until_ms(self) -> int:
        """Until when a command may be sent, in ms of CLOCK_MONOTONIC; 0: no limit.

        It is made while this controller leads, so it leaves at most half the lease's margin after
        that; the other half is for clocks.
        """
        if not self.leadership.answer_within_s:
            return 0
        return int((time.monotonic() + min(FRESH_S, self.lease_margin_s / 2.0)) * 1e3)

    def _end(self, stream: _Stream, code: grpc.StatusCode, why: str) -> None:
        stream.is_over = True
        self.send_frame(ipc.frame(ipc.END, stream.number, code.value[0], why.encode()))


def _pacing_message(pacing: Pacing) -> control_pb2.ReportPacing:
    return control_pb2.ReportPacing(
        report_interval_s=pacing.report_interval_s, reconnect_spread_s=pacing.reconnect_spread_s
    )


def report_in(data: bytes) -> NodeReport:
    """The report in the bytes of an AttachRequest; its samples stay unread.

    Raises ValueError for anything but a whole report.
    """
    report = reports.report_from_parts(_PARTS.FromString(data).report)
    for job in report.jobs:
        if not is_job_name(job.job):
            raise ValueError(f"job name {job.job!r}: expected {JOB_NAME_RULE}")
        strangers = sorted({attached.job for attached in job.attached} - {job.job})
        if strangers:
            raise ValueError(f"job {job.job}: attachments of other jobs {strangers}")
    return report
