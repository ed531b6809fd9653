"""The gRPC server of a controller that stands by: every call fails with the leader's address."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.protos import tls
from pacekeeper.protos.convert import reports

SERVICES = "/pacekeeper.v1."


class _Elsewhere(grpc.GenericRpcHandler):
    """Refuses all methods of ours, naming the leader."""

    def __init__(self, why: Callable[[], str]) -> None:
        self._why = why

    def service(self, handler_call_details: Any) -> Any:
        """A handler of one method; None for what is not ours."""
        if not handler_call_details.method.startswith(SERVICES):
            return None

        async def refuse(requests: Any, context: Any) -> AsyncIterator[bytes]:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._why())
            yield b""

        return grpc.stream_stream_rpc_method_handler(refuse)


async def open_standby(
    config: ControllerConfig, address: str, why: Callable[[], str]
) -> tuple[grpc.aio.Server, int]:
    """A server at `address` and its port; 0 where it can not listen. Raises ConfigError."""
    server = grpc.aio.server(
        options=reports.server_options(config.limits.max_question_bytes, None),
        handlers=(_Elsewhere(why),),
    )
    state = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    await state.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    try:
        if config.tls.cert:
            credentials = tls.server_credentials(config.tls)
            port = server.add_secure_port(address, credentials)
        else:
            port = server.add_insecure_port(address)
    except RuntimeError:
        return server, 0
    await server.start()
    return server, port


async def pause(stop: asyncio.Event, pause_s: float) -> None:
    """So long, or until `stop`."""
    try:
        async with asyncio.timeout(pause_s):
            await stop.wait()
    except TimeoutError:
        pass
