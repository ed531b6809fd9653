"""One gRPC stream on a connection of its own, in bytes: what a client says and hears. Pure.

As little of HTTP/2 as a well-behaved client needs: header blocks are sent without compression and
never read, so that ten thousand connections cost a load generator little. No library to build on.
"""

import struct
from collections import deque
from dataclasses import dataclass, field

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 0x1
END_HEADERS, PADDED = 0x4, 0x8
INITIAL_WINDOW_SIZE = 4  # the setting's number
MAX_FRAME_BYTES = 16384  # what every peer takes
DEFAULT_WINDOW_BYTES = 65535
LARGEST_WINDOW_BYTES = (1 << 31) - 1
STREAM = 1


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload) << 8 | kind) + struct.pack(">BI", flags, stream) + payload


def _text(value: str) -> bytes:
    data = value.encode("ascii")
    assert len(data) < 127, "its length fits one byte"
    return bytes([len(data)]) + data


def opening(method: str, authority: str) -> bytes:
    """What a client begins with: preface, settings, a wide window, and the call's headers."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": authority,
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b"".join(b"\x00" + _text(name) + _text(value) for name, value in headers.items())
    settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, LARGEST_WINDOW_BYTES)
    wider = struct.pack(">I", LARGEST_WINDOW_BYTES - DEFAULT_WINDOW_BYTES)
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(SETTINGS, 0, 0, settings)
        + frame(WINDOW_UPDATE, 0, 0, wider)
        + frame(HEADERS, END_HEADERS, STREAM, block)
    )


@dataclass(slots=True, eq=False, kw_only=True)
class Stream:
    """The client's side. What `take` and `send` return is to be written to the socket."""

    is_over: bool = False  # the server ended the call, or the connection
    _unread: bytes = b""
    _message: bytes = b""  # of the answers, as far as it is there
    _connection_window: int = DEFAULT_WINDOW_BYTES
    _stream_window: int = DEFAULT_WINDOW_BYTES
    _initial_window: int = DEFAULT_WINDOW_BYTES
    _waiting: deque[bytes] = field(default_factory=deque)  # frames of data, in order

    def send(self, message: bytes) -> bytes:
        """One message, as far as the server's windows let it go; the rest goes with `take`."""
        data = b"\x00" + struct.pack(">I", len(message)) + message
        for start in range(0, len(data), MAX_FRAME_BYTES):
            self._waiting.append(data[start : start + MAX_FRAME_BYTES])
        return self._flush()

    def take(self, data: bytes) -> tuple[list[bytes], bytes]:
        """(whole messages of the server, what must be said at once) of bytes that came in."""
        data = self._unread + data
        at, answers = 0, []
        while len(data) - at >= 9:
            length = int.from_bytes(data[at : at + 3], "big")
            if len(data) - at < 9 + length:
                break
            kind, flags = data[at + 3], data[at + 4]
            stream = int.from_bytes(data[at + 5 : at + 9], "big")
            answers.append(self._frame(kind, flags, stream, data[at + 9 : at + 9 + length]))
            at += 9 + length
        self._unread = data[at:]
        messages = []
        while len(self._message) >= 5:
            end = 5 + int.from_bytes(self._message[1:5], "big")
            if len(self._message) < end:
                break
            messages.append(self._message[5:end])
            self._message = self._message[end:]
        return messages, b"".join(answers) + self._flush()

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        """What one frame changes; what it is answered with."""
        if kind == DATA:
            assert not flags & PADDED, "gRPC pads nothing"
            self._message += payload
        elif kind == SETTINGS and not flags & ACK:
            for number, value in struct.iter_unpack(">HI", payload):
                if number == INITIAL_WINDOW_SIZE:
                    self._stream_window += value - self._initial_window
                    self._initial_window = value
            return frame(SETTINGS, ACK, 0)
        elif kind == PING and not flags & ACK:
            return frame(PING, ACK, 0, payload)
        elif kind == WINDOW_UPDATE:
            if stream == STREAM:
                self._stream_window += int.from_bytes(payload, "big")
            else:
                self._connection_window += int.from_bytes(payload, "big")
        if kind in (RST_STREAM, GOAWAY) or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self.is_over = True
        return b""

    def _flush(self) -> bytes:
        out = []
        while self._waiting:
            size = len(self._waiting[0])
            if size > min(self._connection_window, self._stream_window):
                break
            self._connection_window -= size
            self._stream_window -= size
            out.append(frame(DATA, 0, STREAM, self._waiting.popleft()))
        return b"".join(out)
