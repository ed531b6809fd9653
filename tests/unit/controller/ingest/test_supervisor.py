"""How long the door lets reports gather before it reads again; whom it takes for hanging."""

import asyncio
import time
from collections.abc import Callable, Sequence

import pytest

from pacekeeper.controller.ingest import ipc, supervisor
from pacekeeper.controller.ingest.ipc import Frame
from pacekeeper.controller.ingest.supervisor import IngestSupervisor

PATIENCE_S = 60.0
LONG_S = 600.0


class Written:
    """A line on which all is written already; nobody hears what is said."""

    def __init__(self, *packets: bytes) -> None:
        self._packets = list(packets)

    async def read(self, limit_bytes: int) -> bytes:
        return self._packets.pop(0) if self._packets else b""


class Answered:
    """A line at whose end somebody is who has heard all but the first question."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.door: IngestSupervisor | None = None
        self.num_asked = 0
        self.transport = self
        self._clock = clock

    def write(self, frame: bytes) -> None:
        self.num_asked += 1
        if self.door is not None and self.num_asked > 1:
            self.door._alive_s = self._clock()

    def get_write_buffer_size(self) -> int:
        return 0


async def nothing() -> None:
    """Nobody is lost."""


async def nobody(frames: Sequence[Frame]) -> None:
    """Nothing is said."""


def sequences_heard(takes_s: float, *, is_draining: bool = False) -> list[int]:
    """Of two packets, where to take one in takes so long."""
    heard: list[int] = []
    clock_s = time.monotonic()

    async def hear(frames: Sequence[Frame]) -> None:
        nonlocal clock_s
        clock_s += takes_s
        heard.extend(number for _, _, number, _ in frames)

    async def scene() -> None:
        door = IngestSupervisor(
            {},
            on_frames=hear,
            on_gone=nothing,
            on_restart=lambda: None,
        )
        door._reader = Written(  # type: ignore[assignment]
            ipc.frame(ipc.OPENED, 1, 1), ipc.frame(ipc.REPORT, 1, 2)
        )
        door._frames = ipc.Frames(1 << 10)
        if is_draining:
            door._draining.set()
        async with asyncio.timeout(PATIENCE_S):
            await door._serve()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "GATHER_S", LONG_S)
        patch.setattr(supervisor, "GATHER_S_PER_STREAM", LONG_S)
        patch.setattr(supervisor, "time", type("Clock", (), {"monotonic": lambda: clock_s}))
        patch.setattr(IngestSupervisor, "_watch", lambda self: nothing())
        asyncio.run(scene())
    return heard


def test_the_time_that_taking_in_needs_counts_as_gathering() -> None:
    assert sequences_heard(takes_s=LONG_S) == [1, 2]


def test_nothing_gathers_while_agents_are_sent_away() -> None:
    assert sequences_heard(takes_s=0.0, is_draining=True) == [1, 2]


def test_a_controller_that_was_stopped_itself_does_not_take_its_front_for_hanging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock_s, killed = 0.0, list[str]()
    monkeypatch.setattr(supervisor, "PING_S", 0.001)
    monkeypatch.setattr(supervisor, "time", type("Clock", (), {"monotonic": lambda: clock_s}))
    monkeypatch.setattr(IngestSupervisor, "_kill", lambda self: killed.append("ingest"))

    async def scene() -> None:
        nonlocal clock_s
        door = IngestSupervisor(
            {},
            on_frames=nobody,
            on_gone=nothing,
            on_restart=lambda: None,
        )
        there = Answered(lambda: clock_s)
        there.door, door._writer = door, there  # type: ignore[assignment]
        door._reading_s = door._alive_s = -1.0
        watching = asyncio.create_task(door._watch())
        await asyncio.sleep(0.0)  # it has asked: now nothing of this process runs for long
        clock_s += LONG_S
        async with asyncio.timeout(PATIENCE_S):
            while there.num_asked < 4 and not watching.done():
                await asyncio.sleep(0.001)
        watching.cancel()

    asyncio.run(scene())
    assert not killed
