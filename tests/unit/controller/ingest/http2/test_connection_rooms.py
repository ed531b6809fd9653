"""Room on both sides to the byte, and calls that leave nothing behind for the next one."""

import struct

from hpack import Encoder

from pacekeeper.controller.ingest.http2.connection import Http2Connection
from pacekeeper.controller.ingest.http2.frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    GRANTED_BYTES,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_BYTES,
    PADDED,
    PING,
    PREFACE,
    PUSHED_BYTES,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Finished,
    frame,
)
from support.http2_calls import (
    ACKNOWLEDGED,
    CALLED,
    MOST,
    OPENING,
    block,
    data,
    frames_in,
    opened,
    prefixed,
    said,
)


def room_told(connection: Http2Connection, stream: int) -> int:
    """What the caller was granted, on the whole or for a stream."""
    return sum(
        int.from_bytes(payload, "big")
        for kind, _, of, payload in frames_in(bytes(connection.replies))
        if kind == WINDOW_UPDATE and of == stream
    )


def test_the_caller_is_granted_exactly_what_was_read_of_it_and_not_for_each_message() -> None:
    connection = Http2Connection(1 << 30, 1 << 30)
    connection.feed(OPENING + ACKNOWLEDGED)
    connection.take()
    assert (room_told(connection, 0), room_told(connection, 1)) == (GRANTED_BYTES, GRANTED_BYTES)
    said(connection)
    connection.feed(data(b"x") * 100)
    assert said(connection) == [], "little is not worth an answer"
    sent, granted = 100 * 6, 0
    for flags in (0, PADDED) * 100:
        payload = bytes(15_000)
        connection.feed(frame(DATA, flags, 1, payload))
        sent += len(payload)
        granted += room_told(connection, 0)
        assert room_told(connection, 0) == room_told(connection, 1)
        said(connection)
        assert sent - GRANTED_BYTES // 2 <= granted <= sent


def test_who_has_finished_is_granted_nothing_for_its_call() -> None:
    connection = Http2Connection(MOST, MOST)
    connection.feed(PREFACE + frame(HEADERS, END_HEADERS | END_STREAM, 1, block()) + ACKNOWLEDGED)
    connection.take()
    assert (room_told(connection, 0), room_told(connection, 1)) == (GRANTED_BYTES, 0)
    said(connection)
    connection.end(0, "")
    assert [kind for kind, *_ in said(connection)] == [HEADERS], "nor is its stream reset"


def test_what_was_held_before_it_was_taken_is_let_go() -> None:
    connection = Http2Connection(MOST, MOST)
    connection.feed(OPENING + ACKNOWLEDGED + data(b"x" * 9000))
    connection.take()
    assert connection.held() == PREFACE


def test_a_message_is_joined_once_however_many_frames_it_comes_in() -> None:
    connection = opened()
    sent = prefixed(b"x" * 400)
    for at in range(0, 400, 40):
        assert connection.feed(frame(DATA, 0, 1, sent[at : at + 40])) == []
    assert len(connection._parts) == 10
    assert connection.feed(frame(DATA, 0, 1, sent[400:]) + data(b"")) == [b"x" * 400, b""]
    assert not connection._parts


def test_a_call_begins_with_nothing_of_the_one_before() -> None:
    encoder = Encoder()
    small = frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 30))
    first, second = (block(encoder=encoder) for _ in range(2))
    connection = opened(PREFACE + small + frame(HEADERS, END_HEADERS, 1, first))
    connection.send(b"x" * 500)
    assert not connection.is_clear
    cut = frame(DATA, 0, 1, prefixed(b"y" * 300)[:50])
    assert connection.feed(cut + frame(DATA, END_STREAM, 1))[0].__class__ is Finished
    connection.feed(frame(RST_STREAM, 0, 1, b"\0\0\0\x08"))
    assert (connection.is_open, connection.is_clear) == (False, True)
    said(connection)
    connection.send(b"of nobody")
    connection.end(0, "of nobody")
    assert connection.is_clear
    assert said(connection) == []
    assert connection.feed(frame(HEADERS, END_HEADERS, 3, second)) == [CALLED]
    assert said(connection) == [(WINDOW_UPDATE, 0, 3, GRANTED_BYTES.to_bytes(4, "big"))]
    assert connection.feed(data(b"whole", stream=3)) == [b"whole"]
    connection.send(b"z")
    assert [(kind, stream) for kind, _, stream, _ in said(connection)] == [(HEADERS, 3), (DATA, 3)]
    (ended,) = connection.feed(frame(DATA, END_STREAM, 3))
    assert isinstance(ended, Finished)


def test_our_settings_may_be_known_before_there_is_a_call() -> None:
    connection = Http2Connection(MOST, MOST)
    assert connection.feed(PREFACE + ACKNOWLEDGED) == []
    assert connection.feed(frame(HEADERS, END_HEADERS, 1, block())) == [CALLED]


def test_a_second_call_before_the_first_is_taken_is_left_to_whoever_takes_it() -> None:
    encoder = Encoder()
    calls = [frame(HEADERS, END_HEADERS, at, block(encoder=encoder)) for at in (1, 3)]
    connection = Http2Connection(MOST, MOST)
    said(connection)
    assert connection.feed(PREFACE + calls[0] + calls[1] + ACKNOWLEDGED) == [CALLED]
    assert said(connection) == []
    assert connection.held() == PREFACE + calls[0] + calls[1]
    connection.take()
    assert (RST_STREAM, 0, 3, b"\0\0\0\7") in said(connection)


