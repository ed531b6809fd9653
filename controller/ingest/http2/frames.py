"""Frames of HTTP/2 and headers of gRPC, as a server reads and writes them. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    *(0, 1, 3, 4, 5, 6, 7, 8),
    9,
)
ACK = END_STREAM = 0x1
END_HEADERS, PADDED, PRIORITISED = 0x4, 0x8, 0x20
REFUSED_STREAM = 7
INITIAL_WINDOW_SIZE = 4  # the setting's number
MAX_FRAME_BYTES = 16384  # of either side: nobody is told of more
MAX_HEADER_BYTES = 65536
MAX_WINDOW_BYTES = (1 << 31) - 1
DEFAULT_WINDOW_BYTES = 65535
GRANTED_BYTES = 1 << 20  # a caller may send so much more than was read of it
PUSHED_BYTES = 1 << 16  # of messages, that are copied for a caller before it has read some
HELD_BYTES = 1 << 18  # before it is known whose connection it is
MOST_OF_A_REASON = 4096
UNIMPLEMENTED, RESOURCE_EXHAUSTED = 12, 8
HEAD = Struct(">BHBBI")
PREFIX = Struct(">BI")
WORD = Struct(">I")
# Indexed ":status: 200", and "content-type" (31) without indexing.
ANSWER = b"\x88\x0f\x10\x10application/grpc"


@dataclass(frozen=True, slots=True)
class Called:
    """A call began."""

    path: str
    authorization: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wrong:
    """What came belongs to no call of ours: the call is to be ended with this."""

    code: int
    why: str


class Finished:
    """The caller will say no more in this call."""


class Cancelled:
    """The caller gave its call up."""


Happened = bytes | Called | Wrong | Finished | Cancelled
"""Bytes are a whole message."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    size = len(payload)
    return HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def called(headers: Iterable[tuple[bytes, bytes]]) -> Called:
    """What the headers of a call say."""
    path, authorization = "", list[str]()
    for name, value in headers:
        if name == b":path":
            path = value.decode("latin-1")
        elif name == b"authorization":
            authorization.append(value.decode("latin-1"))
    return Called(path, tuple(authorization))


def unpadded(payload: bytes) -> bytes:
    """A padded frame's payload. Raises ValueError."""
    if not payload or payload[0] >= len(payload):
        raise ValueError("more padding than there is")
    return payload[1 : len(payload) - payload[0]]


def trailers(code: int, why: str) -> bytes:
    """How a call ended, as a block of headers."""
    block = _literal(b"grpc-status", str(code).encode())
    plain = (chr(c) if 0x20 <= c < 0x7F and c != 0x25 else f"%{c:02X}" for c in why.encode())
    told = "".join(plain)[:MOST_OF_A_REASON].encode("ascii")
    return block + _literal(b"grpc-message", told) if told else block


def _literal(name: bytes, value: bytes) -> bytes:
    """A header that no table remembers."""
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(value: int) -> bytes:
    """As HPACK writes it, with seven bits in the first byte."""
    if value < 127:
        return bytes((value,))
    out, value = bytearray((127,)), value - 127
    while value >= 128:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))
