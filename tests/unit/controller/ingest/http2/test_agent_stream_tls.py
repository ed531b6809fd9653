"""A connection of the front with TLS: nothing is said, heard or judged before its handshake."""

import asyncio
from typing import Any

import pytest

from pacekeeper.controller.ingest.http2.agent_stream import HANDSHAKE_S
from pacekeeper.controller.ingest.http2.frames import PREFACE, SETTINGS, frame
from support.http2_calls import ACKNOWLEDGED, data
from support.paper_lane import Transport, World, on_paper

HELLO = ("opened", b"hello")


class Handshake:
    """One that is over when it is told what comes of it."""

    def __init__(self) -> None:
        self.comes: asyncio.Future[Transport | OSError] = asyncio.Future()

    async def end(self, what: Transport | OSError) -> None:
        self.comes.set_result(what)
        for _ in range(3):
            await asyncio.sleep(0)


def with_handshake(scene: Any) -> None:
    found = list[Handshake]()

    async def start_tls(plain: Any, lane: Any, context: Any, **values: Any) -> Transport:
        assert values == {"server_side": True, "ssl_handshake_timeout": HANDSHAKE_S}
        found.append(Handshake())
        what = await found[0].comes
        if isinstance(what, OSError):
            raise what
        return what

    async def begun(world: World) -> None:
        await asyncio.sleep(0)
        assert world.said() == []
        await scene(world, found[0])

    on_paper(begun, start_tls=start_tls)


def test_what_comes_right_behind_the_handshake_is_heard_after_it() -> None:
    async def scene(world: World, handshake: Handshake) -> None:
        world.feed(PREFACE, frame(SETTINGS, 0, 0), ACKNOWLEDGED)
        world.feed(world.called(), data(b"hello"))
        assert world.heard == []
        world.lane.look(world.lane._made_s + HANDSHAKE_S + 5.0)
        world.lane.say_goodbye()
        assert world.said() == []
        assert not world.transport.is_aborted, "it has a time of its own"
        plain, world.transport = world.transport, Transport()
        await handshake.end(world.transport)
        assert plain.written == b""
        assert world.said()[0] == (SETTINGS, 0, 0, b"")
        world.feed(data(b"1"))
        assert world.heard == [HELLO, b"1"]

    with_handshake(scene)


@pytest.mark.parametrize("protocol", [None, "http/1.1"])
def test_who_does_not_speak_http2_in_it_is_let_go(protocol: str | None) -> None:
    async def scene(world: World, handshake: Handshake) -> None:
        secured = Transport(protocol=protocol)
        await handshake.end(secured)
        assert secured.is_aborted
        assert secured.written == b""

    with_handshake(scene)


def test_one_that_breaks_off_leaves_nothing() -> None:
    async def scene(world: World, handshake: Handshake) -> None:
        assert world.connections == {world.lane}
        await handshake.end(ConnectionResetError())
        assert world.transport.is_aborted
        assert world.connections == set()
        assert world.heard == ["handshake_failed"]

    with_handshake(scene)
