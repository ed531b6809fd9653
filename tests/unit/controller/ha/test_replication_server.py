"""What is stored is told to nobody before every copy that counts has it; who is late counts no
more only once the record says so.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from pacekeeper.controller.ha.replication_server import ReplicationServer
from pacekeeper.controller.storage.schema import SCHEMA_VERSION
from pacekeeper.controller.storage.store import Store
from pacekeeper.protos import replication_pb2, replication_pb2_grpc
from support.agents import until
from support.replication import PaperKeeper, replicating


class Standby:
    """A follower that stores when the test says so."""

    def __init__(self, port: int, copy: str) -> None:
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.call: Any = replication_pb2_grpc.ReplicationServiceStub(self.channel).Follow()
        self.copy = copy

    async def begin(self) -> int:
        """The index of the snapshot."""
        hello = replication_pb2.FollowHello(copy=self.copy, schema_version=SCHEMA_VERSION)
        await self.call.write(replication_pb2.FollowRequest(hello=hello))
        while not (part := (await self.call.read()).snapshot_part).is_last:
            pass
        return int(part.index)

    async def stores(self, index: int) -> None:
        await self.call.write(replication_pb2.FollowRequest(stored_index=index))


@asynccontextmanager
async def leading(
    folder: Path, within_s: float
) -> AsyncIterator[tuple[Store, ReplicationServer, PaperKeeper, Standby]]:
    async with replicating(folder, within_s) as (store, copies, keeper, port):
        standby = Standby(port, "theirs")
        try:
            yield store, copies, keeper, standby
        finally:
            standby.call.cancel()
            await standby.channel.close()


def changed(store: Store) -> Sequence[Any]:
    with store.transaction():
        store.forget_job("x")
    return store.journal.taken()


def test_a_copy_counts_from_when_it_has_all_and_is_waited_for(tmp_path: Path) -> None:
    async def scene() -> None:
        async with leading(tmp_path, 20.0) as (store, copies, keeper, standby):
            await copies.ship(changed(store))  # nobody is waited for
            index = await standby.begin()
            assert index == 1 and not keeper.named
            await standby.stores(index)
            await until(lambda: keeper.named, "it is named")
            assert keeper.named[-1][1:] == ("theirs",)

            shipping = asyncio.create_task(copies.ship(changed(store)))
            told = (await standby.call.read()).transaction
            assert told.index == 2 and len(told.changes) == 1
            await asyncio.sleep(0.1)
            assert not shipping.done(), "it is not stored there"
            await standby.stores(2)
            await shipping

    asyncio.run(scene())


def test_who_is_late_is_waited_for_until_the_record_names_it_no_more(tmp_path: Path) -> None:
    async def scene() -> None:
        async with leading(tmp_path, 0.1) as (store, copies, keeper, standby):
            await standby.stores(await standby.begin())
            await until(lambda: keeper.named, "it is named")
            keeper.answers.clear()  # the lease's store is away: it may be taking over
            shipping = asyncio.create_task(copies.ship(changed(store)))
            await asyncio.sleep(0.4)
            assert not shipping.done()
            keeper.answers.set()
            await shipping
            assert keeper.named[-1] == (store.copy[0],)
            assert copies.num_in_sync == 0

    asyncio.run(scene())
