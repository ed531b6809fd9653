"""The one stream to the controller: reports up, acknowledgements and commands down.

Lost connections are normal: reports stay in the spool, the stream is opened anew with full jitter.
Only a controller of another protocol version, or one that takes no such name, is final.
Of several addresses the next one is tried when one is away, silent or does not lead; what a
controller says in an earlier term than was seen is not taken, acknowledgements among it.
Certificates and tokens are read anew for each connection: what is refused may be mended.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio

import pacekeeper
from pacekeeper.agent.rings.fencing_epoch import FencingEpoch
from pacekeeper.agent.uplink.spool import Spool
from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.errors import ConfigError, HostError, VersionError
from pacekeeper.protos import control_pb2, control_pb2_grpc, telemetry_pb2
from pacekeeper.protos import tls as secure
from pacekeeper.protos.convert import reports

FIRST_BACKOFF_S = 0.2
STABLE_S = 5.0  # a connection that lasted as long starts the back-off anew
# Of one address of several: a frozen one takes calls and says nothing. Who is busy, with a whole
# fleet that comes at once, needs longer: after so many times it is waited for twice as long. Not
# for ever longer: one that is frozen would hold agents back from the next leader.
WELCOME_TIMEOUT_S, SILENT_TRIES, MAX_DOUBLINGS = 1.0, 3, 3
MAX_SEARCH_BACKOFF_S = 1.0  # back-off between several addresses: one of them will lead soon
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Uplink:
    """Keeps one stream open. `wake()` after putting a report into the spool.

    `greeting(sequence)` makes the report that opens each connection, before those that wait: what
    a controller must know to understand them. It carries the number of the last settled report.
    """

    addresses: tuple[str, ...]
    node: str
    life: str
    spool: Spool[telemetry_pb2.NodeReport]
    ack_timeout_s: float
    reconnect_max_s: float
    on_command: Callable[[control_pb2.AttachResponse], None]
    resync_report: Callable[[int], telemetry_pb2.NodeReport]
    rack: str = ""
    tls: TlsConfig = field(default_factory=TlsConfig)
    token_file: str = ""
    fencing: FencingEpoch = field(default_factory=FencingEpoch)
    is_connected: bool = False
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _welcomed: asyncio.Event = field(default_factory=asyncio.Event)
    _finishing: asyncio.Event = field(default_factory=asyncio.Event)
    _last_answer_s: float = 0.0
    _address_index: int = 0  # which address
    _promised_answer_s: float = 0.0  # as the controller promised; 0: it did not
    _num_silent: int = 0  # connections one after the other that brought no word at all

    @property
    def address(self) -> str:
        """Where it is attached, or tries to be."""
        return self.addresses[self._address_index]

    def wake(self) -> None:
        """There is something to send."""
        self._wake.set()

    def finish(self) -> None:
        """Send what waits, then end: `run` returns when the controller has it, or is away."""
        self._finishing.set()
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled or finished.

        Raises VersionError where the controller is of another, ConfigError where it refuses our
        name.
        """
        loop = asyncio.get_running_loop()
        longest_s, reason = self.reconnect_max_s, ""
        if len(self.addresses) > 1:
            longest_s = min(longest_s, MAX_SEARCH_BACKOFF_S)
        backoff_s = min(FIRST_BACKOFF_S, longest_s)
        while True:
            began_s = loop.time()
            said = await self._connect()
            if self._finishing.is_set():
                return
            if self._welcomed.is_set():
                reason = ""
                if loop.time() - began_s > STABLE_S:
                    backoff_s = FIRST_BACKOFF_S
            if said != reason:
                _log.warning("controller=%s away: %s; reports are kept", self.address, said)
                reason = said
            self._address_index = (self._address_index + 1) % len(self.addresses)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(random.uniform(0.0, backoff_s)):
                    await self._finishing.wait()
                    return
            backoff_s = min(longest_s, backoff_s * 2.0)

    async def _connect(self) -> str:
        """One connection, from its opening to its end; says why it ended."""
        self._welcomed.clear()
        self._promised_answer_s = 0.0
        self._last_answer_s = asyncio.get_running_loop().time()
        try:
            shown = secure.bearer_metadata(secure.read_token(self.token_file))
            channel = secure.aio_channel(self.address, self.tls)
        except (ConfigError, HostError) as error:
            return str(error)
        call = control_pb2_grpc.AgentControlServiceStub(channel).Attach(metadata=shown)
        # Tasks of this connection only: a sender that outlived it would take reports of the next.
        tasks = (
            asyncio.create_task(self._send(call)),
            asyncio.create_task(self._cancel_when_silent(call)),
        )
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                self._last_answer_s = asyncio.get_running_loop().time()
                if not self.fencing.accept(message.term):
                    return f"it speaks in term {message.term}, after term {self.fencing.highest}"
                self._handle(message)
            return "the controller closed the stream"
        except asyncio.CancelledError:
            # The watchdog's cancelling of the call looks the same as one of this task.
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            said = f"no answer for {self._answer_timeout_s:g} s"
            self._num_silent += not self._welcomed.is_set()
            return said
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
                    raise result  # our own mistake: never to be hidden behind a reconnect

    def _classify_error(self, error: grpc.aio.AioRpcError) -> str:
        """Why the stream broke. Raises VersionError, ConfigError: no new try would help."""
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            raise VersionError(f"controller {self.address} refuses this agent: {error.details()}")
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            if not self._welcomed.is_set():
                raise ConfigError(
                    f"controller {self.address} refuses this agent: {error.details()}"
                )
            # The report that it refused it has acknowledged before: it is not sent again.
            self.spool.count_rejected()
        return f"{error.code().name}: {error.details()}"

    async def _send(self, call: "grpc.aio.StreamStreamCall[object, object]") -> None:
        """Hello; once welcome, the greeting; then the spool from its first report on."""
        try:
            await call.write(
                control_pb2.AttachRequest(
                    hello=control_pb2.Hello(
                        protocol_version=reports.PROTOCOL_VERSION,
                        product_version=pacekeeper.__version__,
                        node=self.node,
                        agent_life=self.life,
                        rack=self.rack,
                        highest_term=self.fencing.highest,
                    )
                )
            )
            await self._welcomed.wait()
            greeting = self.resync_report(self.spool.settled_sequence)
            await call.write(control_pb2.AttachRequest(report=greeting))
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
            pass  # the stream is over; the reading side says why

    def _handle(self, message: control_pb2.AttachResponse) -> None:
        match message.WhichOneof("message"):
            case "welcome":
                theirs = message.welcome.protocol_version
                if theirs != reports.PROTOCOL_VERSION:
                    raise VersionError(
                        f"controller {self.address} speaks protocol {theirs}, this agent "
                        f"{reports.PROTOCOL_VERSION}",
                        remedy="install the same pacekeeper on both",
                    )
                self._promised_answer_s = message.welcome.answer_within_s
                self.is_connected = True
                self._num_silent = 0
                self._welcomed.set()
                _log.info("controller=%s attached", self.address)
            case "acknowledge":
                self.spool.acknowledge(message.acknowledge.sequence)
            case _:
                self.on_command(message)

    async def _cancel_when_silent(self, call: "grpc.aio.StreamStreamCall[object, object]") -> None:
        """A half-open connection says nothing: no answer for too long while reports wait."""
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
        """How long an answer is waited for on this connection."""
        if not self._welcomed.is_set() and len(self.addresses) > 1:
            doublings = min(MAX_DOUBLINGS, max(0, self._num_silent + 1 - SILENT_TRIES))
            return min(self.ack_timeout_s, WELCOME_TIMEOUT_S * 2.0**doublings)
        if self._promised_answer_s > 0.0:
            return min(self.ack_timeout_s, self._promised_answer_s)
        return self.ack_timeout_s
