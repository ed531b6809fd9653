"""The standby's side: a copy of the leader's store, made of a snapshot and kept by transactions.

What was here before is set aside, not deleted, once a whole snapshot has come; so is a copy that is
damaged, and until then nobody may lead from here. A snapshot has its own name before it lies where
it counts: under its leader's it would lead, however old it is.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import sqlite3
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from pacekeeper.controller.ha.replication_server import change_of
from pacekeeper.controller.storage import replica_marker, sqlite_file
from pacekeeper.controller.storage.schema import SCHEMA_VERSION
from pacekeeper.controller.storage.sqlite_file import DamagedError
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.errors import ConfigError, HostError
from pacekeeper.protos import replication_pb2, replication_pb2_grpc
from pacekeeper.protos import tls as secure


class ReplicaState(Enum):
    """What it may do."""

    STANDS = auto()  # it may lead with it, if the lease's record names it
    AWAITS = auto()  # it takes a snapshot from whoever leads, and leads with nothing before
    REFUSED = auto()  # it may be all that is left of what was told: a person decides


def replica_state(mark: str | None, *, is_there: bool, is_damaged: bool) -> ReplicaState:
    """`mark`: what it says; None: there is none. A copy that is gone is no store without a past."""
    if is_damaged:
        return ReplicaState.REFUSED if mark is None else ReplicaState.AWAITS
    return ReplicaState.STANDS if is_there or mark is None else ReplicaState.AWAITS


FIRST_PART_WITHIN_S = 10.0
SET_ASIDE = ".before"  # what a snapshot replaced, the newest
DAMAGED = ".damaged"  # the same, of what was no whole store
LOGS = ("-wal", "-shm", "-journal")
_log = logging.getLogger(__name__)


class Replica:
    """The store of a standby; `stand` is told its name whenever it becomes another one, and None
    where there is none to lead from: then `damage` says why.
    """

    def __init__(
        self, path: Path, set_eligible: Callable[[str | None], None], damage: str = ""
    ) -> None:
        """Opens what is there, unless its `damage` is known already.

        Raises HostError (in use, no store of ours, damaged and no copy) and VersionError.
        """
        self._path, self._stand = path, set_eligible
        self._store: Store | None = None
        self.name, self.damage = "", ""
        if damage:
            self._give_up(damage)
        else:
            self._open()

    def close(self) -> None:
        """Let another controller have it."""
        if self._store is not None:
            self._store.close()
            self._store = None

    async def follow(self, address: str, member: str, tls: TlsConfig) -> str:
        """Keep a copy of the leader's store there until its stream ends; why it ended.

        Raises HostError where the copy could not be stored. It is the one of before then, or none.
        """
        if self._store is None and not self.damage:
            self._open()
        try:
            channel = secure.aio_channel(address, tls)
        except (ConfigError, HostError) as error:
            return str(error)
        hello = replication_pb2.FollowHello(
            member=member,
            copy=secrets.token_hex(8),
            replaced_copy=self.name,
            schema_version=SCHEMA_VERSION,
        )
        call: Any = replication_pb2_grpc.ReplicationServiceStub(channel).Follow()
        try:
            await call.write(replication_pb2.FollowRequest(hello=hello))
            await self._read(call, hello.copy)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except asyncio.InvalidStateError:
            return "the stream broke"
        except TimeoutError:
            return f"no snapshot within {FIRST_PART_WITHIN_S:g} s"
        except (OSError, sqlite3.Error) as error:
            if sqlite_file.is_damage(error):
                self._give_up(sqlite_file.damaged(self._path, error).what)
                raise HostError(self.damage) from None
            raise HostError(
                f"the copy in {self._path} can not be kept: {error}",
                remedy="give it room: without it this controller can not take over",
            ) from None
        finally:
            call.cancel()
            await channel.close()
        return "the leader closed the stream"

    async def _read(self, call: Any, name: str) -> None:
        data = bytearray()
        async with asyncio.timeout(FIRST_PART_WITHIN_S):
            message = await call.read()
        while message is not grpc.aio.EOF:
            if message.WhichOneof("message") == "snapshot_part":
                part = message.snapshot_part
                data += part.data
                if part.is_last:
                    self._install(bytes(data), name, message.term)
                    data.clear()
                    await call.write(replication_pb2.FollowRequest(stored_index=part.index))
            else:
                transaction = message.transaction
                assert self._store is not None, "a snapshot comes first"
                self._store.follow([change_of(change) for change in transaction.changes])
                self._store.give_back()
                stored = replication_pb2.FollowRequest(stored_index=transaction.index)
                await call.write(stored)
            message = await call.read()

    def _open(self) -> None:
        mark = replica_marker.read_marker(self._path)
        is_there = self._path.exists() and (mark is None or self._path.stat().st_size > 0)
        damage: DamagedError | None = None
        try:
            self._store = Store.open(self._path) if is_there else None
        except DamagedError as error:
            damage = error
        match replica_state(mark, is_there=is_there, is_damaged=damage is not None):
            case ReplicaState.STANDS:
                self.name, self.damage = "" if self._store is None else self._store.copy[0], ""
                if mark not in (None, self.name):
                    replica_marker.remove_marker(
                        self._path
                    )  # of a snapshot that never came to stand there
                self._stand(self.name)
            case ReplicaState.AWAITS:
                self._give_up(damage.what if damage else f"store {self._path} is gone or empty")
            case ReplicaState.REFUSED:
                assert damage is not None, "only that is refused"
                raise damage

    def _give_up(self, damage: str) -> None:
        """Nobody leads from what stands there; it stays until a snapshot has come."""
        self._stand(None)
        self.close()
        self.damage = (
            f"{damage}; it is a copy of a leader's: this controller takes a fresh one from "
            "whoever leads, and does not take over before"
        )
        self.name = replica_marker.read_marker(self._path) or ""

    def _install(self, data: bytes, name: str, term: int) -> None:
        """Put a snapshot in the place of the store, under its own name."""
        fresh = self._path.with_name(f"{self._path.name}.incoming")
        try:
            _write_named(fresh, data, name, term)
        except BaseException:
            with contextlib.suppress(OSError):
                fresh.unlink()  # else it is what keeps the disk full
            raise
        self.close()
        aside = f"{self._path}{DAMAGED if self.damage else SET_ASIDE}"
        with sqlite_file.taken(self._path):
            replica_marker.write_marker(self._path, name)
            _put(fresh, self._path, aside)
        if self.damage:
            said = "store=%s is a fresh copy of the leader's; the last damaged one is kept as %s"
            _log.warning(said, self._path, aside)
        self._open()
        if self.damage:
            raise HostError(self.damage)


def _put(fresh: Path, path: Path, aside: str) -> None:
    """`fresh` stands at `path`, and aside what stood there. In between nothing does: a store before
    its log, which without it would pass for a whole one; none of them beside a log of another.
    """
    if path.exists():
        _remove_logs(Path(aside))
        os.replace(path, aside)
    for suffix in LOGS:
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    os.replace(fresh, path)
    replica_marker.make_durable(path.parent)


def _write_named(path: Path, data: bytes, name: str, term: int) -> None:
    """A store of its own, whole in one file and on the disk. Raises HostError for another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_logs(path)
    with path.open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(data)
    try:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
            connection.execute("UPDATE copy SET name = ?, term = ?", (name, term))
        sqlite_file.connect(path).close()  # a leader's may be damaged, too, and not know it yet
    except sqlite3.DatabaseError as error:
        if not sqlite_file.is_damage(error):
            raise
        raise _damaged_snapshot(str(error)) from None
    except DamagedError as error:
        raise _damaged_snapshot(error.what) from None
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _damaged_snapshot(why: str) -> HostError:
    return HostError(
        f"what the leader sent is damaged: {why}",
        remedy="check its store (pacekeeper backup does): nothing here was replaced",
    )


def _remove_logs(path: Path) -> None:
    """Of a store that was not closed: they are of no other."""
    for suffix in LOGS:
        Path(f"{path}{suffix}").unlink(missing_ok=True)
