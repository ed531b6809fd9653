"""The servers of a standby: reads with their age; everything else is refused.

Agents, commands and watches are refused with the leader's address; the health service "" and those
of agents and operators are NOT_SERVING, `reads` is SERVING as soon as the database was read once.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pacekeeper.controller.api.auth.listeners import ListenerSetup, bind_error
from pacekeeper.controller.api.auth.peer_identity import CALLER_HEADER
from pacekeeper.controller.api.operator_actions import ActionRejectedError, RejectReason
from pacekeeper.controller.api.staleness import Staleness
from pacekeeper.controller.api.status_service import StatusService
from pacekeeper.controller.api.web.start import build_web_server
from pacekeeper.controller.ha.standby_reads import StandbyReads
from pacekeeper.controller.observability.metrics import ControllerMetrics
from pacekeeper.controller.state.events import Event
from pacekeeper.core.addresses import split_address
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.errors import listen_error
from pacekeeper.protos import (
    control_pb2,
    operator_pb2,
    status_pb2,
    status_pb2_grpc,
    tls,
)
from pacekeeper.protos.stale_reads import AGE, LEADER, READS

LOOK_S = 0.1  # between two looks whether something was read
_OURS = "/pacekeeper.v1."
_STATUS = status_pb2.DESCRIPTOR.services_by_name["StatusService"]
_ANSWERED = frozenset(
    f"/{_STATUS.full_name}/{method.name}"
    for method in _STATUS.methods
    if not method.server_streaming
)
_NOT_SERVED = (
    "",
    control_pb2.DESCRIPTOR.services_by_name["AgentControlService"].full_name,
    operator_pb2.DESCRIPTOR.services_by_name["OperatorService"].full_name,
    _STATUS.full_name,
)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class StandbyInterceptor(grpc.aio.ServerInterceptor):
    """Marks reads with their age and refuses all other calls of ours; outside of access control.

    Args:
        staleness: How old the state is now.
    """

    def __init__(self, staleness: Callable[[], Staleness]) -> None:
        self._staleness = staleness

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """The handler of a method, marked; a refusal; or, of other services, theirs."""
        if any(name == CALLER_HEADER for name, _ in details.invocation_metadata or ()):
            return self._refusal("a header of the ingest process, from elsewhere")
        if not details.method.startswith(_OURS):
            return await continuation(details)
        staleness = self._staleness()
        if details.method not in _ANSWERED or not staleness.is_readable:
            return self._refusal(staleness.reason)
        handler = await continuation(details)
        headers = ((AGE, f"{staleness.age_s:.1f}"), (LEADER, staleness.leader))

        async def marked(requests: Any, context: Any) -> Any:
            await context.send_initial_metadata(headers)
            return await handler.stream_unary(requests, context)

        return grpc.stream_unary_rpc_method_handler(
            marked,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    @staticmethod
    def _refusal(why: str) -> Any:
        async def refuse(requests: Any, context: Any) -> AsyncIterator[bytes]:
            await context.abort(grpc.StatusCode.UNAVAILABLE, why)
            yield b""

        return grpc.stream_stream_rpc_method_handler(refuse)


@contextlib.asynccontextmanager
async def standby_servers(
    config: ControllerConfig,
    reads: StandbyReads,
    metrics: ControllerMetrics,
    leader: Callable[[], str],
) -> AsyncIterator[None]:
    """Serve gRPC and the page while the block runs.

    Args:
        config: The configuration.
        reads: The state to show.
        metrics: Counts refusals.
        leader: Returns the address of the last known leader; empty: none.

    Raises:
        HostError: A port is taken.
        ConfigError: Certificates or tokens are not usable.
    """

    def staleness() -> Staleness:
        return Staleness(age_s=reads.age_s(), leader=leader())

    async def put(event: Event) -> None:
        raise ActionRejectedError(RejectReason.STANDBY, staleness().reason)

    setup = ListenerSetup(config, state=reads.state, metrics=metrics)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(setup.close)
        web = build_web_server(
            config,
            state=reads.state,
            put=put,
            history=reads.history,
            ask=reads.ask,
            listener_setup=setup,
            past_layout=reads.past_layout,
            staleness=staleness,
        )
        server = setup.server(StandbyInterceptor(staleness))
        status = StatusService(
            state=reads.state, past_layout=reads.past_layout, history=reads.history, ask=reads.ask
        )
        status_pb2_grpc.add_StatusServiceServicer_to_server(status, server)
        health_state = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health_state, server)
        for name in (*_NOT_SERVED, READS):
            await health_state.set(name, _NOT_SERVING)
        await _start(server, config)
        stack.push_async_callback(server.stop, None)
        tasks = [asyncio.create_task(_say_readable(reads, health_state))]
        stack.callback(tasks[0].cancel)
        if web is not None:
            tasks.append(asyncio.create_task(web.serve()))
            stack.push_async_callback(web.close, tasks[-1])
        yield


async def _start(server: grpc.aio.Server, config: ControllerConfig) -> None:
    try:
        if config.tls.cert:
            port = server.add_secure_port(config.listen, tls.server_credentials(config.tls))
        else:
            port = server.add_insecure_port(config.listen)
    except RuntimeError:
        port = 0
    if not port:
        why = bind_error(*split_address(config.listen))
        raise listen_error(config.listen, why, option="--listen", rival="another controller")
    await server.start()


async def _say_readable(reads: StandbyReads, state: health.aio.HealthServicer) -> None:
    while reads.last is None:
        await asyncio.sleep(LOOK_S)
    await state.set(READS, _SERVING)
