"""Frames of the ingest process: handled at once, acknowledged once stored, ignored when old."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from pacekeeper.controller.api.auth.attach_policy import AttachPolicy, RejectedError
from pacekeeper.controller.api.auth.peer_identity import PeerIdentity
from pacekeeper.controller.api.auth.rbac import AccessDecision, Principal
from pacekeeper.controller.ha.leadership import Leadership, Standalone
from pacekeeper.controller.ingest import agent_service, ipc
from pacekeeper.controller.ingest.agent_service import AgentControl
from pacekeeper.controller.ingest.ipc import Frame, Frames, join_header
from pacekeeper.controller.ingest.report_pacing import pacing_for
from pacekeeper.controller.state.events import (
    Event,
    NodeAttached,
    NodeDetached,
    NodeReported,
)
from pacekeeper.core.telemetry.node_report import NodeReport
from pacekeeper.protos import control_pb2, telemetry_pb2
from pacekeeper.protos.convert import reports

INTERNAL, ABORTED, INVALID, DENIED = 13, 10, 3, 7  # as gRPC numbers its status codes


@dataclass
class Desk:
    """An AgentControl of which all that it stores and says is kept."""

    attach_policy: AttachPolicy = field(default_factory=AttachPolicy)
    leadership: Leadership = field(default_factory=Standalone)
    is_broken: bool = False
    events: list[Event] = field(default_factory=list)
    said: list[Frame] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    rejected: int = 0

    def __post_init__(self) -> None:
        self.control = AgentControl(
            put=self._put,
            on_rejected=self._reject,
            on_failure=lambda what, _: self.failures.append(what),
            send_frame=lambda data: self.said.extend(Frames(1 << 20).feed(data)),
            attach_policy=self.attach_policy,
            leadership=self.leadership,
        )

    async def _put(self, events: Sequence[Event]) -> None:
        if self.is_broken:
            raise ZeroDivisionError
        self.events += events

    def _reject(self) -> None:
        self.rejected += 1

    def take(self, *frames: Frame) -> list[Frame]:
        """What is said on account of these frames."""
        self.said.clear()
        asyncio.run(self.control.handle_frames(frames))
        return list(self.said)

    @property
    def taken(self) -> list[tuple[str, int]]:
        """(node, sequence) of the reports that went in."""
        return [(e.node, e.report.sequence) for e in self.events if isinstance(e, NodeReported)]


def opened(number: int, node: str = "n", incarnation: str = "x", **more: Any) -> Frame:
    hello = control_pb2.Hello(
        node=node,
        agent_incarnation=incarnation,
        **{"protocol_version": reports.PROTOCOL_VERSION, **more},
    )
    return opening(control_pb2.AttachRequest(hello=hello).SerializeToString(), number)


def opening(first: bytes, number: int = 1) -> Frame:
    return (
        ipc.OPENED,
        number,
        0,
        join_header(PeerIdentity(peer="ipv4:192.0.2.1:5").to_bytes(), first),
    )


def reported(number: int, sequence: int, **more: Any) -> Frame:
    report = telemetry_pb2.NodeReport(sequence=sequence, **more)
    data = control_pb2.AttachRequest(report=report).SerializeToString()
    return ipc.REPORT, number, sequence, data


def ends(said: Sequence[Frame]) -> list[tuple[int, int]]:
    """(stream, code) of those that are ended."""
    return [(stream, code) for kind, stream, code, _ in said if kind == ipc.END]


def acknowledged(said: Sequence[Frame]) -> list[tuple[int, int]]:
    return [
        pair
        for kind, _, _, data in said
        if kind == ipc.ACKNOWLEDGE
        for pair in ipc.decode_acknowledge(data)[2]
    ]


def heard_by(said: Frame) -> tuple[int, ...]:
    kind, _, _, data = said
    assert kind == ipc.SEND
    return tuple(ipc.decode_send(data)[0])


def test_a_batch_of_many_agents_goes_in_at_once_and_in_order() -> None:
    desk = Desk()
    welcomes = desk.take(opened(1, "a"), opened(2, "b"))
    assert [heard_by(said) for said in welcomes] == [(1,), (2,)]
    desk.take(reported(1, 0), reported(2, 0), reported(1, 1), reported(2, 1), reported(1, 2))
    assert desk.taken == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2)]


def test_nothing_is_acknowledged_that_is_not_stored() -> None:
    desk = Desk()
    desk.take(opened(1))
    desk.is_broken = True
    said = desk.take(*(reported(1, n) for n in range(20)))
    assert (acknowledged(said), ends(said)) == ([], [(1, INTERNAL)])
    assert desk.failures == ["processing reports failed"]
    # Who comes back with them finds that they are news.
    desk.is_broken = False
    desk.take((ipc.CLOSED, 1, 0, b""), opened(2), *(reported(2, n) for n in range(20)))
    assert len(desk.taken) == 20


def test_where_nothing_is_stored_no_stream_is_left_open_and_unheard() -> None:
    desk = Desk()
    desk.take(opened(1, "a"), opened(2, "b"), opened(3, "c"))
    desk.is_broken = True
    said = desk.take(reported(1, 0), (ipc.MALFORMED, 2, 0, b"no report"), (ipc.FINISHED, 3, 0, b""))
    assert sorted(ends(said)) == [(1, INTERNAL), (2, INTERNAL), (3, INTERNAL)]


def test_what_is_said_to_many_nodes_is_made_once_and_reaches_those_that_are_there() -> None:
    desk = Desk()
    desk.take(opened(1, "a"), opened(2, "b"), opened(3, "c"))
    desk.said.clear()
    message = control_pb2.AttachResponse(notify_deaths=control_pb2.NotifyDeaths(job="j", ranks=[4]))
    desk.control.send(("a", "gone", "c"), "deaths", "j", message)
    ((kind, _, _, data),) = desk.said
    assert kind == ipc.SEND
    assert ipc.decode_send(data) == ((1, 3), b"j/deaths", message.SerializeToString())


def test_with_a_lease_commands_expire_in_a_busy_ingest_process_and_nothing_else_does() -> None:
    """A welcome is sent once: an ingest process that is half a second late would admit no agent."""

    class Led(Standalone):
        answer_within_s = 4.0

    desk = Desk(leadership=Led())
    (welcome,) = desk.take(opened(1, "a"))
    (ack, _) = desk.take(reported(1, 0), (ipc.FINISHED, 1, 0, b""))
    desk.take(opened(2, "a"))
    desk.said.clear()
    told = control_pb2.NotifyDeaths(job="j", ranks=[4])
    desk.control.send(("a",), "deaths", "j", control_pb2.AttachResponse(notify_deaths=told))
    (command,) = desk.said
    assert (welcome[0], ack[0], command[0]) == (ipc.SEND, ipc.ACKNOWLEDGE, ipc.SEND)
    assert (welcome[2], ipc.decode_acknowledge(ack[3])[1]) == (0, 0)
    assert command[2] > 0


@pytest.mark.parametrize(("margin_s", "until_ms"), [(1.0, 7500), (3.0, 7500), (0.05, 7025)])
def test_no_command_leaves_later_than_half_the_leases_margin(
    monkeypatch: pytest.MonkeyPatch, margin_s: float, until_ms: int
) -> None:
    class Led(Standalone):
        answer_within_s = 4.0

    desk = Desk(leadership=Led())
    desk.control.lease_margin_s = margin_s
    desk.take(opened(1, "a"))
    monkeypatch.setattr("pacekeeper.controller.ingest.agent_service.time.monotonic", lambda: 7.0)
    told = control_pb2.NotifyDeaths(job="j", ranks=[4])
    desk.said.clear()
    desk.control.send(("a",), "deaths", "j", control_pb2.AttachResponse(notify_deaths=told))
    assert [number for _, _, number, _ in desk.said] == [until_ms]


def test_an_offer_to_a_thousand_nodes_crosses_the_line_once() -> None:
    """An ingest process with more than a second of unsent bytes counts as hanging."""
    desk = Desk()
    nodes = [f"node-{i}" for i in range(1024)]
    desk.take(*(opened(1 + i, node) for i, node in enumerate(nodes)))
    desk.said.clear()
    offer = control_pb2.OfferPlan(job="j", generation=2, layout_json=b"x" * 737_000)
    desk.control.send(nodes, "plan", "j", control_pb2.AttachResponse(offer_plan=offer))
    assert sum(len(data) for *_, data in desk.said) < 750_000
    assert [heard_by(said) for said in desk.said] == [tuple(range(1, 1025))]


def test_where_many_wait_the_newest_number_says_it_for_all() -> None:
    desk = Desk()
    desk.take(opened(1))
    assert acknowledged(desk.take(*(reported(1, n) for n in range(9)))) == [(1, 8)]


def test_a_report_that_comes_again_is_passed_over_and_acknowledged() -> None:
    desk = Desk()
    desk.take(opened(1), *(reported(1, n) for n in range(4)))
    # A new stream: its greeting has the number of the last report that was settled.
    desk.take((ipc.CLOSED, 1, 0, b""), opened(2), reported(2, 1))
    said = desk.take(*(reported(2, n) for n in range(2, 5)), (ipc.FINISHED, 2, 0, b""))
    assert [number for _, number in desk.taken] == [0, 1, 2, 3, 1, 4]
    assert acknowledged(said) == [(2, 4)]
    assert desk.control.sequences.repeated == 3  # the greeting's number and two reports


def test_the_same_report_twice_in_one_batch_goes_in_once() -> None:
    desk = Desk()
    desk.take(opened(1), reported(1, 0), reported(1, 1), reported(1, 1))
    assert [number for _, number in desk.taken] == [0, 1]


def test_of_a_node_that_came_anew_the_older_stream_is_ended_and_heard_no_more() -> None:
    desk = Desk()
    desk.take(opened(1), reported(1, 0))
    said = desk.take(opened(2), reported(1, 1), reported(2, 0), (ipc.CLOSED, 1, 0, b""))
    assert ends(said) == [(1, ABORTED)]
    assert desk.taken == [("n", 0), ("n", 0)]
    assert not any(isinstance(event, NodeDetached) for event in desk.events)
    desk.take((ipc.CLOSED, 2, 0, b""))
    assert desk.events[-1] == NodeDetached(node="n", agent_incarnation="x")


def test_an_impossible_report_is_acknowledged_and_ends_its_stream_alone() -> None:
    desk = Desk()
    desk.take(opened(1, "a"), opened(2, "b"), reported(1, 0), reported(2, 0))
    wrong = reported(1, 1, jobs=[telemetry_pb2.JobReport(job="no job's name")])
    said = desk.take(wrong, reported(1, 2), reported(2, 1))
    assert (ends(said), acknowledged(said)) == ([(1, INVALID)], [(1, 1)])
    assert desk.taken == [("a", 0), ("b", 0), ("b", 1)]
    assert desk.rejected == 1


def test_what_is_no_report_at_all_ends_its_stream() -> None:
    desk = Desk()
    desk.take(opened(1))
    assert ends(desk.take((ipc.MALFORMED, 1, 0, b"torn"))) == [(1, INVALID)]


def test_a_report_of_another_node_is_refused() -> None:
    class Strict(AttachPolicy):
        def check_report(
            self, principal: Principal, node: str, report: NodeReport
        ) -> AccessDecision:
            return AccessDecision(is_allowed=report.sequence != 1, reason="rank 7 is of node b")

    desk = Desk(attach_policy=Strict())
    desk.take(opened(1), reported(1, 0))
    assert ends(desk.take(reported(1, 1))) == [(1, DENIED)]
    assert desk.taken == [("n", 0)]


def test_a_mistake_of_ours_in_reading_one_costs_that_stream_and_no_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = agent_service.report_in

    def failing(data: bytes) -> NodeReport:
        report = real(data)
        if report.sequence == 7:
            raise KeyError("a bug")
        return report

    monkeypatch.setattr(agent_service, "report_in", failing)
    desk = Desk()
    desk.take(opened(1, "a"), opened(2, "b"))
    said = desk.take(reported(1, 6), reported(1, 7), reported(2, 1))
    assert (ends(said), acknowledged(said)) == ([(1, INTERNAL)], [(1, 6)])
    assert desk.taken == [("a", 6), ("b", 1)]
    assert desk.failures == ["node=a reader failed"]


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (opened(1, protocol_version=99), grpc.StatusCode.FAILED_PRECONDITION),
        (opened(1, node=""), grpc.StatusCode.INVALID_ARGUMENT),
        (opened(1, rack="\n"), grpc.StatusCode.INVALID_ARGUMENT),
        (opened(1, highest_term=5), grpc.StatusCode.UNAVAILABLE),
        (opening(b"\xff"), grpc.StatusCode.INVALID_ARGUMENT),
        # It said nothing in time: one that was stopped meanwhile may come again. By what is
        # invalid agents end.
        (opening(b""), grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_who_may_not_attach_is_told_why(frame: Frame, code: grpc.StatusCode) -> None:
    desk = Desk()
    said = desk.take(frame)
    assert ends(said) == [(1, code.value[0])]
    assert (desk.events, desk.rejected) == ([], 1)


def test_who_is_not_let_in_never_attaches() -> None:
    class Closed(AttachPolicy):
        async def authenticate(self, identity: PeerIdentity) -> Principal:
            raise RejectedError(grpc.StatusCode.UNAUTHENTICATED, identity.peer)

    desk = Desk(attach_policy=Closed())
    ((kind, stream, _, why),) = desk.take(opened(1))
    assert (kind, stream, why) == (ipc.END, 1, b"ipv4:192.0.2.1:5")
    assert desk.events == []


def test_with_the_ingest_process_all_its_nodes_are_away() -> None:
    desk = Desk()
    desk.take(opened(1, "a"), opened(2, "b"), (ipc.CLOSED, 2, 0, b""))
    assert desk.control.drop_streams() == [NodeDetached(node="a", agent_incarnation="x")]
    desk.take(reported(1, 0))  # of the ingest process that is gone
    assert desk.taken == []
    desk.take(opened(1, "a"), reported(1, 0))
    assert desk.taken == [("a", 0)]
    assert isinstance(desk.events[0], NodeAttached)


def test_agents_are_sent_their_pacing_when_the_fleet_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_service, "PACING_S", 0.001)
    monkeypatch.setattr(agent_service, "pacing_for", lambda n: pacing_for(1500 * n))
    desk = Desk()
    (_, _, _, welcome), *_ = desk.take(opened(1, "a"))
    first = control_pb2.AttachResponse.FromString(ipc.decode_send(welcome)[2]).welcome.pacing
    assert (first.report_interval_s, first.reconnect_spread_s) == (1.0, 0.0)
    desk.take(opened(2, "b"))
    desk.said.clear()

    async def scene() -> None:
        keeping = asyncio.create_task(desk.control.keep_pace())
        while not desk.said:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        keeping.cancel()

    asyncio.run(scene())
    ((kind, _, _, data),) = desk.said
    numbers, _, message = ipc.decode_send(data)
    pacing = control_pb2.AttachResponse.FromString(message).set_pacing
    assert (kind, list(numbers)) == (ipc.SEND, [1, 2]), "once, to all"
    assert (pacing.report_interval_s, pacing.reconnect_spread_s) == (1.5, 9.0)


def test_streams_of_one_front_end_with_it_and_the_others_stay() -> None:
    desk = Desk()
    for number, node in ((1, "a"), (2, "b"), (3, "c")):
        desk.take(opened(number, node))
    events = desk.control.drop_streams(lambda number: number % 2 == 1)
    assert [event.node for event in events if isinstance(event, NodeDetached)] == ["a", "c"]
    desk.control.send(["a", "b", "c"], "plan", "job", control_pb2.AttachResponse())
    assert list(ipc.decode_send(desk.said[-1][3])[0]) == [2]
