"""Sends changed health events to NVSentinel's platform connector, on its Unix socket. A shell.

Level-triggered: after a failed call the then current state is sent, not the missed changes.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio

from pacekeeper.agent.health.external_health import HealthEvent, UnsentEvents
from pacekeeper.protos import nvsentinel_pb2, nvsentinel_pb2_grpc

PERIOD_S = 1.0
RETRY_S = 15.0
TIMEOUT_S = 5.0
VERSION = 1
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class NvsentinelClient:
    """Client of the connector.

    `remediates`: NVSentinel may act on the node; otherwise it only stores the events.
    `events` returns the current state of all checks.
    """

    socket: str
    node: str
    remediates: bool
    events: Callable[[], tuple[HealthEvent, ...]]
    unsent: UnsentEvents = field(default_factory=UnsentEvents)
    _failure: str = ""

    async def run(self) -> None:
        """Check for changed events each second until cancelled."""
        async with grpc.aio.insecure_channel(f"unix://{self.socket}") as channel:
            stub = nvsentinel_pb2_grpc.PlatformConnectorStub(channel)
            while True:
                pending = self.unsent.pending(self.events())
                rest_s = PERIOD_S
                if pending:
                    failure = await self._send(stub, pending)
                    rest_s = RETRY_S if failure else PERIOD_S
                    if failure and failure != self._failure:
                        _log.warning(
                            "nvsentinel=%s did not accept events: %s; retried every %g s",
                            self.socket,
                            failure,
                            RETRY_S,
                        )
                    self._failure = failure
                await asyncio.sleep(rest_s)

    async def _send(
        self, stub: nvsentinel_pb2_grpc.PlatformConnectorStub, pending: tuple[HealthEvent, ...]
    ) -> str:
        """Send events; returns why the call failed, or an empty string."""
        message = nvsentinel_pb2.HealthEvents(
            version=VERSION, events=[self._message(event) for event in pending]
        )
        try:
            await stub.HealthEventOccurredV1(message, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        for event in pending:
            _log.info(
                "nvsentinel check=%s healthy=%s: %s", event.check, event.is_healthy, event.message
            )
        self.unsent.mark_sent(pending)
        return ""

    def _message(self, event: HealthEvent) -> nvsentinel_pb2.HealthEvent:
        strategy = "EXECUTE_REMEDIATION" if self.remediates else "STORE_ONLY"
        message = nvsentinel_pb2.HealthEvent(
            version=VERSION,
            agent="pacekeeper",
            componentClass="GPU",
            checkName=event.check,
            isFatal=event.is_fatal,
            isHealthy=event.is_healthy,
            message=event.message,
            recommendedAction=event.action.value,
            errorCode=[event.code] if event.code else [],
            entitiesImpacted=[
                nvsentinel_pb2.Entity(entityType=kind, entityValue=value)
                for kind, value in event.entities
            ],
            nodeName=self.node,
            processingStrategy=strategy,
        )
        message.generatedTimestamp.FromNanoseconds(time.time_ns())
        return message
