"""A server's side of one HTTP/2 connection with a gRPC call at a time, in bytes. Pure.

What an agent needs and no more, since ten thousand send through it each second: a frame of data is
taken apart in few steps. Header blocks are read by `hpack`. What a caller may not say is a
ValueError, and the end of its connection.
"""

from collections import deque
from dataclasses import dataclass, field
from struct import iter_unpack

from hpack import Decoder, HPACKError

from pacekeeper.controller.ingest.http2.frames import (
    ACK,
    ANSWER,
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
    PREFIX,
    PRIORITISED,
    PUSH_PROMISE,
    PUSHED_BYTES,
    REFUSED_STREAM,
    RESOURCE_EXHAUSTED,
    RST_STREAM,
    SETTINGS,
    UNIMPLEMENTED,
    WINDOW_UPDATE,
    WORD,
    Cancelled,
    Finished,
    Happened,
    Wrong,
    called,
    frame,
    trailers,
    unpadded,
)


@dataclass(slots=True, eq=False)
class Http2Connection:
    """One caller's. `feed` says what happened; `replies` are for the caller, at once.

    Of what is sent `replies` have PUSHED_BYTES at most, and nothing while not `may_push`: a message
    stays one, however many callers it waits for. Until `take` is called nothing after a first call
    is read: see `held`.
    """

    max_message_bytes: int
    max_first_bytes: int  # of the first message of a call
    replies: bytearray = field(default_factory=lambda: bytearray(frame(SETTINGS, 0, 0)))
    is_acknowledged: bool = False  # our settings, by the caller
    may_push: bool = True  # the caller reads
    _is_taken: bool = False
    _is_told: bool = False  # of the first call
    _unread: bytes = b""
    _is_greeted: bool = False
    _held: list[bytes] = field(default_factory=list)  # frames, until it is taken
    _held_bytes: int = 0
    _to_act: list[bytes] = field(default_factory=list)  # of those, what is not the first call's
    _first: list[Happened] = field(default_factory=list)
    _decoder: Decoder = field(default_factory=Decoder)
    _block: tuple[int, int, list[bytes]] | None = None  # of headers that go on: stream, flags
    _stream: int = 0  # of the call; 0: none
    _newest: int = 0
    _is_finished: bool = False  # by the caller
    _is_answered: bool = False  # our headers are sent
    _is_deaf: bool = False  # to the rest of the call
    _most_bytes: int = 0  # that the next message may have
    _parts: list[bytes] = field(default_factory=list)  # of a message
    _parts_bytes: int = 0
    _wanted_bytes: int = 5
    _read_bytes: int = 0  # since the caller was last granted more
    _connection_window: int = DEFAULT_WINDOW_BYTES
    _stream_window: int = DEFAULT_WINDOW_BYTES
    _initial_window: int = DEFAULT_WINDOW_BYTES
    _unsent: deque[memoryview] = field(default_factory=deque)  # of messages, not copied
    _end: tuple[int, str] | None = None

    def feed(self, data: bytes) -> list[Happened]:
        """What happened by these bytes. Raises ValueError."""
        if self._unread:
            data = self._unread + data
        at, size = 0, len(data)
        if not self._is_greeted:
            if not PREFACE.startswith(data[: len(PREFACE)]):
                raise ValueError("this is not HTTP/2")
            if size < len(PREFACE):
                self._unread = data
                return []
            self._is_greeted, at = True, len(PREFACE)
        happened: list[Happened] = []
        while size - at >= 9:
            high, low, kind, flags, stream = HEAD.unpack_from(data, at)
            end = at + 9 + (high << 16 | low)
            if end - at > 9 + MAX_FRAME_BYTES:
                raise ValueError("a frame is too large")
            if end > size:
                break
            if kind == DATA and not flags and self._is_taken:
                self._take_data(stream, data[at + 9 : end], end - at - 9, happened)
            else:
                self._frame(kind, flags, stream & 0x7FFFFFFF, data[at + 9 : end], happened)
            at = end
        self._unread = data[at:]
        return happened

    def take(self) -> list[Happened]:
        """The connection is ours: what came with and after its first call. Raises ValueError."""
        self._is_taken = True
        self._grant(GRANTED_BYTES)
        data = b"".join(self._to_act) + self._unread
        self._unread = b""
        self._held, self._to_act = [], []
        return [*self._first[1:], *self.feed(data)]

    def held(self) -> bytes:
        """All that came but the answer to our settings: what another server may begin with."""
        return PREFACE + b"".join(self._held) + self._unread

    def send(self, message: bytes) -> None:
        """A message of the call, into `replies` as far as the caller has room."""
        if not self._stream:
            return
        first = MAX_FRAME_BYTES - PREFIX.size
        self._unsent.append(memoryview(PREFIX.pack(0, len(message)) + message[:first]))
        if len(message) > first:
            self._unsent.append(memoryview(message)[first:])
        self.push()

    @property
    def is_clear(self) -> bool:
        """All that was sent is in `replies`."""
        return not self._unsent

    @property
    def is_taken(self) -> bool:
        """It is an agent's."""
        return self._is_taken

    @property
    def is_open(self) -> bool:
        """There is a call."""
        return self._stream > 0

    def end(self, code: int, why: str) -> None:
        """The call is over after what was sent."""
        if not self._stream:
            return
        self._end = code, why
        self._is_deaf = True
        self.push()

    def push(self) -> None:
        """What the caller has room for, and the end of the call behind it."""
        if self._unsent and not self._is_answered:
            self._is_answered = True
            self.replies += frame(HEADERS, END_HEADERS, self._stream, ANSWER)
        while self._unsent:
            room = min(self._connection_window, self._stream_window, MAX_FRAME_BYTES)
            if room <= 0 or not self.may_push or len(self.replies) >= PUSHED_BYTES:
                return
            data, rest = self._unsent[0][:room], self._unsent[0][room:]
            if rest:
                self._unsent[0] = rest
            else:
                self._unsent.popleft()
            self._connection_window -= len(data)
            self._stream_window -= len(data)
            self.replies += HEAD.pack(0, len(data), DATA, 0, self._stream)
            self.replies += data
        if self._end is None:
            return
        block = (b"" if self._is_answered else ANSWER) + trailers(*self._end)
        self.replies += frame(HEADERS, END_HEADERS | END_STREAM, self._stream, block)
        if not self._is_finished:
            self.replies += frame(RST_STREAM, 0, self._stream, WORD.pack(0))
        self._forget_call()

    def ping(self) -> None:
        """Ask the caller for a sign of life."""
        self.replies += frame(PING, 0, 0, b"pacekeep")

    def say_goodbye(self) -> None:
        """No more calls by this connection."""
        self.replies += frame(GOAWAY, 0, 0, WORD.pack(self._newest) + WORD.pack(0))

    def _frame(
        self, kind: int, flags: int, stream: int, payload: bytes, happened: list[Happened]
    ) -> None:
        if self._block is not None and kind != CONTINUATION:
            raise ValueError("headers were broken off")
        if kind == SETTINGS and flags & ACK:
            self.is_acknowledged = True
        elif not self._is_taken:
            self._hold(kind, flags, stream, payload)
        else:
            self._act(kind, flags, stream, payload, happened)
        if self._first and self.is_acknowledged and not self._is_told:
            self._is_told = True
            happened.append(self._first[0])

    def _hold(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Only the first call's headers are looked at, and kept unread for whoever takes it."""
        self._held.append(frame(kind, flags, stream, payload))
        self._held_bytes += len(payload) + 9
        if self._held_bytes > HELD_BYTES:
            raise ValueError("too much came before a call")
        if kind in (HEADERS, CONTINUATION) and not self._newest:
            self._take_headers(kind, flags, stream, payload, self._first)
        else:
            self._to_act.append(self._held[-1])

    def _act(
        self, kind: int, flags: int, stream: int, payload: bytes, happened: list[Happened]
    ) -> None:
        if kind == DATA:
            size = len(payload)
            if flags & PADDED:
                payload = unpadded(payload)
            self._take_data(stream, payload, size, happened)
            if flags & END_STREAM:
                self._finish(stream, happened)
        elif kind in (HEADERS, CONTINUATION):
            self._take_headers(kind, flags, stream, payload, happened)
        elif kind == RST_STREAM:
            if stream == self._stream and stream:
                self._forget_call()
                happened.append(Cancelled())
        elif kind == SETTINGS:
            self._set(payload)
        elif kind == PUSH_PROMISE:
            raise ValueError("a client promises nothing")
        elif kind == PING and not flags & ACK:
            self.replies += frame(PING, ACK, 0, payload[:8])
        elif kind == WINDOW_UPDATE:
            self._widen(stream, payload)

    def _take_data(self, stream: int, payload: bytes, size: int, happened: list[Happened]) -> None:
        self._read_bytes += size
        if self._read_bytes > GRANTED_BYTES // 2:
            self._grant(self._read_bytes)
            self._read_bytes = 0
        if stream != self._stream or self._is_deaf:
            return  # of a call that is over
        if self._parts:
            self._parts.append(payload)
            self._parts_bytes += len(payload)
            if self._parts_bytes < self._wanted_bytes:
                return
            payload = b"".join(self._parts)
            self._parts.clear()
        at, end, wanted = 0, len(payload), 5
        while end - at >= 5:
            is_packed, length = PREFIX.unpack_from(payload, at)
            if is_packed or length > self._most_bytes:
                self._is_deaf = True
                most = f"{length} bytes in a message, at most {self._most_bytes} are taken"
                happened.append(
                    Wrong(UNIMPLEMENTED, "messages may not be compressed")
                    if is_packed
                    else Wrong(RESOURCE_EXHAUSTED, most)
                )
                return
            if end - at - 5 < length:
                wanted = 5 + length
                break
            self._most_bytes = self.max_message_bytes
            happened.append(payload[at + 5 : at + 5 + length])
            at += 5 + length
        if at < end:
            self._parts.append(payload[at:])
            self._parts_bytes, self._wanted_bytes = end - at, wanted

    def _take_headers(
        self, kind: int, flags: int, stream: int, payload: bytes, happened: list[Happened]
    ) -> None:
        if kind == HEADERS:
            if flags & PADDED:
                payload = unpadded(payload)
            if flags & PRIORITISED:
                payload = payload[5:]
            self._block = stream, flags, []
        if self._block is None or self._block[0] != stream or not stream & 1:
            raise ValueError("headers of no call")
        _, first_flags, parts = self._block
        parts.append(payload)
        if sum(map(len, parts)) > MAX_HEADER_BYTES or len(parts) > 64:
            raise ValueError("headers are too large")
        if not flags & END_HEADERS:
            return
        self._block = None
        try:
            headers = self._decoder.decode(b"".join(parts), raw=True)
        except HPACKError as error:
            raise ValueError(f"headers that can not be read: {error!r}") from None
        if stream > self._newest:
            self._newest = stream
            if self._stream:
                self.replies += frame(RST_STREAM, 0, stream, WORD.pack(REFUSED_STREAM))
                return
            self._begin_call(stream)
            happened.append(called(headers))
        if first_flags & END_STREAM:
            self._finish(stream, happened)

    def _begin_call(self, stream: int) -> None:
        self._stream, self._stream_window = stream, self._initial_window
        self._most_bytes = self.max_first_bytes
        if self._is_taken:
            self._grant_stream(GRANTED_BYTES)

    def _forget_call(self) -> None:
        self._stream, self._end = 0, None
        self._is_finished = self._is_answered = self._is_deaf = False
        self._parts.clear()
        self._unsent.clear()

    def _finish(self, stream: int, happened: list[Happened]) -> None:
        if stream == self._stream and not self._is_finished:
            self._is_finished = True
            happened.append(Finished())

    def _set(self, payload: bytes) -> None:
        if len(payload) % 6:
            raise ValueError("settings of an odd size")
        for number, value in iter_unpack(">HI", payload):
            if number == INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW_BYTES:
                    raise ValueError("an impossible window")
                self._stream_window += value - self._initial_window
                self._initial_window = value
        self.replies += frame(SETTINGS, ACK, 0)
        self.push()

    def _widen(self, stream: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ValueError("a window of an odd size")
        more = WORD.unpack(payload)[0] & MAX_WINDOW_BYTES
        if not stream:
            self._connection_window += more
        elif stream == self._stream:
            self._stream_window += more
        if max(self._connection_window, self._stream_window) > MAX_WINDOW_BYTES:
            raise ValueError("an impossible window")
        self.push()

    def _grant(self, size: int) -> None:
        self.replies += frame(WINDOW_UPDATE, 0, 0, WORD.pack(size))
        self._grant_stream(size)

    def _grant_stream(self, size: int) -> None:
        if self._stream and not self._is_finished:
            self.replies += frame(WINDOW_UPDATE, 0, self._stream, WORD.pack(size))
