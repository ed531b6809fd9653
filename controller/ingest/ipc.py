"""Frames between the controller and its ingest process, which ends agents' streams. Pure.

A frame is a kind, the number of a stream, another number and bytes. Both ends are of one version:
an invalid frame is a programming error, raised as ValueError, and the connection ends.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from struct import Struct, error, iter_unpack
from typing import Any

Frame = tuple[int, int, int, bytes]
"""Kind, stream, number, bytes."""

# To the controller. Of a stream there is one OPENED, then reports, then one CLOSED.
LISTENS = 1  # number: the port; 0: it cannot listen, and the bytes give the reason
OPENED = 2  # the bytes: identity of the caller, and its first message
REPORT = 3  # number: its sequence; the bytes are those of the AttachRequest
FINISHED = 4  # the agent will send no more
MALFORMED = 5  # a message that is no report; the bytes give the reason
CLOSED = 6
ALIVE = 8
# To the ingest process.
SERVE = 16  # the bytes: how
SEND = 17  # to many streams at once; number: until when, in ms of CLOCK_MONOTONIC; 0: it may wait
ACKNOWLEDGE = 18  # many streams at once
END = 19  # number: the status code; the bytes: the reason
PING = 20
DRAIN = 21  # end all, then the process

_KINDS = frozenset((*range(LISTENS, ALIVE + 1), *range(SERVE, DRAIN + 1)))
_HEADER = Struct("<BIQI")
_ACKED = Struct("<IQ")
_TERM = Struct("<QQ")
_KEY = Struct("<H")
_COUNT = Struct("<I")


def frame(kind: int, stream: int = 0, number: int = 0, data: bytes = b"") -> bytes:
    """One frame."""
    return _HEADER.pack(kind, stream, number, len(data)) + data


class Frames:
    """Splits a byte stream into frames."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of one frame."""
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []  # of what is no whole frame yet
        self._num_bytes = 0
        self._wanted_bytes = _HEADER.size  # until then there is none

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now. Raises ValueError for anything else."""
        self._parts.append(data)
        self._num_bytes += len(data)
        frames: list[Frame] = []
        if self._num_bytes < self._wanted_bytes:
            return frames  # joined once: a large frame comes in hundreds of pieces
        data = b"".join(self._parts)
        at, size = 0, _HEADER.size
        wanted = size
        while len(data) - at >= size:
            kind, stream, number, length = _HEADER.unpack_from(data, at)
            if kind not in _KINDS or length > self._max_bytes:
                raise ValueError(f"no frame: kind {kind}, {length} bytes")
            if len(data) - at - size < length:
                wanted = size + length
                break
            at += size
            frames.append((kind, stream, number, data[at : at + length]))
            at += length
        self._parts, self._num_bytes = [data[at:]], len(data) - at
        self._wanted_bytes = wanted
        return frames


def join_header(head: bytes, data: bytes) -> bytes:
    """A short header and data as one value."""
    return _KEY.pack(len(head)) + head + data


def split_header(data: bytes) -> tuple[bytes, bytes]:
    """The two parts of `join_header`. Raises ValueError."""
    try:
        (length,) = _KEY.unpack_from(data)
    except error as trouble:
        raise ValueError("a frame ends before its head") from trouble
    end = _KEY.size + length
    if end > len(data):
        raise ValueError("a frame ends in its head")
    return data[_KEY.size : end], data[end:]


def encode_acknowledge(term: int, until_ms: int, pairs: Sequence[tuple[int, int]]) -> bytes:
    """One frame with (stream, number up to which all reports are stored) of each stream."""
    data = _TERM.pack(term, until_ms) + b"".join(_ACKED.pack(*pair) for pair in pairs)
    return frame(ACKNOWLEDGE, data=data)


def decode_acknowledge(data: bytes) -> tuple[int, int, Iterable[tuple[int, int]]]:
    """Term, time limit, and (stream, number) pairs. Raises ValueError."""
    try:
        term, until_ms = _TERM.unpack_from(data)
        return term, until_ms, iter_unpack(_ACKED.format, data[_TERM.size :])
    except error as trouble:
        raise ValueError("not a list of acknowledgements") from trouble


def encode_send(streams: Sequence[int], until_ms: int, key: bytes, message: bytes) -> bytes:
    """One frame for many streams; a newer message of a key replaces one that waits."""
    head = struct.pack(f"<{1 + len(streams)}I", len(streams), *streams)
    return frame(SEND, number=until_ms, data=head + join_header(key, message))


def decode_send(data: bytes) -> tuple[Sequence[int], bytes, bytes]:
    """The streams of a SEND frame, its key and its message. Raises ValueError."""
    try:
        (count,) = _COUNT.unpack_from(data)
        streams = struct.unpack_from(f"<{count}I", data, _COUNT.size)
    except error as trouble:
        raise ValueError("a frame ends before its streams") from trouble
    return streams, *split_header(data[_COUNT.size * (1 + count) :])


def serve(settings: Mapping[str, Any]) -> bytes:
    """The first frame to an ingest process: its settings."""
    return frame(SERVE, data=json.dumps(settings).encode())
