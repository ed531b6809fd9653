"""Connections that are no agent's, handed on byte for byte to the server of all other calls.

That server sees a socket of ours; the name that it is bound to says whose connection it is.
"""

import asyncio
import contextlib
import os
import socket
from pathlib import Path
from typing import Any

from pacekeeper.controller.ingest.ipc import Shown


class _End(asyncio.Protocol):
    """One end of a pipe. What the other end can not take is not read here."""

    def __init__(self, transport: Any = None) -> None:
        self.transport = transport
        self.other: _End | None = None

    def connection_made(self, transport: Any) -> None:
        """It is open."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """To the other end."""
        if self.other is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        """The other end waits."""
        if self.other is not None:
            with contextlib.suppress(RuntimeError):
                self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        """It goes on."""
        if self.other is not None:
            with contextlib.suppress(RuntimeError):
                self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Both end."""
        if self.other is not None:
            self.other.transport.close()


class _Inner(_End):
    """The end at the server."""

    def __init__(self, pipes: "Pipes", name: str) -> None:
        super().__init__()
        self._pipes, self._name = pipes, name

    def connection_lost(self, error: Exception | None) -> None:
        """And nobody has its name any more."""
        super().connection_lost(error)
        self._pipes.forget(self._name)


class Pipes:
    """All of them, to a server that listens at `address` in a folder of ours."""

    def __init__(self, address: Path) -> None:
        self._address = address
        self._callers: dict[str, Shown] = {}
        self._newest = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_open(self) -> bool:
        """The server's socket is there."""
        return self._address.is_socket()

    def caller(self, peer: str) -> Shown | None:
        """Whose connection has this name."""
        return self._callers.get(peer)

    def begin(self, transport: Any, first: bytes, shown: Shown) -> None:
        """Hand a connection on, which began with these bytes."""
        transport.pause_reading()
        outer = _End(transport)
        transport.set_protocol(outer)
        task = asyncio.get_running_loop().create_task(self._join(outer, first, shown))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, outer: _End, first: bytes, shown: Shown) -> None:
        self._newest += 1
        name = f"{self._address}-{os.getpid()}-{self._newest}"
        made = socket.socket(socket.AF_UNIX)
        try:
            made.setblocking(False)
            made.bind(name)
            self._callers[f"unix:{name}"] = shown
            loop = asyncio.get_running_loop()
            await loop.sock_connect(made, str(self._address))
            _, inner = await loop.create_unix_connection(lambda: _Inner(self, name), sock=made)
        except OSError:
            made.close()
            self.forget(name)
            outer.transport.abort()
            return
        outer.other, inner.other = inner, outer
        inner.transport.write(first)
        if outer.transport.is_closing():
            inner.transport.close()
        else:
            outer.transport.resume_reading()

    def forget(self, name: str) -> None:
        """Its connection is over."""
        self._callers.pop(f"unix:{name}", None)
        with contextlib.suppress(OSError):
            os.unlink(name)
