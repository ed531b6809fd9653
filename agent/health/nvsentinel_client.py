"""Tells NVSentinel's platform connector, on this node's Unix socket, what changed. A shell.

The state is told, not its history: what could not be told is told as it is then.
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
    """`remediates`: it may act on the node; otherwise it stores what it is told."""

    socket: str
    node: str
    remediates: bool
    look: Callable[[], tuple[HealthEvent, ...]]
    news: UnsentEvents = field(default_factory=UnsentEvents)
    _reason: str = ""

    async def run(self) -> None:
        """Until cancelled."""
        async with grpc.aio.insecure_channel(f"unix://{self.socket}") as channel:
            stub = nvsentinel_pb2_grpc.PlatformConnectorStub(channel)
            while True:
                waiting = self.news.waiting(self.look())
                rest_s = PERIOD_S
                if waiting:
                    said = await self._tell(stub, waiting)
                    rest_s = RETRY_S if said else PERIOD_S
                    if said and said != self._reason:
                        _log.warning("nvsentinel=%s: %s; told again later", self.socket, said)
                    self._reason = said
                await asyncio.sleep(rest_s)

    async def _tell(
        self, stub: nvsentinel_pb2_grpc.PlatformConnectorStub, waiting: tuple[HealthEvent, ...]
    ) -> str:
        """Why it was not taken; empty where it was."""
        message = nvsentinel_pb2.HealthEvents(
            version=VERSION, events=[self._message(event) for event in waiting]
        )
        try:
            await stub.HealthEventOccurredV1(message, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        for event in waiting:
            _log.info(
                "nvsentinel check=%s healthy=%s: %s", event.check, event.is_healthy, event.words
            )
        self.news.taken(waiting)
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
            message=event.words,
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
