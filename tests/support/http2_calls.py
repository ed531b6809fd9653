"""A caller of an HTTP/2 server in bytes, and what that answers."""

import struct

from hpack import Decoder, Encoder

from pacekeeper.controller.ingest.http2.connection import Http2Connection
from pacekeeper.controller.ingest.http2.frames import (
    ACK,
    DATA,
    END_HEADERS,
    HEADERS,
    PREFACE,
    SETTINGS,
    Called,
    frame,
)

MOST = 100_000
ACKNOWLEDGED = frame(SETTINGS, ACK, 0)
CALLED = Called("/a.B/C", ("Bearer x",))


def block(path: str = "/a.B/C", encoder: Encoder | None = None) -> bytes:
    told = [(":path", path), (":method", "POST"), ("authorization", "Bearer x")]
    return (encoder or Encoder()).encode(told)


def prefixed(message: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(message)) + message


def data(message: bytes, flags: int = 0, stream: int = 1) -> bytes:
    return frame(DATA, flags, stream, prefixed(message))


OPENING = PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, block())


def told_by(headers: bytes) -> dict[str, str]:
    decoded = Decoder().decode(headers, raw=True)
    return {name.decode(): value.decode() for name, value in decoded}


def frames_in(replies: bytes) -> list[tuple[int, int, int, bytes]]:
    found, at = [], 0
    while at < len(replies):
        size = int.from_bytes(replies[at : at + 3], "big")
        kind, flags = replies[at + 3], replies[at + 4]
        stream = int.from_bytes(replies[at + 5 : at + 9], "big")
        found.append((kind, flags, stream, replies[at + 9 : at + 9 + size]))
        at += 9 + size
    return found


def said(connection: Http2Connection) -> list[tuple[int, int, int, bytes]]:
    replies = bytes(connection.replies)
    connection.replies.clear()
    return frames_in(replies)


def opened(opening: bytes = OPENING) -> Http2Connection:
    """A connection whose first call was taken."""
    connection = Http2Connection(MOST, MOST)
    assert connection.feed(opening + ACKNOWLEDGED) == [CALLED]
    assert connection.take() == []
    said(connection)
    return connection
