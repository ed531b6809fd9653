"""An ingest process that is asked to end while it starts, alone or with all of its group."""

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.controller.ingest import supervisor
from pacekeeper.controller.ingest.ipc import Frame
from pacekeeper.controller.ingest.supervisor import IngestSupervisor
from pacekeeper.core.config.security import TlsConfig
from support.controllers import PATIENCE_S


async def nobody(_: Sequence[Frame]) -> None:
    """Nothing is said."""


async def nothing() -> None:
    """No stream is lost."""


def made(on_restart: Callable[[], None] = lambda: None) -> IngestSupervisor:
    settings = {
        "listen": "127.0.0.1:0",
        "api_listen": "127.0.0.1:1",
        "tls": asdict(TlsConfig()),
        "max_report_bytes": 1 << 20,
        "connection_s": None,
        "processes": 1,
        "index": 0,
        "reports": {"per_s": 1.0, "at_once": 1},
    }
    return IngestSupervisor(
        settings,
        on_frames=nobody,
        on_gone=nothing,
        on_restart=on_restart,
    )


async def holds(answer: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not answer():
            await asyncio.sleep(0.02)


async def started(door: IngestSupervisor) -> asyncio.subprocess.Process:
    await holds(lambda: door._process is not None)
    assert door._process is not None
    return door._process


def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of each ingest process a process that takes its time to start."""
    script = tmp_path / "ingest"
    script.write_text(f"#!/bin/sh\nexec sleep {2 * PATIENCE_S:.0f}\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_front_that_is_being_started_again_does_not_outlive_a_drain(
    has_begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "AGAIN_S", 0.0 if has_begun else PATIENCE_S)
    restarts = []

    async def scene() -> None:
        door = made(lambda: restarts.append(1))
        await door.start()
        running = asyncio.create_task(door.run())
        silent(tmp_path, monkeypatch)
        (await started(door)).kill()
        await holds(lambda: restarts)
        if has_begun:
            await started(door)
        await door.drain()
        async with asyncio.timeout(PATIENCE_S):
            await running  # it is told of no trouble
        assert door._process is None

    asyncio.run(scene())


def test_a_start_that_is_given_up_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent(tmp_path, monkeypatch)

    async def scene() -> None:
        door = made()
        starting = asyncio.create_task(door.start())
        process = await started(door)
        starting.cancel()
        await asyncio.wait({starting})
        assert process.returncode == -signal.SIGKILL

    asyncio.run(scene())


def test_what_a_terminal_tells_all_does_not_end_a_front_that_just_begins() -> None:
    async def scene() -> None:
        door = made()
        starting = asyncio.create_task(door.start())
        process = await started(door)
        process.send_signal(signal.SIGINT)
        process.terminate()
        async with asyncio.timeout(PATIENCE_S):
            await starting
        await door.drain()
        assert process.returncode == 0

    asyncio.run(scene())
