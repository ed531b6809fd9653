"""One connection of the front: what is read, what waits, what is written, and who is let go."""

import asyncio
import socket

import pytest

from pacekeeper.controller.ingest.http2.agent_stream import (
    DEAD_S,
    HANDSHAKE_S,
    HELLO_WITHIN_S,
    LINGER_S,
    OWED_BYTES,
    SILENT_S,
)
from pacekeeper.controller.ingest.http2.frames import (
    ACK,
    DATA,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)
from support.http2_calls import ACKNOWLEDGED, data
from support.paper_lane import Transport, World, on_paper

RESET = frame(RST_STREAM, 0, 1, b"\0\0\0\x08")
ENDED = frame(DATA, END_STREAM, 1)
HELLO = ("opened", b"hello")


def test_who_connects_is_told_our_settings_at_once_and_hears_without_delay() -> None:
    async def scene(world: World) -> None:
        assert world.said() == [(SETTINGS, 0, 0, b"")]
        assert world.transport.socket.options == [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
        assert world.connections == {world.lane}
        world.lane.connection_lost(None)
        assert world.connections == set()

    on_paper(scene)


@pytest.mark.parametrize(
    ("peer", "told"),
    [
        (("127.0.0.1", 7), "ipv4:127.0.0.1:7"),
        (("::1", 7, 0, 0), "ipv6:%5B::1%5D:7"),
    ],
)
def test_a_gate_is_shown_who_calls(peer: tuple[object, ...], told: str) -> None:
    async def scene(world: World) -> None:
        world.greet(data(b"hello"))
        shown = world.lane.shown()
        assert (shown.peer, shown.authorization) == (told, ("Bearer x",))
        assert (shown.has_certificate, shown.uris, shown.names) == (False, (), ())

    on_paper(scene, transport=Transport(peer=peer))


def test_a_gate_is_shown_the_names_in_a_certificate() -> None:
    async def scene(world: World) -> None:
        names = (("URI", "spiffe://x/node/n"), ("DNS", "n.example"), ("email", "x"))
        world.transport.certificate = {"subjectAltName": names}
        shown = world.lane.shown()
        assert shown.has_certificate
        assert (shown.uris, shown.names) == (("spiffe://x/node/n",), ("n.example",))

    on_paper(scene)


@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_no_call_of_an_agent_is_handed_on_whole_or_refused(is_first: bool) -> None:
    async def scene(world: World) -> None:
        if not is_first:
            world.greet(data(b"hello"), RESET)
            world.said()
        call = world.called("/pacekeeper.v1.StatusService/ListJobs", stream=3)
        opening = PREFACE + frame(SETTINGS, 0, 0) if is_first else b""
        world.feed(opening, call, frame(DATA, 0, 3, b"x"), ACKNOWLEDGED if is_first else b"")
        if is_first:
            ((first, shown),) = world.handed_on
            assert first == opening + call + frame(DATA, 0, 3, b"x")
            assert (shown.peer, shown.authorization) == ("ipv4:127.0.0.1:7", ())
            assert world.connections == set(), "its life is the other server's"
            assert world.heard == []
        else:
            assert world.handed_on == []
            assert world.trailers()["grpc-status"] == "12"
            assert world.heard == [HELLO, "closed"]

    on_paper(scene)


def test_what_breaks_the_rules_ends_the_connection_and_nothing_is_said() -> None:
    async def scene(world: World) -> None:
        world.said()
        world.feed(b"GET / HTTP/1.1\r\n\r\n")
        assert world.transport.is_aborted
        assert world.said() == []

    on_paper(scene)


def test_a_first_message_too_large_is_nobodys_and_a_later_one_its_agents() -> None:
    async def stranger(world: World) -> None:
        world.greet(frame(DATA, 0, 1, b"\0\0\1\0\1"))
        told = world.trailers()
        assert told["grpc-status"] == "3"
        assert told["grpc-message"].startswith("the first message must be Hello: 65537 bytes")
        assert world.heard == []

    async def agent(world: World) -> None:
        world.greet(data(b"hello"), frame(DATA, 0, 1, b"\0\0\0\4\0"))
        assert world.trailers()["grpc-status"] == "8"
        assert world.heard == [HELLO, "closed"]

    on_paper(stranger)
    on_paper(agent)


def test_until_it_is_judged_it_is_not_read_and_then_what_came_is_heard_in_order() -> None:
    async def scene(world: World) -> None:
        world.greet(data(b"hello"), data(b"1"), data(b"2"), ENDED)
        assert world.heard == [HELLO]
        assert not world.transport.is_read
        world.lane.tell(b"welcome", b"welcome", 0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert world.heard == [HELLO, b"1", b"2", "finished"]
        assert world.transport.is_read
        world.lane.go_on()
        assert world.heard[-2:] == [b"2", "finished"], "once"

    on_paper(scene, is_judging=True)


def test_an_agent_that_ends_without_hello_is_told_so_by_the_host() -> None:
    async def nothing(world: World) -> None:
        world.greet(ENDED)
        assert world.heard == [("opened", b""), "finished"]
        world.lane.look(world.lane._made_s + HELLO_WITHIN_S + 1.0)
        assert world.heard == [("opened", b""), "finished"], "it is told once"

    async def given_up(world: World) -> None:
        world.greet(RESET, data(b"hello"))
        assert world.heard == []

    on_paper(nothing, is_judging=False)
    on_paper(given_up)


def test_what_a_deaf_stream_brings_is_not_handed_on() -> None:
    async def scene(world: World) -> None:
        world.greet(data(b"hello"), data(b"1"))
        world.lane.is_deaf = True
        world.feed(data(b"2"))
        assert world.heard == [HELLO, b"1"]

    on_paper(scene)


def test_who_reports_too_fast_is_not_read_for_so_long() -> None:
    async def scene(world: World) -> None:
        world.greet(data(b"hello"), data(b"1"), data(b"2"))
        assert world.heard == [HELLO, b"1"]
        assert not world.transport.is_read
        world.rest_s = 0.0
        while not world.transport.is_read:
            await asyncio.sleep(0.001)
        assert world.heard == [HELLO, b"1", b"2"]

    on_paper(scene, rest_s=0.01)


def test_while_the_host_has_no_room_it_waits_and_its_silence_is_ours() -> None:
    async def scene(world: World) -> None:
        world.greet(data(b"hello"), data(b"1"), data(b"2"))
        world.feed(ENDED)
        lane, begun_s = world.lane, world.lane._made_s
        assert world.heard == [HELLO, b"1"]
        world.said()
        lane.look(begun_s + DEAD_S + 5.0)
        assert not world.transport.is_aborted
        assert world.said() == []
        lane.go_on()
        assert world.heard == [HELLO, b"1", b"2"]
        assert not world.transport.is_read, "the host is full again"
        world.rest_s = 0.0
        lane._heard_s = lane._moved_s = begun_s - 1000.0
        lane.go_on()
        assert world.heard == [HELLO, b"1", b"2", "finished"]
        assert world.transport.is_read
        lane.look(begun_s + 5.0)
        assert not world.transport.is_aborted, "it had no say meanwhile"

    on_paper(scene, rest_s=None)


def test_a_connection_that_is_gone_is_not_read_again() -> None:
    async def scene(world: World) -> None:
        world.greet(data(b"hello"), data(b"1"), data(b"2"))
        world.transport.abort()
        world.lane.connection_lost(None)
        assert world.heard == [HELLO, b"1", "closed"]
        assert not world.transport.is_read

    on_paper(scene, rest_s=None)


def test_what_a_stream_held_back_does_not_hold_the_next_one_of_its_connection() -> None:
    async def scene(world: World) -> None:
        world.greet(data(b"hello"), data(b"1"), data(b"2"), ENDED)
        world.feed(RESET)
        assert world.heard == [HELLO, b"1", "closed"]
        world.rest_s = 0.0
        world.lane.is_deaf = False
        world.feed(world.called(stream=3), data(b"again", stream=3), data(b"3", stream=3))
        assert world.heard[3:] == [("opened", b"again"), b"3"]
        world.lane.is_deaf = True
        world.feed(frame(RST_STREAM, 0, 3, b"\0\0\0\x08"))
        world.is_judging = True
        world.feed(world.called(stream=5), data(b"third", stream=5), data(b"5", stream=5))
        assert world.heard[5:] == ["closed", ("opened", b"third")], "it is judged anew"
        world.lane.tell(b"welcome", b"welcome", 0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert world.heard[-1] == b"5", "and heard"

    on_paper(scene, rest_s=None)


def test_to_who_does_not_read_the_newest_of_a_kind_is_told_once_it_does() -> None:
    async def scene(world: World) -> None:
        world.greet(data(b"hello"))
        world.said()
        world.lane.pause_writing()
        for number in range(3):
            world.lane.tell(b"plan", b"plan %d" % number, 0)
        world.lane.tell(b"probe", b"probe", 0)
        assert world.said() == []
        world.lane.resume_writing()
        assert world.messages() == [b"plan 2", b"probe"]
        world.lane.tell(b"plan", b"plan 3", 0)
        assert world.messages() == [b"plan 3"]

    on_paper(scene)


def test_what_waits_for_room_is_told_when_the_caller_makes_it() -> None:
    async def scene(world: World) -> None:
        world.greet(data(b"hello"))
        world.lane.tell(b"a", bytes(70_000), 0)
        world.lane.tell(b"b", b"b", 0)
        world.said()
        more = (1 << 16).to_bytes(4, "big")
        world.feed(frame(WINDOW_UPDATE, 0, 1, more), frame(WINDOW_UPDATE, 0, 0, more))
        assert world.messages()[-1] == b"b"

    on_paper(scene)


def test_the_end_of_a_stream_comes_behind_what_is_to_be_said() -> None:
    async def scene(world: World) -> None:
        world.greet(data(b"hello"))
        world.said()
        world.lane.pause_writing()
        world.lane.tell(b"plan", b"plan", 0)
        world.lane.end(14, "going down")
        assert world.heard == [HELLO, "closed"]
        assert world.said() == []
        world.feed(ENDED)
        assert world.heard == [HELLO, "closed"], "there is nobody any more who finishes"
        world.lane.resume_writing()
        kinds = [(kind, flags & END_STREAM) for kind, flags, *_ in world.said()]
        assert kinds == [(DATA, 0), (HEADERS, END_STREAM)]
        assert world.heard == [HELLO, "closed"]
        world.lane.tell(b"plan", b"to nobody", 0)
        assert world.said() == []

    on_paper(scene)


def test_answers_that_nobody_reads_are_bounded_since_it_last_read() -> None:
    pings = frame(PING, 0, 0, b"12345678") * 1000

    async def scene(world: World) -> None:
        world.greet(data(b"hello"))
        for _ in range(2 * OWED_BYTES // len(pings)):
            world.feed(pings)
        assert not world.transport.is_aborted, "who reads may ask for ever"
        world.lane.pause_writing()
        for _ in range(OWED_BYTES // len(pings)):
            world.feed(pings)
        assert not world.transport.is_aborted
        world.feed(pings)
        assert world.transport.is_aborted

    on_paper(scene)


@pytest.mark.parametrize(
    ("greeting", "after_s", "becomes"),
    [
        ((), HANDSHAKE_S - 1.0, ""),
        ((), HANDSHAKE_S + 1.0, "aborted"),
        ((b"",), HELLO_WITHIN_S - 1.0, ""),
        ((b"",), HELLO_WITHIN_S + 1.0, "opened empty"),
        ((RESET,), HANDSHAKE_S - 1.0, ""),
        ((RESET,), HANDSHAKE_S + 1.0, "goodbye"),
        ((data(b"hello"),), SILENT_S - 1.0, ""),
        ((data(b"hello"),), SILENT_S + 1.0, "asked"),
        ((data(b"hello"),), DEAD_S + 1.0, "aborted"),
    ],
)
def test_what_time_tells(greeting: tuple[bytes, ...], after_s: float, becomes: str) -> None:
    async def scene(world: World) -> None:
        if greeting:
            world.greet(*greeting)
        before = len(world.heard)
        world.said()
        world.lane.look(world.lane._made_s + after_s)
        told = [kind for kind, *_ in world.said()]
        assert world.transport.is_aborted == (becomes == "aborted")
        assert told == {"goodbye": [GOAWAY], "asked": [PING]}.get(becomes, told)
        assert (PING in told, GOAWAY in told) == (becomes == "asked", becomes == "goodbye")
        world.lane.look(world.lane._made_s + after_s)
        assert world.heard[before:] == ([("opened", b"")] if becomes == "opened empty" else [])

    on_paper(scene)


def test_a_word_of_the_caller_puts_its_end_off() -> None:
    async def scene(world: World) -> None:
        world.greet(data(b"hello"))
        world.lane._heard_s -= 1000.0
        world.feed(frame(PING, ACK, 0, b"pacekeep"))
        world.said()
        world.lane.look(world.lane._made_s + SILENT_S - 1.0)
        assert not world.transport.is_aborted
        assert world.said() == []

    on_paper(scene)


@pytest.mark.parametrize("is_agent", [True, False])
def test_a_connection_grows_as_old_as_it_may_give_or_take_a_tenth(is_agent: bool) -> None:
    async def scene(world: World) -> None:
        world.greet(data(b"hello") if is_agent else RESET)
        lane = world.lane
        lane._heard_s = lane._made_s + 1000.0
        world.said()
        lane.look(lane._made_s + 899.0)
        assert world.said() == []
        lane.look(lane._made_s + 1101.0)
        told = world.said()
        assert told[-1][:3] == (GOAWAY, 0, 0)
        assert (HEADERS in [kind for kind, *_ in told]) == is_agent
        lane.say_goodbye()
        assert world.said() == [], "once"
        over_s = lane._over_s
        lane.look(over_s + LINGER_S - 0.1)
        assert not world.transport.is_aborted
        lane.look(over_s + LINGER_S + 0.1)
        assert world.transport.is_aborted

    on_paper(scene, age_s=1000.0)


def test_connections_do_not_grow_old_together() -> None:
    ages = set[float | None]()

    async def scene(world: World) -> None:
        assert world.lane._left_s is not None
        ages.add(round(world.lane._left_s - world.lane._made_s, 3))

    for _ in range(8):
        on_paper(scene, age_s=1000.0)
    assert len(ages) > 1
