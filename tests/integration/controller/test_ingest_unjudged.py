"""Who has not been judged yet costs the ingest process next to nothing, whatever it sends first."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc.aio

from pacekeeper.controller.ingest import ipc
from pacekeeper.controller.ingest.ipc import Frame
from pacekeeper.controller.ingest.supervisor import IngestSupervisor
from pacekeeper.core.config.security import TlsConfig
from pacekeeper.protos import control_pb2, control_pb2_grpc
from support.controllers import PATIENCE_S

CALLERS, EACH_BYTES = 12, 8 << 20
MAY_GROW_BYTES = 24 << 20  # a quarter of what they send


def _peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (kilobytes,) = (text.split()[1] for text in lines if text.startswith("VmHWM"))
    return int(kilobytes) << 10


def test_large_first_messages_are_not_held() -> None:
    opened = list[Frame]()

    async def hear(frames: Sequence[Frame]) -> None:
        opened.extend(one for one in frames if one[0] == ipc.OPENED)

    async def nothing() -> None:
        """It does not end."""

    async def call(door: IngestSupervisor) -> None:
        """One that sends and waits for its end."""
        hello = control_pb2.Hello(product_version="x" * EACH_BYTES)
        async with grpc.aio.insecure_channel(door.address) as channel:
            stream: Any = control_pb2_grpc.AgentControlServiceStub(channel).Attach()
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await stream.write(control_pb2.AttachRequest(hello=hello))
            assert await stream.code() is not grpc.StatusCode.OK

    async def scene() -> int:
        door = IngestSupervisor(
            {
                "listen": "127.0.0.1:0",
                "inner": "unix:/nowhere",
                "tls": asdict(TlsConfig()),
                "max_report_bytes": 2 * EACH_BYTES,
                "connection_s": None,
                "reports": {"per_s": 1e9, "at_once": 1 << 30},
            },
            on_frames=hear,
            on_gone=nothing,
            on_restart=lambda: None,
            on_handshake_failed=lambda: None,
        )
        await door.start()
        running = asyncio.create_task(door.run())
        try:
            assert door._process is not None
            before = _peak_bytes(door._process.pid)
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*(call(door) for _ in range(CALLERS)))
            return _peak_bytes(door._process.pid) - before
        finally:
            await door.drain()
            running.cancel()

    grown = asyncio.run(scene())
    assert grown < MAY_GROW_BYTES
    assert all(len(data) < 128 << 10 for *_, data in opened), "nor is it handed on"
