"""Frames as the standard has them, and bounds that hold while they come."""

import pytest

from pacekeeper.controller.ingest.http2.connection import Http2Connection
from pacekeeper.controller.ingest.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW_BYTES,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    GRANTED_BYTES,
    HEAD,
    HEADERS,
    HELD_BYTES,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    MAX_WINDOW_BYTES,
    PADDED,
    PING,
    PREFACE,
    PRIORITISED,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RESOURCE_EXHAUSTED,
    RST_STREAM,
    SETTINGS,
    UNIMPLEMENTED,
    WINDOW_UPDATE,
    frame,
)
from support.http2_calls import (
    MOST,
    block,
    opened,
    said,
    told_by,
)


def test_numbers_are_those_of_the_standard() -> None:
    """RFC 9113 (frames, flags, settings, sizes) and gRPC's codes: both ends use ours in tests."""
    kinds = (DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE)
    assert (*kinds, CONTINUATION) == (0, 1, 3, 4, 5, 6, 7, 8, 9)
    assert (ACK, END_STREAM, END_HEADERS, PADDED, PRIORITISED) == (1, 1, 4, 8, 0x20)
    assert PREFACE == b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    assert (INITIAL_WINDOW_SIZE, MAX_FRAME_BYTES, DEFAULT_WINDOW_BYTES) == (4, 16384, 65535)
    assert (REFUSED_STREAM, MAX_WINDOW_BYTES) == (7, 2**31 - 1)
    assert (UNIMPLEMENTED, RESOURCE_EXHAUSTED) == (12, 8)
    assert frame(DATA, 5, 3, bytes(70_000))[:9] == b"\x01\x11\x70\0\5\0\0\0\3"
    # What a caller may make us hold: as docs/adr/0061 says.
    assert (MAX_HEADER_BYTES, GRANTED_BYTES, HELD_BYTES) == (64 << 10, 1 << 20, 256 << 10)


@pytest.mark.parametrize("length", [0, 126, 127, 128, 254, 255, 256, 300, 4096, 5000])
def test_a_reason_of_any_length_is_told_up_to_4096_characters(length: int) -> None:
    connection = opened()
    connection.end(7, "x" * length)
    told = told_by(said(connection)[0][3])
    assert told.get("grpc-message", "") == "x" * min(length, 4096)
    connection = opened()
    connection.end(7, "\x1f \x7e\x7f%")
    assert told_by(said(connection)[0][3])["grpc-message"] == "%1F ~%7F%25"


@pytest.mark.parametrize("payload", [b"", b"\x01", b"\x02\0"])
def test_no_more_padding_than_there_is(payload: bytes) -> None:
    with pytest.raises(ValueError, match="padding"):
        opened().feed(frame(DATA, PADDED, 1, payload))


def test_another_protocol_is_known_by_its_first_bytes() -> None:
    with pytest.raises(ValueError, match="not HTTP/2"):
        Http2Connection(MOST, MOST).feed(b"GET /")


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES + 1, 1 << 16])
def test_a_frame_larger_than_anybody_was_told_of_is_refused_by_its_head(size: int) -> None:
    with pytest.raises(ValueError, match="too large"):
        opened().feed(HEAD.pack(size >> 16, size & 0xFFFF, DATA, 0, 1))


@pytest.mark.parametrize(
    "parts",
    [
        [b"x" * 16000] * 5,
        [b"x"] * 65,
    ],
)
def test_headers_are_bounded_while_they_come(parts: list[bytes]) -> None:
    connection = opened()
    first, *rest = (frame(CONTINUATION, 0, 3, part) for part in parts)
    connection.feed(frame(HEADERS, 0, 3, b""))
    with pytest.raises(ValueError, match="headers are too large"):
        connection.feed(b"".join([first, *rest]))


def test_headers_go_on_in_their_own_stream_only() -> None:
    connection = opened()
    connection.feed(frame(HEADERS, 0, 3, b""))
    with pytest.raises(ValueError, match="headers of no call"):
        connection.feed(frame(CONTINUATION, END_HEADERS, 5, block()))
