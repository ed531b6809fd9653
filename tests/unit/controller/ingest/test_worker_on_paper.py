"""The front between its lanes and the line: numbers, order, limits, and what is no report."""

import asyncio
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.controller.api.auth.peer_identity import PeerIdentity
from pacekeeper.controller.api.auth.rate_limit import Limit
from pacekeeper.controller.ingest import ipc, worker
from pacekeeper.controller.ingest.http2.proxy import SocketProxy
from pacekeeper.controller.ingest.ipc import Frame, Frames
from pacekeeper.controller.ingest.worker import (
    UNSENT_BYTES,
    ControllerLink,
    IngestWorker,
    sequence_of,
)
from pacekeeper.core.errors import HostError
from pacekeeper.protos import control_pb2, telemetry_pb2

SHOWN = PeerIdentity(peer="ipv4:127.0.0.1:7", authorization=("Bearer x",))


def report(sequence: int, more: str = "") -> bytes:
    health = telemetry_pb2.AgentHealth(nvml=more)
    one = telemetry_pb2.NodeReport(sequence=sequence, health=health)
    return bytes(control_pb2.AttachRequest(report=one).SerializeToString())


@dataclass(eq=False)
class Lane:
    """Notes what it is told."""

    number: int = 0
    bucket: Any = None
    is_deaf: bool = False
    told: list[tuple[bytes, bytes, int]] = field(default_factory=list)
    ended: list[tuple[int, str]] = field(default_factory=list)
    num_go_on: int = 0

    def shown(self) -> PeerIdentity:
        return SHOWN

    def tell(self, key: bytes, message: bytes, until_ms: int) -> None:
        self.told.append((key, message, until_ms))

    def end(self, code: int, why: str) -> None:
        self.ended.append((code, why))

    def go_on(self) -> None:
        self.num_go_on += 1


@dataclass
class Out:
    """The line, as what was put on it."""

    said: list[Frame] = field(default_factory=list)
    is_full: bool = False
    has_room: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, kind: int, stream: int = 0, number: int = 0, data: bytes = b"") -> None:
        self.said.append((kind, stream, number, data))

    async def ready(self) -> None:
        await self.has_room.wait()


def fronted(per_s: float = 1e9, at_once: int = 1 << 30) -> tuple[IngestWorker, Out]:
    out: Any = Out()
    return IngestWorker(out, reports=Limit(per_s=per_s, at_once=at_once)), out


def opened(one: IngestWorker) -> Any:
    lane: Any = Lane()
    one.opened(lane, b"hello")
    return lane


def test_streams_are_numbered_from_one_and_begin_with_who_calls() -> None:
    one, out = fronted()
    first, second = opened(one), opened(one)
    assert (first.number, second.number) == (1, 2)
    assert out.said[1] == (ipc.OPENED, 2, 0, ipc.join_header(SHOWN.to_bytes(), b"hello"))
    one._newest = 0xFFFFFFFF
    assert opened(one).number == 1, "0 is no stream"


def test_a_report_is_handed_on_with_its_number_and_as_it_came() -> None:
    one, out = fronted()
    lane = opened(one)
    assert one.reported(lane, report(7)) == 0.0
    one.finished(lane)
    one.closed(lane)
    assert out.said[1:] == [
        (ipc.REPORT, 1, 7, report(7)),
        (ipc.FINISHED, 1, 0, b""),
        (ipc.CLOSED, 1, 0, b""),
    ]


def test_a_large_report_counts_as_many() -> None:
    one, _ = fronted(per_s=1.0, at_once=20)
    lane = opened(one)
    assert one.reported(lane, report(1, "x" * 1000)) == 0.0
    waits_s = one.reported(lane, report(2, "x" * (1 << 20)))
    assert waits_s is not None
    assert waits_s > 10.0


def test_what_is_no_report_is_told_and_its_stream_is_heard_no_more() -> None:
    one, out = fronted()
    lane = opened(one)
    hello = control_pb2.AttachRequest(hello=control_pb2.Hello()).SerializeToString()
    for wrong, why in (
        (b"\xff\xff", "no message"),
        (hello, "expected a report"),
        (b"", "expected"),
    ):
        lane.is_deaf = False
        assert one.reported(lane, wrong) == 0.0
        kind, number, _, words = out.said[-1]
        assert (kind, number, lane.is_deaf) == (ipc.MALFORMED, 1, True)
        assert why.encode() in words
        with pytest.raises(ValueError, match=why):
            sequence_of(wrong)


def test_while_the_line_is_full_nobody_is_read_and_then_all_that_wait() -> None:
    async def scene() -> None:
        one, out = fronted()
        lanes = [opened(one) for _ in range(3)]
        out.is_full = True
        for lane in lanes[:2]:
            assert one.reported(lane, report(1)) is None
        await asyncio.sleep(0)
        assert [lane.num_go_on for lane in lanes] == [0, 0, 0]
        out.has_room.set()
        await asyncio.sleep(0.001)
        assert [lane.num_go_on for lane in lanes] == [1, 1, 0]
        out.has_room.clear()
        assert one.reported(lanes[2], report(1)) is None, "full again"
        out.has_room.set()
        await asyncio.sleep(0.001)
        assert [lane.num_go_on for lane in lanes] == [1, 1, 1]
        assert [kind for kind, *_ in out.said].count(ipc.REPORT) == 3, "nothing is left out"

    asyncio.run(scene())


