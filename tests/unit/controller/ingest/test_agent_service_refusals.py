"""What an agent says wrong is refused; however often it says it, no disk fills with that."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from pacekeeper.controller.api.auth import peer_identity
from pacekeeper.controller.ha.leader_election import LeaseLeadership
from pacekeeper.controller.ha.lease import ElectionMember, Timing
from pacekeeper.controller.ha.lease_renewer import LeaseRenewer
from pacekeeper.controller.ingest import ipc
from pacekeeper.controller.ingest.agent_service import NO_LEADER, AgentControl
from pacekeeper.controller.state.events import Event
from pacekeeper.protos import control_pb2
from pacekeeper.protos.convert import reports

TIMES = 3000


async def _taken(events: Sequence[Event]) -> None:
    """As if stored."""


def _control(rejected: list[int]) -> AgentControl:
    return AgentControl(
        put=_taken,
        on_rejected=lambda: rejected.append(1),
        on_failure=lambda what, error: pytest.fail(f"{what}: {error!r}"),
        send_frame=lambda frame: None,
    )


def _opened(number: int, peer: str, hello: control_pb2.Hello | None) -> ipc.Frame:
    first = control_pb2.AttachRequest(hello=hello).SerializeToString() if hello else b"?"
    shown = peer_identity.PeerIdentity(peer=peer).to_bytes()
    return ipc.OPENED, number, 0, ipc.join_header(shown, first)


def _hello(highest_term: int = 0) -> control_pb2.Hello:
    return control_pb2.Hello(
        highest_term=highest_term,
        protocol_version=reports.PROTOCOL_VERSION,
        product_version="0",
        node="n",
        agent_incarnation="x",
    )


@pytest.mark.parametrize("hosts", [1, TIMES])
def test_refused_agents_fill_no_log(hosts: int, caplog: pytest.LogCaptureFixture) -> None:
    rejected = list[int]()
    control = _control(rejected)
    frames = [
        _opened(i + 1, f"ipv4:10.{i % hosts // 250}.0.{i % hosts % 250}:{i}", None)
        for i in range(TIMES)
    ]
    with caplog.at_level(logging.WARNING):
        asyncio.run(control.handle_frames(frames))
    assert len(rejected) == TIMES, "each is counted"
    assert 1 <= len(caplog.records) <= (25 if hosts == 1 else 1010)


def test_an_agent_that_errs_for_ever_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    rejected = list[int]()
    control = _control(rejected)
    with caplog.at_level(logging.WARNING):
        for number in range(1, 500):
            wrong = ipc.MALFORMED, number, 0, b"no message"
            asyncio.run(
                control.handle_frames([_opened(number, "ipv4:10.0.0.1:7", _hello()), wrong])
            )
            asyncio.run(control.handle_frames([(ipc.CLOSED, number, 0, b"")]))
    assert len(rejected) == 499
    assert 1 <= len(caplog.records) <= 25


@pytest.mark.parametrize(
    ("seen", "now_s", "reason"),
    [
        (7, 9.0, None),
        (8, 9.0, "n: the agent has seen term 8, this controller leads in term 7: a later term"),
        (7, 11.0, NO_LEADER),
        (8, 11.0, NO_LEADER),
    ],
)
def test_a_leader_whose_lease_has_lapsed_says_only_that_it_leads_no_more(
    seen: int, now_s: float, reason: str | None
) -> None:
    member = ElectionMember(
        name="a",
        run_id="a1",
        address="a:1",
        timing=Timing(duration_s=4.0, renew_s=1.0, margin_s=1.0),
        term=7,
        until_s=10.0,
        eligible_s=0.0,
    )
    store: Any = None  # no thread runs that would renew
    leadership = LeaseLeadership(LeaseRenewer(member, store, lambda: now_s), 7, member)
    sent = list[bytes]()
    control = _control([])
    control.leadership, control.send_frame = leadership, sent.append
    asyncio.run(control.handle_frames([_opened(1, "ipv4:10.0.0.1:7", _hello(seen))]))
    ends = [one for one in ipc.Frames(1 << 20).feed(b"".join(sent)) if one[0] == ipc.END]
    if reason is None:
        assert ends == []
    else:
        ((_, number, code, said),) = ends
        assert (number, code) == (1, grpc.StatusCode.UNAVAILABLE.value[0])
        assert said.decode().startswith(reason)
