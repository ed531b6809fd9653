"""What a controller that stands by says to a browser: that it does not lead, and who does.

One answer for whatever is asked, and no framework behind it: its port is free at once when this
controller begins to lead.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from html import escape
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pacekeeper.controller.api.web.server import page_context
from pacekeeper.core.addresses import host_and_port
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.errors import listen_error
from pacekeeper.protos import tls
from pacekeeper.protos.convert import reports

REQUEST_WITHIN_S = 5.0
MOST_OPEN = 64  # connections; a browser that is turned away comes again
MOST_BYTES = 16 << 10  # of a request
RETRY_S = 5
_GONE = (
    TimeoutError,
    OSError,
    asyncio.IncompleteReadError,
    asyncio.LimitOverrunError,
    asyncio.CancelledError,  # the loop ends: asyncio 3.11 makes a traceback of such a handler
)
_HEAD = (
    "HTTP/1.1 503 Service Unavailable\r\n"
    "content-type: text/html; charset=utf-8\r\n"
    "content-length: {length}\r\n"
    f"retry-after: {RETRY_S}\r\n"
    "content-security-policy: default-src 'none'; frame-ancestors 'none'\r\n"
    "x-content-type-options: nosniff\r\n"
    "cache-control: no-store\r\n"
    "connection: close\r\n\r\n"
)
_PAGE = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>pacekeeper stands by</title>'
    "<h1>Not here</h1><p>{why}.</p><p>Whoever leads serves the page: ask that host.</p></html>"
)


async def open_page(config: ControllerConfig, why: Callable[[], str]) -> asyncio.Server | None:
    """Serve at `[controller] web`; None where no page is wanted.

    Raises HostError (the port is taken) and ConfigError (certificate).
    """
    if not config.web:
        return None
    num_open = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_open
        num_open += 1
        try:
            if num_open <= MOST_OPEN:
                async with asyncio.timeout(REQUEST_WITHIN_S):
                    await reader.readuntil(b"\r\n\r\n")
                    body = _PAGE.format(why=escape(why())).encode()
                    writer.write(_HEAD.format(length=len(body)).encode() + body)
                    await writer.drain()
        except _GONE:
            pass
        finally:
            num_open -= 1
            writer.close()

    host, port = host_and_port(config.web, first_port=0)
    context = page_context(config.tls) if config.tls.cert else None
    within_s = REQUEST_WITHIN_S if context else None
    try:
        return await asyncio.start_server(
            answer, host, port, ssl=context, ssl_handshake_timeout=within_s, limit=MOST_BYTES
        )
    except OSError as error:
        raise listen_error(config.web, error, option="--web", rival="another service") from None


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
