"""The ingest process between streams and controller: numbers, order, limits, invalid reports."""

import asyncio
import socket
from dataclasses import dataclass, field
from typing import Any

import pytest

from pacekeeper.controller.api.auth.peer_identity import PeerIdentity
from pacekeeper.controller.api.auth.rate_limit import Limit
from pacekeeper.controller.ingest import ipc, worker
from pacekeeper.controller.ingest.ipc import Frame, Frames
from pacekeeper.controller.ingest.worker import (
    UNSENT_BYTES,
    ControllerLink,
    IngestWorker,
    sequence_of,
)
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
    told: list[tuple[bytes, bytes, int]] = field(default_factory=list)
    ended: list[tuple[int, str]] = field(default_factory=list)

    def identity(self) -> PeerIdentity:
        return SHOWN

    def send(self, key: bytes, message: bytes, until_ms: int) -> None:
        self.told.append((key, message, until_ms))

    def end(self, code: int, why: str) -> None:
        self.ended.append((code, why))


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
    one._next = worker.MAX_NUMBER
    assert [opened(one).number, opened(one).number] == [worker.MAX_NUMBER, 1], "0 is no stream"


def test_streams_of_two_fronts_have_no_number_in_common() -> None:
    out: Any = Out()
    limit = Limit(per_s=1.0, at_once=1)
    processes = [IngestWorker(out, reports=limit, first_number=i + 1, step=2) for i in range(2)]
    assert [[opened(one).number for _ in range(2)] for one in processes] == [[1, 3], [2, 4]]


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
        (b"\xff\xff", "not of this protocol"),
        (hello, "expected a report"),
        (b"", "expected"),
    ):
        assert one.reported(lane, wrong) is None, "nothing more is read"
        kind, number, _, words = out.said[-1]
        assert (kind, number) == (ipc.MALFORMED, 1)
        assert why.encode() in words
        with pytest.raises(ValueError, match=why):
            sequence_of(wrong)


def test_while_the_line_is_full_nothing_more_is_read() -> None:
    async def scene() -> None:
        one, out = fronted()
        lane = opened(one)
        out.is_full = True
        assert one.reported(lane, report(1)) == 0.0, "what has been read is handed on"
        waiting = asyncio.create_task(one.ready())
        await asyncio.sleep(0)
        assert not waiting.done()
        out.is_full = False
        out.has_room.set()
        await waiting

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
    assert lanes[0].told == [(b"plan", b"a plan", 77), (worker.ACK_KEY, message, 88)]
    assert (lanes[1].told, lanes[1].ended) == ([], [])
    assert (lanes[2].told, lanes[2].ended) == ([(b"plan", b"a plan", 77)], [(16, "nobody")])
    assert out.said[-1] == (ipc.ALIVE, 0, 0, b"")
    with pytest.raises(ValueError, match="a frame of kind 2 from the controller"):
        said_to(one, ipc.frame(ipc.OPENED, 1))


def test_a_large_layout_is_offered_by_its_digest_and_kept_once() -> None:
    one, _ = fronted()
    lanes = [opened(one) for _ in range(2)]
    layout = bytes(worker.ON_STREAM_BYTES)
    plan = control_pb2.OfferPlan(job="j", generation=3, layout_json=layout, sha256=b"digest")
    response = control_pb2.AttachResponse(offer_plan=plan, term=7)
    said_to(one, ipc.encode_send([1, 2], 0, b"j/plan", response.SerializeToString()))
    plan.layout_json = b""
    expected = control_pb2.AttachResponse(offer_plan=plan, term=7)
    for lane in lanes:
        ((_, message, _),) = lane.told
        assert control_pb2.AttachResponse.FromString(message) == expected
    assert one.layouts.get(b"digest") == layout
    assert one.layouts.get(b"another") is None


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


class Server:
    """Notes how it is stopped."""

    def __init__(self) -> None:
        self.stopped: list[float] = []

    async def stop(self, grace_s: float) -> None:
        self.stopped.append(grace_s)


@pytest.mark.parametrize("is_drained", [True, False])
def test_streams_end_in_order_in_a_drain_only(
    is_drained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its controller the process ends at once: a server that stops takes seconds."""
    server = Server()

    async def open_server(*_: object) -> tuple[Server, int, str]:
        return server, 7443, ""

    async def scene() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        serving = asyncio.create_task(worker.serve(theirs))
        settings = {"reports": {"per_s": 1.0, "at_once": 1}, "index": 0, "processes": 1}
        writer.write(ipc.serve(settings))
        assert Frames(1 << 20).feed(await reader.read(1 << 16))[0][0] == ipc.LISTENS
        if is_drained:
            writer.write(ipc.frame(ipc.DRAIN))
        else:
            writer.close()
        await serving
        writer.close()

    monkeypatch.setattr(worker, "_open", open_server)
    asyncio.run(scene())
    assert server.stopped == ([worker.DRAIN_S] if is_drained else [])
