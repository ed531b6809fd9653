"""What an agent takes of what it is told: no more is copied, and who takes none is let go."""

import pytest

from pacekeeper.controller.ingest.http2.agent_stream import (
    DEAD_S,
)
from pacekeeper.controller.ingest.http2.frames import (
    DATA,
    MAX_FRAME_BYTES,
    PUSHED_BYTES,
    WINDOW_UPDATE,
    frame,
)
from support.http2_calls import data, prefixed
from support.paper_lane import World, on_paper

WIDE = (1 << 30).to_bytes(4, "big")
ROOM = frame(WINDOW_UPDATE, 0, 0, WIDE) + frame(WINDOW_UPDATE, 0, 1, WIDE)


def test_a_large_message_is_copied_as_far_as_it_is_read_and_no_further() -> None:
    message = bytes(range(256)) * 16384  # 4 MiB

    async def scene(world: World) -> None:
        world.greet(data(b"hello"), ROOM)
        world.said()
        world.transport.takes_bytes = 300_000
        world.transport.on_full = world.lane.pause_writing
        world.lane.tell(b"plan", message, 0)
        world.lane.tell(b"plan", b"newer", 0)
        got = b""
        while len(got) < len(message):
            written = len(world.transport.written)
            assert written <= 300_000 + PUSHED_BYTES + MAX_FRAME_BYTES + 100
            for _ in range(9):  # it makes room as it reads: no reason to give it up
                world.feed(frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1"))
            assert len(world.transport.written) == written
            got += b"".join(payload for kind, _, _, payload in world.said() if kind == DATA)
            world.lane.resume_writing()
        got += b"".join(payload for kind, _, _, payload in world.said() if kind == DATA)
        assert got == prefixed(message) + prefixed(b"newer")

    on_paper(scene)


@pytest.mark.parametrize(
    ("is_full", "is_held", "after_s", "is_let_go"),
    [
        (True, False, DEAD_S + 1.0, True),
        (True, False, DEAD_S - 1.0, False),
        (True, True, DEAD_S + 1.0, False),  # it is we who do not hear that it has room
        (False, False, DEAD_S + 1.0, False),
    ],
)
def test_who_lives_and_takes_nothing_of_what_it_is_told_is_let_go(
    is_full: bool, is_held: bool, after_s: float, is_let_go: bool
) -> None:
    async def scene(world: World) -> None:
        world.greet(data(b"hello"))
        lane = world.lane
        lane.tell(b"plan", bytes(70_000), 0)  # more than it has room for
        if not is_full:
            world.feed(ROOM)
        if is_held:
            world.feed(data(b"1"))
        assert world.transport.is_read == (not is_held)
        now_s = lane._moved_s + after_s
        lane._heard_s = now_s  # it answers pings
        lane.look(now_s)
        assert world.transport.is_aborted == is_let_go
        if is_full and is_let_go:
            return
        lane.resume_writing()
        lane._moved_s = lane._heard_s = now_s
        lane.look(now_s + DEAD_S - 1.0)
        assert not world.transport.is_aborted

    on_paper(scene, rest_s=None if is_held else 0.0)
