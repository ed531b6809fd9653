"""The stream to the controller: sends reports, receives acknowledgements and commands.

A lost connection is reopened after a back-off with full jitter, whose spread the controller sets by
the size of its fleet; reports stay in the spool. Only another protocol version, or a rejected node
name, ends the agent. With several addresses the next one is tried if a controller is unreachable,
silent or not the leader. Messages of an earlier term than the highest accepted one are rejected,
acknowledgements included. Certificates and tokens are read at each connection, so they may be
replaced while the agent runs.
"""

import asyncio
import contextlib
import hashlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio

import pacekeeper
from pacekeeper.agent.rings.fencing_epoch import FencingEpoch
from pacekeeper.agent.uplink.pacing import MAX_SPREAD_S, reconnect_bound_s
from pacekeeper.agent.uplink.spool import Spool
from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.errors import ConfigError, HostError, VersionError
from pacekeeper.protos import control_pb2, control_pb2_grpc, telemetry_pb2
from pacekeeper.protos import tls as secure
from pacekeeper.protos.convert import reports

FIRST_BACKOFF_S = 0.2
STABLE_S = 5.0  # a connection that lasted this long resets the back-off
# With several addresses: time to wait for the Welcome, as a frozen controller accepts calls and
# never answers. A busy one, with a fleet that reconnects at once, needs longer: after SILENT_TRIES
# the time doubles, MAX_DOUBLINGS times at most, so that a frozen one does not delay the change to
# the leader.
WELCOME_TIMEOUT_S, SILENT_TRIES, MAX_DOUBLINGS = 1.0, 3, 3
MAX_FETCHES = 16  # offers that wait for their layouts
FETCH_WITHIN_S = 60.0  # for a layout that is too large for the stream
MAX_SEARCH_BACKOFF_S = 1.0  # back-off between several addresses, one of which will lead soon
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Uplink:
    """Keeps one stream open. Call `wake()` after putting a report into the spool.

    `resync_report(sequence)` builds the first report of each connection, with the attachments and
    layouts that the controller needs to interpret the waiting ones. Its number is that of the last
    settled report. `on_interval` receives the report interval that the controller sets, in seconds.
    `incarnation` identifies this run of the agent.
    """

    addresses: tuple[str, ...]
    node: str
    incarnation: str
    spool: Spool[telemetry_pb2.NodeReport]
    ack_timeout_s: float
    reconnect_max_s: float
    on_command: Callable[[control_pb2.AttachResponse], None]
    resync_report: Callable[[int], telemetry_pb2.NodeReport]
    on_interval: Callable[[float], None] = lambda interval_s: None
    rack: str = ""
    tls: TlsConfig = field(default_factory=TlsConfig)
    token_file: str = ""
    fencing: FencingEpoch = field(default_factory=FencingEpoch)
    is_connected: bool = False
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _welcomed: asyncio.Event = field(default_factory=asyncio.Event)
    _finishing: asyncio.Event = field(default_factory=asyncio.Event)
    _last_answer_s: float = 0.0
    _address_index: int = 0  # index into `addresses`
    _promised_answer_s: float = 0.0  # from the Welcome; 0: not set
    _num_silent: int = 0  # consecutive connections without any message
    _is_asked_back: bool = False  # the controller ended the stream in peace, this one only
    _spread_s: float = 0.0  # over which the fleet is to reconnect, as the controller sent it

    @property
    def address(self) -> str:
        """The address of the present connection, or of the next try."""
        return self.addresses[self._address_index]

    def wake(self) -> None:
        """Signal that the spool has a report to send."""
        self._wake.set()

    def finish(self) -> None:
        """Send the waiting reports, then end: `run` returns once acknowledged or disconnected."""
        self._finishing.set()
        self._wake.set()

    async def run(self) -> None:
        """Connect and reconnect until cancelled or finished.

        Raises:
            VersionError: The controller has another protocol version.
            ConfigError: The controller rejects the node name.
        """
        loop = asyncio.get_running_loop()
        longest_s, reason = self.reconnect_max_s, ""
        if len(self.addresses) > 1:
            longest_s = min(longest_s, MAX_SEARCH_BACKOFF_S)
        backoff_s = min(FIRST_BACKOFF_S, longest_s)
        while True:
            began_s = loop.time()
            failure = await self._connect()
            if self._finishing.is_set():
                return
            is_welcome = self._welcomed.is_set()
            if is_welcome:
                reason = ""
                if loop.time() - began_s > STABLE_S:
                    backoff_s = FIRST_BACKOFF_S
            if failure != reason:
                _log.warning(
                    "controller=%s disconnected: %s; reports are kept", self.address, failure
                )
                reason = failure
            self._address_index = (self._address_index + 1) % len(self.addresses)
            with contextlib.suppress(TimeoutError):
                is_lost = is_welcome and not self._is_asked_back
                bound_s = reconnect_bound_s(
                    backoff_s, self._spread_s, longest_s, was_connected=is_lost
                )
                async with asyncio.timeout(random.uniform(0.0, bound_s)):
                    await self._finishing.wait()
                    return
            backoff_s = min(max(longest_s, self._spread_s / 3.0), backoff_s * 2.0)

    async def _connect(self) -> str:
        """One connection, from its opening to its end; returns why it ended."""
        self._welcomed.clear()
        self._is_asked_back = False
        self._promised_answer_s = 0.0
        self._last_answer_s = asyncio.get_running_loop().time()
        try:
            metadata = secure.bearer_metadata(secure.read_token(self.token_file))
            channel = secure.aio_channel(self.address, self.tls)
        except (ConfigError, HostError) as error:
            return str(error)
        stub = control_pb2_grpc.AgentControlServiceStub(channel)
        call = stub.Attach(metadata=metadata)
        fetched: asyncio.Queue[control_pb2.AttachResponse] = asyncio.Queue(MAX_FETCHES)
        # Tasks of this connection only: a surviving sender would consume reports of the next.
        tasks = (
            asyncio.create_task(self._send(call)),
            asyncio.create_task(self._cancel_when_silent(call)),
            asyncio.create_task(self._fetch_layouts(stub, metadata, fetched)),
        )
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                self._last_answer_s = asyncio.get_running_loop().time()
                if not self.fencing.accept(message.term):
                    return f"its term {message.term} is before term {self.fencing.highest}"
                if message.HasField("offer_plan") and not message.offer_plan.layout_json:
                    with contextlib.suppress(asyncio.QueueFull):  # it is offered again
                        fetched.put_nowait(message)
                else:
                    self._handle(message)
            self._is_asked_back = True
            return "the controller closed the stream"
        except asyncio.CancelledError:
            # Raised by the watchdog's call.cancel() as well as by a cancellation of this task.
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            failure = f"no answer for {self._answer_timeout_s:g} s"
            self._num_silent += not self._welcomed.is_set()
            return failure
        except grpc.aio.AioRpcError as error:
            return self._classify_error(error)
        finally:
            self.is_connected = False
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            await channel.close()
            for result in ended:
                if isinstance(result, Exception):
                    raise result  # a bug: do not hide it behind a reconnect

    def _classify_error(self, error: grpc.aio.AioRpcError) -> str:
        """Why the stream broke. Raises VersionError or ConfigError if a reconnect cannot help."""
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            raise VersionError(f"controller {self.address} rejects this agent: {error.details()}")
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            if not self._welcomed.is_set():
                raise ConfigError(
                    f"controller {self.address} rejects this agent: {error.details()}"
                )
            # The controller acknowledged the rejected report, so it is not sent again.
            self.spool.count_rejected()
        return f"{error.code().name}: {error.details()}"

    async def _send(self, call: "grpc.aio.StreamStreamCall[object, object]") -> None:
        """Send Hello; after the Welcome the resync report, then the spool from its first report."""
        try:
            await call.write(
                control_pb2.AttachRequest(
                    hello=control_pb2.Hello(
                        protocol_version=reports.PROTOCOL_VERSION,
                        product_version=pacekeeper.__version__,
                        node=self.node,
                        agent_incarnation=self.incarnation,
                        rack=self.rack,
                        highest_term=self.fencing.highest,
                    )
                )
            )
            await self._welcomed.wait()
            resync = self.resync_report(self.spool.settled_sequence)
            await call.write(control_pb2.AttachRequest(report=resync))
            self.spool.rewind()
            while True:
                self._wake.clear()
                while (report := self.spool.next_unsent()) is not None:
                    await call.write(control_pb2.AttachRequest(report=report))
                if self._finishing.is_set():
                    await call.done_writing()
                    return
                await self._wake.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the stream has ended; the reading side has the reason

    async def _fetch_layouts(
        self,
        stub: "control_pb2_grpc.AgentControlServiceStub",
        metadata: secure.Metadata,
        offers: "asyncio.Queue[control_pb2.AttachResponse]",
    ) -> None:
        """Complete offers whose layout was too large for the stream; a failed one is repeated."""
        newest = control_pb2.OfferPlan()  # the last one fetched: offers are repeated
        while True:
            message = await offers.get()
            offer = message.offer_plan
            if offer.sha256 != newest.sha256:
                request = control_pb2.FetchLayoutRequest(sha256=offer.sha256)
                try:
                    response = await stub.FetchLayout(
                        request, metadata=metadata, timeout=FETCH_WITHIN_S
                    )
                except grpc.aio.AioRpcError as error:
                    _log.warning(
                        "layout of job=%s generation=%d not fetched: %s",
                        offer.job,
                        offer.generation,
                        error.details(),
                    )
                    continue
                if hashlib.sha256(response.layout_json).digest() != offer.sha256:
                    _log.error(
                        "layout of job=%s generation=%d ignored: its digest is another",
                        offer.job,
                        offer.generation,
                    )
                    continue
                newest = control_pb2.OfferPlan(
                    sha256=offer.sha256, layout_json=response.layout_json
                )
            offer.layout_json = newest.layout_json
            if message.term == self.fencing.highest:
                self.on_command(message)

    def _handle(self, message: control_pb2.AttachResponse) -> None:
        match message.WhichOneof("message"):
            case "welcome":
                theirs = message.welcome.protocol_version
                if theirs != reports.PROTOCOL_VERSION:
                    raise VersionError(
                        f"controller {self.address} has protocol version {theirs}, this agent "
                        f"{reports.PROTOCOL_VERSION}",
                        remedy="install the same version of pacekeeper on both",
                    )
                self._promised_answer_s = message.welcome.answer_within_s
                self._set_pacing(message.welcome.pacing)
                self.is_connected = True
                self._num_silent = 0
                self._welcomed.set()
                _log.info("controller=%s attached", self.address)
            case "acknowledge":
                self.spool.acknowledge(message.acknowledge.sequence)
            case "set_pacing":
                self._set_pacing(message.set_pacing)
            case _:
                self.on_command(message)

    def _set_pacing(self, pacing: control_pb2.ReportPacing) -> None:
        spread_s = pacing.reconnect_spread_s
        self._spread_s = min(spread_s, MAX_SPREAD_S) if spread_s > 0.0 else 0.0
        self.on_interval(pacing.report_interval_s)

    async def _cancel_when_silent(self, call: "grpc.aio.StreamStreamCall[object, object]") -> None:
        """Cancel a half-open connection: no answer within the timeout while reports wait."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._answer_timeout_s / 4)
            if self._welcomed.is_set() and not len(self.spool):
                self._last_answer_s = loop.time()
            elif loop.time() - self._last_answer_s > self._answer_timeout_s:
                call.cancel()
                return

    @property
    def _answer_timeout_s(self) -> float:
        """Timeout for an answer on this connection."""
        if not self._welcomed.is_set() and len(self.addresses) > 1:
            doublings = min(MAX_DOUBLINGS, max(0, self._num_silent + 1 - SILENT_TRIES))
            return min(self.ack_timeout_s, WELCOME_TIMEOUT_S * 2.0**doublings)
        if self._promised_answer_s > 0.0:
            return min(self.ack_timeout_s, self._promised_answer_s)
        return self.ack_timeout_s