def test_what_comes_for_a_call_that_is_over_makes_room_on_the_connection_only() -> None:
    connection = opened()
    connection.feed(frame(RST_STREAM, 0, 1, b"\0\0\0\x08"))
    for _ in range(40):
        connection.feed(frame(DATA, 0, 1, bytes(MAX_FRAME_BYTES)))
    assert {(kind, stream) for kind, _, stream, _ in said(connection)} == {(WINDOW_UPDATE, 0)}
    assert not connection._parts


def test_what_is_of_no_call_changes_nothing() -> None:
    connection = opened()
    strange = (
        frame(RST_STREAM, 0, 9, b"\0\0\0\x08")
        + frame(RST_STREAM, 0, 0, b"\0\0\0\x08")
        + frame(DATA, END_STREAM, 9)
        + frame(SETTINGS, 0, 0, struct.pack(">HI", 3, 5))  # how many calls it takes
    )
    assert connection.feed(strange) == []
    assert connection.is_open
    (ended,) = connection.feed(frame(DATA, END_STREAM, 1) + frame(DATA, END_STREAM, 1))
    assert isinstance(ended, Finished)
    connection.feed(frame(RST_STREAM, 0, 1, b"\0\0\0\x08"))
    assert connection.feed(frame(RST_STREAM, 0, 0, b"\0\0\0\x08")) == []


def test_a_call_may_end_with_headers_of_its_own() -> None:
    encoder = Encoder()
    connection = opened(PREFACE + frame(HEADERS, END_HEADERS, 1, block(encoder=encoder)))
    trailing = encoder.encode([("x", "y")])
    (ended,) = connection.feed(frame(HEADERS, END_HEADERS | END_STREAM, 1, trailing))
    assert isinstance(ended, Finished)


def sent_by(connection: Http2Connection) -> bytes:
    """The data in what it says."""
    return b"".join(payload for kind, _, _, payload in said(connection) if kind == DATA)


def test_no_byte_more_than_the_caller_has_room_for_and_none_less() -> None:
    def settings(size: int) -> bytes:
        return frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, size))

    connection = opened(PREFACE + settings(3) + frame(HEADERS, END_HEADERS, 1, block()))
    whole = prefixed(b"0123456789")
    connection.send(b"0123456789")
    assert sent_by(connection) == whole[:3]
    connection.feed(frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1"))
    assert sent_by(connection) == whole[3:4]
    connection.feed(frame(WINDOW_UPDATE, 0, 9, b"\0\0\0\x09") + settings(3))
    connection.feed(frame(SETTINGS, 0, 0, struct.pack(">HI", 3, 90)))
    assert sent_by(connection) == b""
    connection.feed(settings(5))
    assert sent_by(connection) == whole[4:6]
    connection.feed(settings(1) + frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\x06"))
    assert sent_by(connection) == whole[6:8], "what was taken back is owed"
    connection.end(0, "")
    assert connection.feed(data(b"to nobody")) == [], "it is over, though not all is said"
    connection.feed(frame(WINDOW_UPDATE, 0, 1, b"\0\1\0\0"))
    assert sent_by(connection) == whole[8:]
    assert not connection.is_open


def test_the_room_of_the_connection_counts_beside_that_of_the_call() -> None:
    wide = struct.pack(">HI", INITIAL_WINDOW_SIZE, (1 << 31) - 1)
    connection = opened(
        PREFACE + frame(SETTINGS, 0, 0, wide) + frame(HEADERS, END_HEADERS, 1, block())
    )
    connection.send(bytes(99_995))
    assert len(sent_by(connection)) == 65535
    connection.feed(frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\x05"))
    assert len(sent_by(connection)) == 5
    connection.feed(frame(WINDOW_UPDATE, 0, 0, (2**31 - 1).to_bytes(4, "big")))
    assert len(sent_by(connection)) == 100_000 - 65540


def test_what_it_says_by_itself() -> None:
    connection = opened()
    connection.ping()
    connection.say_goodbye()
    assert said(connection) == [(PING, 0, 0, b"pacekeep"), (GOAWAY, 0, 0, b"\0\0\0\1\0\0\0\0")]
    connection.feed(frame(PING, 0, 0, b"12345678 and more"))
    assert said(connection) == [(PING, ACK, 0, b"12345678")]


def test_a_message_is_not_copied_for_a_caller_that_does_not_read() -> None:
    wide = struct.pack(">HI", INITIAL_WINDOW_SIZE, 1 << 30)
    opening = PREFACE + frame(SETTINGS, 0, 0, wide) + frame(WINDOW_UPDATE, 0, 0, b"\x3f\0\0\0")
    connection = opened(opening + frame(HEADERS, END_HEADERS, 1, block()))
    message = bytes(range(256)) * 4096  # 1 MiB
    connection.send(message)
    assert PUSHED_BYTES <= len(connection.replies) < PUSHED_BYTES + MAX_FRAME_BYTES + 20
    assert connection._unsent[0].obj is message
    got = sent_by(connection)
    connection.may_push = False
    connection.push()
    connection.feed(frame(WINDOW_UPDATE, 0, 1, b"\0\1\0\0"))
    assert sent_by(connection) == b""
    connection.may_push = True
    while not connection.is_clear:
        connection.push()
        got += sent_by(connection)
    assert got == prefixed(message)
