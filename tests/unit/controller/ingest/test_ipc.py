"""Frames between the controller and its ingest process: torn, garbled, whole."""

import pytest

from pacekeeper.controller.api.auth.peer_identity import PeerIdentity, decode_peer_identity
from pacekeeper.controller.ingest import ipc
from pacekeeper.controller.ingest.ipc import Frames, frame, join_header, split_header

TOLD = [
    (ipc.OPENED, 1, 0, b"who"),
    (ipc.REPORT, 1, 1 << 63, b"x" * 5000),
    (ipc.CLOSED, 0xFFFFFFFF, 0, b""),
]
BYTES = b"".join(frame(*one) for one in TOLD)


@pytest.mark.parametrize("size", [1, 7, 16, 17, 18, 4096, len(BYTES)])
def test_frames_that_come_in_pieces_are_whole_and_in_order(size: int) -> None:
    frames = Frames(max_bytes=5000)
    heard = []
    for start in range(0, len(BYTES), size):
        heard += frames.feed(BYTES[start : start + size])
    assert heard == TOLD


def test_a_torn_frame_is_never_heard() -> None:
    assert Frames(max_bytes=5000).feed(BYTES[:-1]) == TOLD[:-1]


@pytest.mark.parametrize(
    "garbage",
    [b"\x00" * 17, b"GET / HTTP/1.1\r\n\r\n", frame(99), frame(ipc.REPORT)[:-4] + b"\xff" * 4],
)
def test_garbage_ends_the_line_at_once(garbage: bytes) -> None:
    with pytest.raises(ValueError, match="no frame"):
        Frames(max_bytes=5000).feed(garbage)


def test_a_frame_is_refused_by_its_length_before_it_is_there() -> None:
    too_long = frame(ipc.REPORT, 1, 1, b"x" * 5001)
    with pytest.raises(ValueError, match="5001 bytes"):
        Frames(max_bytes=5000).feed(too_long[:17])


def test_what_is_said_to_many_is_one_frame() -> None:
    ((kind, _, until_ms, data),) = Frames(5000).feed(
        ipc.encode_send([1, 0xFFFFFFFF], 9, b"key", b"what")
    )
    assert (kind, until_ms) == (ipc.SEND, 9)
    assert ipc.decode_send(data) == ((1, 0xFFFFFFFF), b"key", b"what")
    for length in range(len(data) - len(b"what")):
        with pytest.raises(ValueError, match="a frame ends"):
            ipc.decode_send(data[:length])


def test_who_calls_comes_back_as_it_was_shown() -> None:
    shown = PeerIdentity(
        peer="ipv4:192.0.2.1:5",
        authorization=("Bearer x",),
        has_certificate=True,
        uris=("spiffe://pacekeeper/node/a",),
        names=("a.example",),
    )
    assert decode_peer_identity(shown.to_bytes()) == shown


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", b"null"])
def test_who_calls_can_not_be_made_of_anything(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_peer_identity(data)


def test_two_parts_come_apart_as_they_were() -> None:
    assert split_header(join_header(b"a/plan", b"rest")) == (b"a/plan", b"rest")
    for torn in (b"", b"\x01", b"\x05\x00four"):
        with pytest.raises(ValueError, match="ends"):
            split_header(torn)


def test_acknowledgements_of_many_streams_are_one_frame() -> None:
    pairs = [(1, 5), (2, 1 << 63)]
    ((kind, _, _, data),) = Frames(max_bytes=5000).feed(ipc.encode_acknowledge(3, 77, pairs))
    term, until_ms, heard = ipc.decode_acknowledge(data)
    assert (kind, term, until_ms, list(heard)) == (ipc.ACKNOWLEDGE, 3, 77, pairs)
    for torn in (data[:10], data[:-1]):
        with pytest.raises(ValueError, match="acknowledgements"):
            ipc.decode_acknowledge(torn)
