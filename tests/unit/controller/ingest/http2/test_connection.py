"""A server's side of HTTP/2: what a caller says comes whole, who breaks the rules is given up."""

import struct

import pytest
from hpack import Encoder

from pacekeeper.controller.ingest.http2.connection import Http2Connection
from pacekeeper.controller.ingest.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GRANTED_BYTES,
    HEADERS,
    HELD_BYTES,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_BYTES,
    PADDED,
    PING,
    PREFACE,
    PRIORITISED,
    RESOURCE_EXHAUSTED,
    RST_STREAM,
    SETTINGS,
    UNIMPLEMENTED,
    WINDOW_UPDATE,
    Called,
    Cancelled,
    Finished,
    Happened,
    Wrong,
    frame,
)
from support.http2_calls import (
    ACKNOWLEDGED,
    CALLED,
    MOST,
    OPENING,
    block,
    data,
    opened,
    prefixed,
    said,
    told_by,
)


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_calls_and_messages_come_whole_however_they_are_cut(piece: int) -> None:
    big = bytes(range(256)) * 200
    sent = prefixed(b"first") + prefixed(b"") + prefixed(big)
    cut = [sent[at : at + MAX_FRAME_BYTES] for at in range(0, len(sent), MAX_FRAME_BYTES)]
    stream = OPENING + ACKNOWLEDGED + b"".join(frame(DATA, 0, 1, part) for part in cut)
    stream += frame(DATA, END_STREAM, 1)
    connection, happened = Http2Connection(MOST, MOST), list[Happened]()
    for at in range(0, len(stream), piece):
        for one in connection.feed(stream[at : at + piece]):
            happened.append(one)
            if isinstance(one, Called):
                happened += connection.take()
    assert happened[:4] == [CALLED, b"first", b"", big]
    assert isinstance(happened[4], Finished)
    assert len(happened) == 5


def test_nothing_is_taken_before_the_caller_knows_our_settings() -> None:
    connection = Http2Connection(MOST, MOST)
    assert said(connection) == [(SETTINGS, 0, 0, b"")]
    assert connection.feed(OPENING + data(b"early")) == []
    assert connection.feed(ACKNOWLEDGED + data(b"late")) == [CALLED]
    assert connection.take() == [b"early", b"late"]
    kinds = [(kind, flags, stream) for kind, flags, stream, _ in said(connection)]
    assert (SETTINGS, ACK, 0) in kinds, "its settings were kept, and are acknowledged"


def test_what_another_server_shall_begin_with_is_all_but_the_answer_to_our_settings() -> None:
    connection = Http2Connection(MOST, MOST)
    rest = frame(DATA, 0, 1, b"x" * 9)
    assert connection.feed(OPENING + ACKNOWLEDGED + rest + rest[:5]) == [CALLED]
    assert connection.held() == OPENING + rest + rest[:5]


def test_a_caller_that_says_too_much_before_it_is_known_is_given_up() -> None:
    connection = Http2Connection(MOST, MOST)
    connection.feed(OPENING)
    with pytest.raises(ValueError, match="before a call"):
        for _ in range(HELD_BYTES // 1000 + 1):
            connection.feed(frame(DATA, 0, 1, b"x" * 1000))


def test_headers_may_be_padded_prioritised_and_in_pieces() -> None:
    told = block()
    padded = b"\x03" + b"\0\0\0\0\1" + told[:5] + b"\0\0\0"
    opening = (
        PREFACE
        + frame(HEADERS, PADDED | PRIORITISED, 1, padded)
        + frame(CONTINUATION, 0, 1, told[5:9])
        + frame(CONTINUATION, END_HEADERS, 1, told[9:])
    )
    connection = opened(opening)
    assert connection.feed(frame(DATA, PADDED, 1, b"\x02" + prefixed(b"m") + b"\0\0")) == [b"m"]


def test_a_call_that_ends_with_its_headers_has_no_messages() -> None:
    connection = Http2Connection(MOST, MOST)
    opening = PREFACE + frame(HEADERS, END_HEADERS | END_STREAM, 1, block()) + ACKNOWLEDGED
    assert connection.feed(opening) == [CALLED]
    (ended,) = connection.take()
    assert isinstance(ended, Finished)


def test_one_call_after_another_but_not_two_at_once() -> None:
    encoder = Encoder()
    opening = PREFACE + frame(HEADERS, END_HEADERS, 1, block(encoder=encoder))
    connection = opened(opening)
    second, third = (block(encoder=encoder) for _ in range(2))
    assert connection.feed(frame(HEADERS, END_HEADERS, 3, second)) == []
    assert (RST_STREAM, 0, 3, b"\0\0\0\7") in said(connection)
    assert connection.feed(data(b"of nobody", stream=3)) == []
    (gone,) = connection.feed(frame(RST_STREAM, 0, 1, b"\0\0\0\x08"))
    assert isinstance(gone, Cancelled)
    assert connection.feed(frame(HEADERS, END_HEADERS, 5, third)) == [CALLED]
    assert connection.feed(data(b"old") + data(b"new", stream=5)) == [b"new"]


def test_messages_of_the_server_wait_for_room_and_the_end_waits_for_them() -> None:
    small = frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 8))
    connection = opened(PREFACE + small + frame(HEADERS, END_HEADERS, 1, block()))
    connection.send(b"abc")
    assert connection.is_clear
    connection.send(b"d")
    connection.end(0, "")
    told = said(connection)
    assert [kind for kind, *_ in told] == [HEADERS, DATA]
    assert told_by(told[0][3]) == {":status": "200", "content-type": "application/grpc"}
    assert told[1][3] == prefixed(b"abc")
    assert not connection.is_clear
    connection.feed(frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 6)))
    data_again, trailers, reset = said(connection)
    assert data_again == (DATA, 0, 1, prefixed(b"d"))
    assert trailers[1] & END_STREAM
    assert told_by(trailers[3]) == {"grpc-status": "0"}
    assert reset == (RST_STREAM, 0, 1, b"\0\0\0\0"), "the caller may still have been talking"
    assert not connection.is_open


