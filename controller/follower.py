"""The standby's side: a copy of the leader's store, made of a snapshot and kept by transactions.

What was here before is set aside, not deleted, once a whole snapshot has come.
"""

import asyncio
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from pacekeeper.controller.replicas import change_of
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
        self._store = Store.open(path) if path.exists() else None
        stand(self.name)

    @property
    def name(self) -> str:
        return "" if self._store is None else self._store.copy[0]

    def close(self) -> None:
        """Let another controller have it."""
        if self._store is not None:
            self._store.close()
            self._store = None

    async def follow(self, address: str, member: str, tls: TlsConfig) -> str:
        """Keep a copy of the leader's store there until its stream ends; why it ended."""
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

    def _install(self, data: bytes, name: str, term: int) -> None:
        """Put a snapshot in the place of the store, under its own name."""
        fresh = self._path.with_name(f"{self._path.name}.incoming")
        fresh.parent.mkdir(parents=True, exist_ok=True)
        with fresh.open("wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o600)
            file.flush()
            os.fsync(file.fileno())
        self.close()
        for suffix in ("-wal", "-shm"):  # of a store that was not closed: they are of no other
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)
        if self._path.exists():
            os.replace(self._path, f"{self._path}{SET_ASIDE}")
        os.replace(fresh, self._path)
        self._store = Store.open(self._path)
        self._store.name_copy(name, term)
        self._stand(name)