def said_to(one: IngestWorker, frame: bytes) -> None:
    for kind, number, value, data in Frames(1 << 20).feed(frame):
        one.handle_frame(kind, number, value, data)


def test_what_the_controller_says_reaches_the_streams_that_are_there() -> None:
    one, out = fronted()
    lanes = [opened(one) for _ in range(3)]
    one.closed(lanes[1])
    said_to(one, ipc.encode_send([1, 2, 3, 9], 77, b"plan", b"a plan"))
    said_to(one, ipc.encode_acknowledge(5, 88, [(1, 10), (2, 11), (9, 12)]))
    said_to(one, ipc.frame(ipc.END, 3, 16, b"nobody"))
    said_to(one, ipc.frame(ipc.END, 2, 16, b"gone"))
    said_to(one, ipc.frame(ipc.PING))
    message = control_pb2.AttachResponse(
        acknowledge=control_pb2.Acknowledge(sequence=10), term=5
    ).SerializeToString()
    assert lanes[0].told == [(b"plan", b"a plan", 77), (b"", message, 88)]
    assert (lanes[1].told, lanes[1].ended) == ([], [])
    assert (lanes[2].told, lanes[2].ended) == ([(b"plan", b"a plan", 77)], [(16, "nobody")])
    assert out.said[-1] == (ipc.ALIVE, 0, 0, b"")
    with pytest.raises(ValueError, match="a frame of kind 2 from the controller"):
        said_to(one, ipc.frame(ipc.OPENED, 1))


def test_what_waits_in_all_streams_together_is_bounded_and_large_offers_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "WAITING_BYTES", 1_000_000)
    one, _ = fronted()
    slow, quick = opened(one), opened(one)

    def offer(size: int, *numbers: int) -> None:
        said_to(one, ipc.encode_send(numbers, 0, b"plan", bytes(size)))

    for _ in range(3):
        offer(400_000, 1, 2)
        quick.told.clear()
    assert [len(message) for _, message, _ in slow.told] == [400_000, 400_000]
    offer(300_000, 2)
    offer(100, 1, 2)
    assert [len(message) for _, message, _ in quick.told] == [100]
    slow.told.pop(0)
    offer(400_000, 1, 2)
    assert [len(message) for _, message, _ in quick.told] == [100, 400_000]
    assert slow.told[-1][1] is quick.told[-1][1], "one message, however many hear it"
    slow.told.clear()
    quick.told.clear()
    assert one._shelf.held_bytes == 0
    assert [one.message.rpartition(": ")[2] for one in caplog.records] == [
        "large messages are left out",
        "room",
    ]


def test_a_front_that_can_hand_no_calls_on_does_not_say_that_it_lives(tmp_path: Path) -> None:
    one, out = fronted()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "s"))
        one.socket_proxy = SocketProxy(tmp_path / "s")
        said_to(one, ipc.frame(ipc.PING))
        assert out.said == [(ipc.ALIVE, 0, 0, b"")]
        (tmp_path / "s").unlink()
        with pytest.raises(HostError, match="socket is gone"):
            said_to(one, ipc.frame(ipc.PING))


def test_when_it_goes_down_all_are_told_to_come_again() -> None:
    one, _ = fronted()
    lanes = [opened(one) for _ in range(2)]
    one.end_all()
    assert [lane.ended for lane in lanes] == [[(14, "the controller is going down")]] * 2


@dataclass
class Writer:
    """Of the line, whose other end reads nothing until it is let."""

    written: list[bytes] = field(default_factory=list)
    unsent: int = 0
    high: int = 0
    num_drained: int = 0

    @property
    def transport(self) -> "Writer":
        return self

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def write(self, data: bytes) -> None:
        self.written.append(data)
        self.unsent += len(data)

    async def drain(self) -> None:
        self.num_drained += 1


def test_what_is_put_together_is_one_write_a_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "FLUSH_S", 0.001)

    async def scene() -> None:
        writer: Any = Writer()
        out = ControllerLink(writer)
        assert writer.high == UNSENT_BYTES
        for _ in range(2):
            writer.written.clear()
            out.put(ipc.ALIVE)
            out.put(ipc.REPORT, 3, 4, b"report")
            assert writer.written == []
            while not writer.written:
                await asyncio.sleep(0.001)
            expected = ipc.frame(ipc.ALIVE) + ipc.frame(ipc.REPORT, 3, 4, b"report")
            assert writer.written == [expected]
        out.flush()
        assert len(writer.written) == 1, "nothing to say"
        out.put(ipc.ALIVE)
        while len(writer.written) < 2:
            await asyncio.sleep(0.001)

    asyncio.run(scene())


def test_it_is_full_by_what_is_put_and_by_what_is_not_read_yet() -> None:
    async def scene() -> None:
        writer: Any = Writer()
        out = ControllerLink(writer)
        out.put(ipc.REPORT, 1, 1, bytes(UNSENT_BYTES))
        assert not out.is_full
        out.put(ipc.REPORT, 1, 2, b"x")
        assert out.is_full
        await out.ready()
        assert (len(writer.written), writer.num_drained) == (1, 1)
        assert out.is_full, "nobody has read it"
        writer.unsent = 0
        assert not out.is_full

    asyncio.run(scene())