def test_a_large_message_goes_in_frames_that_every_caller_takes() -> None:
    wide = struct.pack(">HI", INITIAL_WINDOW_SIZE, 1 << 20)
    opening = PREFACE + frame(SETTINGS, 0, 0, wide) + frame(WINDOW_UPDATE, 0, 0, b"\0\x10\0\0")
    connection = opened(opening + frame(HEADERS, END_HEADERS, 1, block()))
    message = bytes(range(256)) * 150
    connection.send(message)
    parts = [payload for kind, _, _, payload in said(connection) if kind == DATA]
    assert max(map(len, parts)) == MAX_FRAME_BYTES
    assert b"".join(parts) == prefixed(message)


def test_a_refusal_says_why_in_plain_characters() -> None:
    connection = opened()
    connection.end(7, "no: 100 % of \u00fc\n" + "x" * 200)
    trailers, _ = said(connection)
    told = told_by(trailers[3])
    assert told[":status"] == "200"
    assert told["grpc-status"] == "7"
    assert told["grpc-message"] == "no: 100 %25 of %C3%BC%0A" + "x" * 200


def test_the_caller_is_granted_as_much_as_was_read_of_it() -> None:
    connection = Http2Connection(1 << 30, 1 << 30)
    connection.feed(OPENING + ACKNOWLEDGED)
    connection.take()
    room = 65535 + sum(
        int.from_bytes(payload, "big")
        for kind, _, stream, payload in said(connection)
        if kind == WINDOW_UPDATE and stream == 0
    )
    assert room >= GRANTED_BYTES
    for _ in range(200):
        connection.feed(frame(DATA, 0, 1, b"\0\0\0\0\0" * 3000))
        room -= 15000
        assert room > 0
        for kind, _, stream, payload in said(connection):
            if kind == WINDOW_UPDATE and stream == 0:
                room += int.from_bytes(payload, "big")


def test_a_message_too_large_or_compressed_is_no_message_and_ends_its_call_only() -> None:
    for head, code in (
        (struct.pack(">BI", 0, MOST + 1), RESOURCE_EXHAUSTED),
        (prefixed(b"z", flag=1), UNIMPLEMENTED),
    ):
        connection = opened()
        (wrong,) = connection.feed(frame(DATA, 0, 1, head))
        assert isinstance(wrong, Wrong)
        assert wrong.code == code
        assert connection.feed(data(b"more")) == []
        connection.end(wrong.code, wrong.why)
        assert not connection.is_open


def test_the_first_message_of_each_call_is_of_somebody_unknown() -> None:
    encoder = Encoder()
    connection = Http2Connection(MOST, 3)
    opening = PREFACE + frame(HEADERS, END_HEADERS, 1, block(encoder=encoder)) + ACKNOWLEDGED
    assert connection.feed(opening) == [CALLED]
    assert connection.take() == []
    assert connection.feed(data(b"abc") + data(b"later")) == [b"abc", b"later"]
    again = frame(HEADERS, END_HEADERS, 3, block(encoder=encoder))
    _, called, wrong = connection.feed(
        frame(RST_STREAM, 0, 1, b"\0\0\0\x08") + again + data(b"abcd", stream=3)
    )
    assert called == CALLED
    assert wrong == Wrong(RESOURCE_EXHAUSTED, "4 bytes in a message, at most 3 are taken")


def test_pings_are_answered_and_ours_need_no_answer() -> None:
    connection = opened()
    connection.feed(frame(PING, 0, 0, b"12345678") + frame(PING, ACK, 0, b"pacekeep"))
    assert said(connection) == [(PING, ACK, 0, b"12345678")]


@pytest.mark.parametrize(
    "wrong",
    [
        b"GET / HTTP/1.1\r\n\r\n" + b" " * 24,
        PREFACE + frame(DATA, 0, 1, b"")[:9].replace(b"\0\0\0", b"\xff\xff\xff", 1),
        PREFACE + frame(HEADERS, END_HEADERS, 2, block()),
        PREFACE + frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"),
        PREFACE + frame(CONTINUATION, END_HEADERS, 1, b""),
        PREFACE + frame(HEADERS, 0, 1, b"") + frame(PING, 0, 0, b"12345678"),
        PREFACE + frame(HEADERS, END_HEADERS | PADDED, 1, b"\x09"),
        PREFACE + frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 0, 1, b"x" * 16000) * 5,
        PREFACE + frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 0, 1, b"") * 65,
        OPENING + frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"),
        OPENING + frame(WINDOW_UPDATE, 0, 0, b"\x7f"),
        OPENING + frame(SETTINGS, 0, 0, b"\0"),
        OPENING + frame(SETTINGS, 0, 0, b"\0\4\xff\xff\xff\xff"),
        OPENING + frame(5, 0, 1, b""),
    ],
)
def test_who_breaks_the_rules_is_given_up(wrong: bytes) -> None:
    connection = Http2Connection(MOST, MOST)
    with pytest.raises(ValueError):
        if connection.feed(wrong + ACKNOWLEDGED):
            connection.take()
