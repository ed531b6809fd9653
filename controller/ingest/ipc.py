"""Frames between the controller and its ingest process, which ends agents' streams. Pure.

A frame is a kind, the number of a stream, another number and bytes. Both ends are ours and started
together: what does not fit is a mistake, and the line is given up with a ValueError.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from struct import Struct, error, iter_unpack
from typing import Any

Frame = tuple[int, int, int, bytes]
"""Kind, stream, number, bytes."""

# To the controller. Of a stream there is one OPENED, then reports, then one CLOSED.
LISTENS = 1  # number: the port; 0: it can not, and the bytes say why
OPENED = 2  # the bytes: who called, and what was said first
REPORT = 3  # number: its sequence; the bytes are those of the AttachRequest
FINISHED = 4  # the agent will send no more
MALFORMED = 5  # what came is no report, and why
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
    """Bytes in, whole frames out."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of one frame."""
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []  # of what is no whole frame yet
        self._num_bytes = 0
        self._wanted_bytes = _HEADER.size  # until then there is none

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are whole by now. Raises ValueError for what is none."""
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
    """Two parts as one: a short one, and the rest."""
    return _KEY.pack(len(head)) + head + data


def split_header(data: bytes) -> tuple[bytes, bytes]:
    """The two parts of `with_head`. Raises ValueError."""
    try:
        (length,) = _KEY.unpack_from(data)
    except error as trouble:
        raise ValueError("a frame ends before its head") from trouble
    end = _KEY.size + length
    if end > len(data):
        raise ValueError("a frame ends in its head")
    return data[_KEY.size : end], data[end:]


def encode_acknowledge(term: int, until_ms: int, pairs: Sequence[tuple[int, int]]) -> bytes:
    """One frame: of each stream the number up to which all is stored."""
    data = _TERM.pack(term, until_ms) + b"".join(_ACKED.pack(*pair) for pair in pairs)
    return frame(ACKNOWLEDGE, data=data)


def decode_acknowledge(data: bytes) -> tuple[int, int, Iterable[tuple[int, int]]]:
    """Term, until when, and (stream, number) of each. Raises ValueError."""
    try:
        term, until_ms = _TERM.unpack_from(data)
        return term, until_ms, iter_unpack(_ACKED.format, data[_TERM.size :])
    except error as trouble:
        raise ValueError("not a list of acknowledgements") from trouble


def encode_send(streams: Sequence[int], until_ms: int, key: bytes, message: bytes) -> bytes:
    """One frame, however many hear it; of what waits for a stream the newest of a key counts."""
    head = struct.pack(f"<{1 + len(streams)}I", len(streams), *streams)
    return frame(SEND, number=until_ms, data=head + join_header(key, message))


def decode_send(data: bytes) -> tuple[Sequence[int], bytes, bytes]:
    """Which streams hear it, its key and the message. Raises ValueError."""
    try:
        (count,) = _COUNT.unpack_from(data)
        streams = struct.unpack_from(f"<{count}I", data, _COUNT.size)
    except error as trouble:
        raise ValueError("a frame ends before its streams") from trouble
    return streams, *split_header(data[_COUNT.size * (1 + count) :])


def serve(settings: Mapping[str, Any]) -> bytes:
    """The first frame to an ingest process: how it shall serve."""
    return frame(SERVE, data=json.dumps(settings).encode())
