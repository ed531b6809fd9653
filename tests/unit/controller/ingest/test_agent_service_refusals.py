"""What an agent says wrong is refused; however often it says it, no disk fills with that."""

import asyncio
import logging
from collections.abc import Sequence

import pytest

from pacekeeper.controller.api.auth import peer_identity
from pacekeeper.controller.ingest import ipc
from pacekeeper.controller.ingest.agent_service import AgentControl
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


def _hello() -> control_pb2.Hello:
    return control_pb2.Hello(
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
