"""The leader's side of the copies: each transaction goes to all standbys, and is waited for.

A copy counts when it has all that was told, and the lease's record names it from then on. What is
stored is told to nobody before every copy that counts has stored it; one that is late counts no
more as soon as the record names it no more, and not earlier: it might be taking over.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from pacekeeper.controller.ha.lease_renewer import LeaseRenewer
from pacekeeper.controller.storage.change_log import Change
from pacekeeper.controller.storage.schema import SCHEMA_VERSION
from pacekeeper.controller.storage.store import Store
from pacekeeper.protos import replication_pb2, replication_pb2_grpc

PART_BYTES = 1 << 20
WAITING_TRANSACTIONS = 4096  # of one follower; beyond, it begins anew with a snapshot
_log = logging.getLogger(__name__)

Context = Any  # grpc.aio.ServicerContext: its type parameters say nothing here


@dataclass(slots=True, eq=False, kw_only=True)
class _Follower:
    """One standby's stream. `stored`: the last transaction that its copy has."""

    member: str
    copy: str
    stored: int = -1
    queue: "asyncio.Queue[replication_pb2.Transaction | None]" = field(
        default_factory=lambda: asyncio.Queue(WAITING_TRANSACTIONS)
    )
    is_over: bool = False

    def put(self, transaction: "replication_pb2.Transaction | None") -> None:
        """Send it; who has too many waiting is cut off."""
        if self.queue.full():
            self.is_over, transaction = True, None
            self.queue.get_nowait()
        self.queue.put_nowait(transaction)


class ReplicationServer(replication_pb2_grpc.ReplicationServiceServicer):
    """All copies of one term. Use from one loop."""

    def __init__(
        self, store: Store, keeper: LeaseRenewer, *, term: int, sync_within_s: float
    ) -> None:
        self._store, self._keeper, self._term = store, keeper, term
        self._own = store.copy[0]
        self._sync_within_s = sync_within_s
        self._index = 0
        self._followers: dict[str, _Follower] = {}
        self._counted: set[str] = set()  # a superset of those that the record names
        self._named = asyncio.Lock()  # one change of the record at a time
        self._news = asyncio.Event()

    @property
    def num_in_sync(self) -> int:
        """Copies that count, the leader's own not among them."""
        return len(self._counted)

    async def begin(self) -> None:
        """Returns when the record names the leader's own copy and no other."""
        await self._keeper.set_wanted_replicas((self._own,))

    async def ship(self, changes: Sequence[Change]) -> None:
        """One transaction; returns when all copies that count have it."""
        if not changes:
            return
        self._index += 1
        if not self._followers and not self._counted:
            return
        transaction = replication_pb2.Transaction(
            index=self._index, changes=map(_to_message, changes)
        )
        for follower in self._followers.values():
            follower.put(transaction)
        await self._all_have(self._index)

    async def _all_have(self, index: int) -> None:
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._sync_within_s
        while True:
            self._news.clear()
            late = {copy for copy in self._counted if self._stored(copy) < index}
            gone = {copy for copy in late if self._is_gone(copy)}
            if late and loop.time() >= give_up_s:
                gone = late
            if not late:
                return
            if gone:
                await self._uncount(gone)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(give_up_s):
                    await self._news.wait()

    def _stored(self, copy: str) -> int:
        follower = self._followers.get(copy)
        return -1 if follower is None else follower.stored

    def _is_gone(self, copy: str) -> bool:
        follower = self._followers.get(copy)
        return follower is None or follower.is_over

    async def _uncount(self, copies: set[str]) -> None:
        async with self._named:
            left = self._counted - copies
            await self._keeper.set_wanted_replicas((self._own, *sorted(left)))
            self._counted = left
        for copy in copies:
            follower = self._followers.get(copy)
            if follower is not None:
                follower.is_over = True
                follower.put(None)
            _log.warning("copy=%s counts no more: its standby is away or late", copy)
        self._news.set()

    async def _count(self, follower: _Follower) -> None:
        """From now on it is waited for; the record names it once it has all that was told."""
        self._counted.add(follower.copy)
        head = self._index
        while follower.stored < head and not follower.is_over:
            self._news.clear()
            await self._news.wait()
        async with self._named:
            if follower.is_over:
                self._counted.discard(follower.copy)  # the record never named it
                return
            await self._keeper.set_wanted_replicas((self._own, *sorted(self._counted)))
        _log.info("standby=%s copy=%s has all and may take over", follower.member, follower.copy)

    async def Follow(
        self, request_iterator: AsyncIterator[Any], context: Context
    ) -> AsyncIterator[Any]:
        """One standby: a snapshot, then each transaction."""
        first = await anext(request_iterator)
        hello = first.hello
        if first.WhichOneof("message") != "hello" or not hello.copy:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "expected FollowHello first")
        if hello.schema_version != SCHEMA_VERSION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the leader's store has schema {SCHEMA_VERSION}, this standby reads "
                f"{hello.schema_version}; install the same pacekeeper on both",
            )
        if hello.replaced_copy in self._counted:
            await self._uncount({hello.replaced_copy})
        follower = _Follower(member=hello.member, copy=hello.copy)
        # Nothing is awaited in between: the snapshot ends where the queue begins.
        data, head = self._store.journal.snapshot(), self._index
        self._followers[follower.copy] = follower
        reader = asyncio.create_task(self._read(follower, request_iterator))
        try:
            for part in _parts(data, head):
                yield replication_pb2.FollowResponse(snapshot_part=part, term=self._term)
            while (transaction := await follower.queue.get()) is not None:
                yield replication_pb2.FollowResponse(transaction=transaction, term=self._term)
        finally:
            reader.cancel()
            follower.is_over = True
            del self._followers[follower.copy]
            self._news.set()
        await context.abort(grpc.StatusCode.ABORTED, "too late: begin anew with a snapshot")

    async def _read(self, follower: _Follower, requests: AsyncIterator[Any]) -> None:
        counting: asyncio.Task[None] | None = None
        try:
            async for request in requests:
                follower.stored = max(follower.stored, request.stored_index)
                self._news.set()
                if counting is None:
                    counting = asyncio.create_task(self._count(follower))
        except grpc.aio.AioRpcError:
            pass  # the stream broke; its other half sees it, too
        finally:
            follower.is_over = True
            follower.put(None)
            self._news.set()


def _parts(data: bytes, index: int) -> Sequence[Any]:
    starts = range(0, max(1, len(data)), PART_BYTES)
    return [
        replication_pb2.SnapshotPart(
            data=data[start : start + PART_BYTES], is_last=start == starts[-1], index=index
        )
        for start in starts
    ]


def _to_message(change: Change) -> Any:
    return replication_pb2.Change(
        statement=change.statement, values=[_value(value) for value in change.values]
    )


def _value(value: Any) -> Any:
    match value:
        case None:
            return replication_pb2.Value()
        case bool() | int():
            return replication_pb2.Value(whole=int(value))
        case float():
            return replication_pb2.Value(real=value)
        case str():
            return replication_pb2.Value(text=str(value))
        case bytes():
            return replication_pb2.Value(blob=value)
    raise AssertionError(f"{type(value)} is no value of SQLite")


def change_of(message: Any) -> Change:
    """What a message says."""
    values = []
    for value in message.values:
        kind = value.WhichOneof("kind")
        values.append(None if kind is None else getattr(value, kind))
    return Change(statement=message.statement, values=tuple(values))
