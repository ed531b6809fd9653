"""The port of an ingest process: lanes for whoever connects, looked at now and then."""

import asyncio
import contextlib
import socket
from asyncio import sslproto
from collections.abc import AsyncIterator

from pacekeeper.controller.ingest.http2.agent_stream import AgentConnection, ConnectionConfig

DRAIN_S = 2.0
BACKLOG = 4096
TLS_BYTES = 32 << 10
LOOK_S, LOOKED_AT_ONCE = 2.0, 1000


def hold_little() -> None:
    """For the whole process: asyncio holds 256 KiB for each TLS connection, a record has 16."""
    sslproto.SSLProtocol.max_size = TLS_BYTES


@contextlib.asynccontextmanager
async def listening(address: str, rules: ConnectionConfig) -> AsyncIterator[int]:
    """Lanes for whoever connects there: the port. Raises OSError."""
    loop, lanes = asyncio.get_running_loop(), set[AgentConnection]()
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    made = socket.create_server(
        (host, int(port)),
        family=socket.AF_INET6 if ":" in host else socket.AF_INET,
        backlog=BACKLOG,
        dualstack_ipv6=host == "::",
    )
    server = await loop.create_server(
        lambda: AgentConnection(rules, lanes), sock=made, backlog=BACKLOG
    )
    looking = loop.create_task(_look(lanes))
    try:
        yield made.getsockname()[1]
    finally:
        server.close()
        looking.cancel()
        for lane in list(lanes):
            lane.say_goodbye()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while lanes:
                    await asyncio.sleep(0.02)


async def _look(connections: set[AgentConnection]) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        for i, lane in enumerate(list(connections)):
            if i % LOOKED_AT_ONCE == 0:
                await asyncio.sleep(0)
            lane.look(asyncio.get_running_loop().time())
