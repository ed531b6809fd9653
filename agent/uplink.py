"""The one stream to the controller: reports up, acknowledgements and commands down.

Lost connections are normal: reports stay in the spool, the stream is opened anew with full jitter.
Only a controller of another protocol version is final.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from importlib.metadata import version

import grpc
import grpc.aio

from pacekeeper.agent.spool import Spool
from pacekeeper.core.errors import VersionError
from pacekeeper.protos import control_pb2, control_pb2_grpc, wire

FIRST_BACKOFF_S = 0.2
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Uplink:
    """Keeps one stream open. `wake()` after putting a report into the spool."""

    address: str
    node: str
    life: str
    spool: Spool
    ack_timeout_s: float
    reconnect_max_s: float
    on_command: Callable[[control_pb2.AttachResponse], None]
    on_connected: Callable[[], None]
    is_connected: bool = False
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _last_answer_s: float = 0.0

    def wake(self) -> None:
        """There is something to send."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled. Raises VersionError where the controller speaks another version."""
        backoff_s = FIRST_BACKOFF_S
        reason = ""
        while True:
            channel = grpc.aio.insecure_channel(self.address, options=wire.GRPC_OPTIONS_CLIENT)
            try:
                await self._stream(channel)
                said = "the controller closed the stream"
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    raise VersionError(f"{self.address} refuses: {error.details()}") from None
                said = f"{error.code().name}: {error.details()}"
            except asyncio.InvalidStateError:  # a write after the stream had died
                said = "the stream broke"
            finally:
                was_connected, self.is_connected = self.is_connected, False
                await channel.close()
            if was_connected:
                backoff_s = FIRST_BACKOFF_S
            if said != reason:
                _log.warning("controller=%s away: %s; reports are kept", self.address, said)
                reason = said
            await asyncio.sleep(random.uniform(0.0, backoff_s))
            backoff_s = min(self.reconnect_max_s, backoff_s * 2.0)

    async def _stream(self, channel: grpc.aio.Channel) -> None:
        stub = control_pb2_grpc.AgentControlServiceStub(channel)
        call = stub.Attach(self._requests())
        loop = asyncio.get_running_loop()
        self._last_answer_s = loop.time()
        watchdog = asyncio.create_task(self._cancel_when_silent(call))
        try:
            async for message in call:
                self._last_answer_s = loop.time()
                self._take(message)
        finally:
            watchdog.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watchdog

    async def _requests(self) -> AsyncIterator[control_pb2.AttachRequest]:
        yield control_pb2.AttachRequest(
            hello=control_pb2.Hello(
                protocol_version=wire.PROTOCOL_VERSION,
                product_version=version("pacekeeper"),
                node=self.node,
                agent_life=self.life,
            )
        )
        self.spool.rewind()
        while True:
            self._wake.clear()
            while (report := self.spool.next()) is not None:
                yield control_pb2.AttachRequest(report=wire.report_to_message(report))
            await self._wake.wait()

    def _take(self, message: control_pb2.AttachResponse) -> None:
        match message.WhichOneof("message"):
            case "welcome":
                self.is_connected = True
                _log.info("controller=%s attached", self.address)
                self.on_connected()
            case "acknowledge":
                self.spool.acknowledge(message.acknowledge.sequence)
            case _:
                self.on_command(message)

    async def _cancel_when_silent(self, call: "grpc.aio.StreamStreamCall[object, object]") -> None:
        """A half-open connection says nothing: no answer for too long while reports wait."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.ack_timeout_s / 3)
            if not len(self.spool):
                self._last_answer_s = loop.time()
            elif loop.time() - self._last_answer_s > self.ack_timeout_s:
                call.cancel()
                return
