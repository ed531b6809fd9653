"""A node obeys no controller of an earlier term than it has obeyed, whatever was killed since."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.agent.rings.collector import RingCollector
from pacekeeper.agent.rings.fencing_epoch import FILE_NAME, MAX_TERM, FencingEpoch
from pacekeeper.agent.uplink import stream as uplink_module
from pacekeeper.agent.uplink.spool import Spool
from pacekeeper.agent.uplink.stream import Uplink
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.protos import control_pb2, telemetry_pb2
from pacekeeper.trainer.hooks.ring_writer import Ring
from support.agents import PaperController, until


@pytest.mark.parametrize(
    ("term", "counts", "highest"), [(0, False, 5), (4, False, 5), (5, True, 5), (6, True, 6)]
)
def test_only_what_is_said_in_the_newest_term_counts(term: int, counts: bool, highest: int) -> None:
    terms = FencingEpoch(highest=5)
    assert terms.accept(term) == counts
    assert terms.highest == highest


def test_a_controller_without_a_lease_counts_where_there_never_was_one() -> None:
    assert FencingEpoch().accept(0)


def test_the_newest_term_outlives_the_agent(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    FencingEpoch(path=path).accept(7)
    again = FencingEpoch(path=path)
    again.load()
    assert not again.accept(6) and again.accept(7)


@pytest.mark.parametrize("damage", [b"", b"seven", b"\xff" * 40])
def test_a_damaged_file_stops_nobody(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(damage)
    terms = FencingEpoch(path=tmp_path / FILE_NAME)
    terms.load()
    assert terms.accept(1)


def test_what_another_user_has_left_there_locks_no_controller_out(tmp_path: Path) -> None:
    """The directory is everybody's: a pipe would be waited for, a number would be obeyed."""
    path, number = tmp_path / FILE_NAME, tmp_path / "elsewhere"
    number.write_text("7")
    os.mkfifo(path)
    assert loaded(path).highest == 0
    path.unlink()
    path.symlink_to(number)
    assert loaded(path).highest == 0
    path.unlink()
    for text in ("9" * 31, "-1", str(MAX_TERM + 1)):
        path.write_text(text)
        assert loaded(path).highest == 0
    if os.geteuid() == 0:
        path.write_text("7")
        os.chown(path, 12345, 12345)
        assert loaded(path).highest == 0


def loaded(path: Path) -> FencingEpoch:
    terms = FencingEpoch(path=path)
    terms.load()
    return terms


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_the_ring_of_another_user_moves_no_fence(tmp_path: Path) -> None:
    ring = Ring.create(tmp_path, Attachment(job="job", rank=0, world_size=1, pid=1, run_id=8))
    liar = RingCollector(directory=tmp_path)
    liar.fencing.accept(1 << 50)
    liar.poll(0.0)
    liar.notify_deaths("job", frozenset({0}), 8)
    assert ring.command().term == 1 << 50
    (path,) = (tmp_path / "job").glob("*.ring")
    os.chown(path, 12345, 12345)
    agent = RingCollector(directory=tmp_path)
    agent.poll(1.0)
    assert agent.fencing.highest == 0


def test_where_the_file_is_gone_the_rings_know(tmp_path: Path) -> None:
    ring = Ring.create(tmp_path, Attachment(job="job", rank=0, world_size=1, pid=1, run_id=8))
    before = RingCollector(directory=tmp_path)
    before.fencing.accept(7)
    before.poll(0.0)
    before.notify_deaths("job", frozenset({0}), 8)
    assert ring.command().term == 7
    after = RingCollector(directory=tmp_path)
    after.poll(1.0)
    assert after.fencing.highest == 7
    after.request_probe("job", 3, 8)
    assert (ring.command().term, ring.command().probe) == (7, 3)


def uplink_to(one: PaperController, other: PaperController, fencing: FencingEpoch) -> Uplink:
    return Uplink(
        addresses=(f"127.0.0.1:{one.port}", f"127.0.0.1:{other.port}"),
        node="n",
        incarnation="a",
        spool=Spool(capacity=8),
        ack_timeout_s=15.0,
        reconnect_max_s=0.1,
        on_command=lambda message: None,
        resync_report=lambda sequence: telemetry_pb2.NodeReport(sequence=sequence),
        fencing=fencing,
    )


class Busy(PaperController):
    """Comes to a new agent only after a while."""

    async def Attach(
        self, request_iterator: AsyncIterator[control_pb2.AttachRequest], context: Any
    ) -> AsyncIterator[control_pb2.AttachResponse]:
        await asyncio.sleep(6 * uplink_module.WELCOME_TIMEOUT_S)
        async for message in super().Attach(request_iterator, context):
            yield message


def test_a_leader_that_is_busy_is_waited_for_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a fleet that comes back at once, and gives up early, never gets in."""
    monkeypatch.setattr(uplink_module, "WELCOME_TIMEOUT_S", 0.02)

    async def scene() -> None:
        away, leader = PaperController(), Busy()
        await away.start()
        await leader.start()
        uplink = uplink_to(away, leader, FencingEpoch())
        await away.stop()
        running = asyncio.create_task(uplink.run())
        try:
            await until(lambda: uplink.is_connected, "it is welcome")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await leader.stop()

    asyncio.run(scene())


def test_an_agent_finds_who_leads_and_takes_nothing_of_who_led_before() -> None:
    asyncio.run(_finds_who_leads())


async def _finds_who_leads() -> None:
    past, present = PaperController(), PaperController()
    past.term, present.term = 3, 9
    await past.start()
    await present.start()
    uplink = uplink_to(past, present, FencingEpoch(highest=8))
    spool = uplink.spool
    spool.put(telemetry_pb2.NodeReport(sequence=1))
    running = asyncio.create_task(uplink.run())
    try:
        await until(lambda: not len(spool), "the report is acknowledged")
        assert past.hellos and not past.reports, "who led before is told nothing"
        assert [report.sequence for report in present.reports] == [0, 1]
        # It goes, and the one of the earlier term is all there is.
        spool.put(telemetry_pb2.NodeReport(sequence=2))
        await present.stop()
        num_calls = len(past.hellos)
        await until(lambda: len(past.hellos) > num_calls, "it looks for another")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await past.stop()
        await present.stop()
    assert {hello.highest_term for hello in past.hellos} == {8, 9}
    assert len(spool) == 1 and not uplink.is_connected
