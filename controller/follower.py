"""The standby's side: a copy of the leader's store, made of a snapshot and kept by transactions.

What was here before is set aside, not deleted, once a whole snapshot has come. A snapshot has its
own name before it lies where it counts: under its leader's it would lead, however old it is.
"""

import asyncio
import contextlib
import os
import secrets
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from pacekeeper.controller.copies import change_of
from pacekeeper.controller.store import Store
from pacekeeper.controller.store_schema import SCHEMA_VERSION
from pacekeeper.core.errors import ConfigError, HostError
from pacekeeper.core.security_config import TlsConfig
from pacekeeper.protos import replication_pb2, replication_pb2_grpc, secure

FIRST_PART_WITHIN_S = 10.0
SET_ASIDE = ".before"  # what a snapshot replaced


class Copy:
    """The store of a standby; `stand` is told its name whenever it becomes another one."""

    def __init__(self, path: Path, stand: Callable[[str], None]) -> None:
        """Opens what is there. Raises HostError (in use, no store of ours) and VersionError."""
        self._path, self._stand = path, stand
        self._store: Store | None = None
        self._open()

    @property
    def name(self) -> str:
        return "" if self._store is None else self._store.copy[0]

    def close(self) -> None:
        """Let another controller have it."""
        if self._store is not None:
            self._store.close()
            self._store = None

    async def follow(self, address: str, member: str, tls: TlsConfig) -> str:
        """Keep a copy of the leader's store there until its stream ends; why it ended.

        Raises HostError where the copy could not be stored. It is the one of before then, or none.
        """
        if self._store is None:
            self._open()
        try:
            channel = secure.agent_channel(address, tls)
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
        self._store = Store.open(self._path) if self._path.exists() else None
        self._stand(self.name)

    def _install(self, data: bytes, name: str, term: int) -> None:
        """Put a snapshot in the place of the store, under its own name."""
        fresh = self._path.with_name(f"{self._path.name}.incoming")
        _write_named(fresh, data, name, term)
        self.close()
        _remove_logs(self._path)
        if self._path.exists():
            os.replace(self._path, f"{self._path}{SET_ASIDE}")
        os.replace(fresh, self._path)
        self._open()


def _write_named(path: Path, data: bytes, name: str, term: int) -> None:
    """A store of its own, whole in one file and on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_logs(path)
    with path.open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(data)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("UPDATE copy SET name = ?, term = ?", (name, term))
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _remove_logs(path: Path) -> None:
    """Of a store that was not closed: they are of no other."""
    for suffix in ("-wal", "-shm", "-journal"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
