"""A leader's side of the copies, over a keeper on paper, on a port of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio

from pacekeeper.controller.ha.replication_server import ReplicationServer
from pacekeeper.controller.storage.store import Store
from pacekeeper.protos import replication_pb2_grpc


class PaperKeeper:
    """The record names what is wanted at once, or, while it is `away`, when it is back."""

    def __init__(self) -> None:
        self.named: list[tuple[str, ...]] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def set_wanted_replicas(self, copies: tuple[str, ...]) -> None:
        await self.answers.wait()
        self.named.append(copies)


@asynccontextmanager
async def replicating(
    folder: Path, within_s: float = 60.0
) -> AsyncIterator[tuple[Store, ReplicationServer, PaperKeeper, int]]:
    """The last one is the port."""
    store, keeper = Store.open(folder / "store"), PaperKeeper()
    store.journal.is_kept = True
    copies = ReplicationServer(store, keeper, term=3, sync_within_s=within_s)  # type: ignore[arg-type]
    server = grpc.aio.server()
    replication_pb2_grpc.add_ReplicationServiceServicer_to_server(copies, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with asyncio.timeout(60.0):
            yield store, copies, keeper, port
    finally:
        await server.stop(None)
        store.close()
