"""The servers of a standby: they answer reads, with the age of the state, and refuse other calls.

Agents (on their own port), commands and watches are refused with the leader's address. The health
services "", of agents and of operators are NOT_SERVING; `reads` is SERVING once the state has been
loaded from the database.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pacekeeper.controller.api.auth.listeners import ListenerSetup
from pacekeeper.controller.api.operator_actions import ActionRejectedError, RejectReason
from pacekeeper.controller.api.refusals import (
    AGENT_CALLS,
    RefusedCalls,
    for_agents_only,
    refusal,
)
from pacekeeper.controller.api.staleness import Staleness
from pacekeeper.controller.api.status_service import StatusService
from pacekeeper.controller.api.web.start import build_web_server
from pacekeeper.controller.ha.standby_reads import StandbyReads
from pacekeeper.controller.observability.metrics import ControllerMetrics
from pacekeeper.controller.state.events import Event
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.protos import (
    control_pb2,
    operator_pb2,
    status_pb2,
    status_pb2_grpc,
)
from pacekeeper.protos.convert.reports import server_options
from pacekeeper.protos.listening import start_server
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
        """Return a handler: of a read with its age, of a refusal, or that of a foreign service."""
        if not details.method.startswith(_OURS) or details.method.startswith(AGENT_CALLS):
            return await continuation(details)
        staleness = self._staleness()
        if details.method not in _ANSWERED or not staleness.is_readable:
            return refusal(grpc.StatusCode.UNAVAILABLE, staleness.reason)
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


@contextlib.asynccontextmanager
async def standby_servers(
    config: ControllerConfig,
    reads: StandbyReads,
    metrics: ControllerMetrics,
    leader: Callable[[], str],
) -> AsyncIterator[None]:
    """Serve gRPC and the web page while the block runs.

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
        await start_server(server, config.api_listen, config.tls, "--api-listen")
        stack.push_async_callback(server.stop, None)
        agents = grpc.aio.server(
            handlers=(
                RefusedCalls(grpc.StatusCode.UNAVAILABLE, lambda: staleness().reason, AGENT_CALLS),
                for_agents_only(config.api_listen),
            ),
            options=server_options(config.limits.max_question_bytes, None),
        )
        await start_server(agents, config.listen, config.tls, "--listen")
        stack.push_async_callback(agents.stop, None)
        tasks = [asyncio.create_task(_report_readable(reads, health_state))]
        stack.callback(tasks[0].cancel)
        if web is not None:
            tasks.append(asyncio.create_task(web.serve()))
            stack.push_async_callback(web.close, tasks[-1])
        yield


async def _report_readable(reads: StandbyReads, state: health.aio.HealthServicer) -> None:
    while reads.last is None:
        await asyncio.sleep(LOOK_S)
    await state.set(READS, _SERVING)
