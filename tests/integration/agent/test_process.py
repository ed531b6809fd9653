"""A real agent process between real rings and a controller on paper."""

import asyncio
import hashlib
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from pacekeeper.core.incidents import node_health
from pacekeeper.core.layout.codec import encode_layout
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.node_report import NodeReport
from pacekeeper.core.telemetry.records import RankExitRecord, StepRecord
from pacekeeper.protos import control_pb2
from pacekeeper.protos.convert import reports
from pacekeeper.trainer.hooks.ring_writer import Ring
from support.agents import Node, PaperController, agent_of, play, step, until
from support.ports import free_port

DROPPED = "pacekeeper_agent_batches_dropped_total "


def write_steps(writer: Ring, numbers: range) -> None:
    for number in numbers:
        writer.write(step(number))


def test_records_arrive_once_in_order_and_after_their_attachment(tmp_path: Path) -> None:
    async def body(controller: PaperController, node: Node) -> None:
        writer = node.ring()
        await node.start()
        for first in range(0, 50, 10):
            write_steps(writer, range(first, first + 10))
            await until(lambda: len(controller.steps) >= first + 10, f"step {first + 9}")  # noqa: B023
        assert controller.steps == list(range(50))
        told = [job for report in controller.reports for job in report.jobs]
        assert told[0].attached and told[0].attached[0].rank == 0
        assert controller.hellos[0].node == "n0"
        assert controller.hellos[0].protocol_version == reports.PROTOCOL_VERSION
        newest = controller.reports[-1].health
        assert (newest.records_lost, newest.records_corrupt, newest.batches_dropped) == (0, 0, 0)

    play(tmp_path, body)


def test_what_happens_while_the_controller_is_away_comes_later(tmp_path: Path) -> None:
    async def body(controller: PaperController, node: Node) -> None:
        writer = node.ring()
        await node.start()
        write_steps(writer, range(5))
        await until(lambda: len(controller.steps) == 5, "the first five steps")
        await controller.stop()
        for number in range(5, 12):
            writer.write(step(number))
            await asyncio.sleep(0.05)
        await controller.start()
        await until(lambda: 11 in controller.steps, "the step written last")
        # Reports sent but not yet acknowledged may come twice, none may be missing.
        assert sorted(set(controller.steps)) == list(range(12))
        first = controller.streams[1][0]
        assert [a.rank for job in first.jobs for a in job.attached] == [0], "who they are, first"
        assert not any(job.records for job in first.jobs)

    play(tmp_path, body)


def num_dropped(page: str) -> float:
    """The agent's own count of dropped reports; 0 while it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{page}/metrics", timeout=10.0) as answer:
            text = answer.read().decode()
    except OSError:
        return 0.0
    (line,) = (one for one in text.splitlines() if one.startswith(DROPPED))
    return float(line.rpartition(" ")[2])


def test_a_spool_that_is_full_drops_the_oldest_and_says_so(tmp_path: Path) -> None:
    async def body(controller: PaperController, node: Node) -> None:
        await controller.stop()
        writer = node.ring()
        page = f"127.0.0.1:{free_port()}"
        await node.start(spool_batches=3, metrics_listen=page)
        number = 0
        while not await asyncio.to_thread(num_dropped, page):
            writer.write(step(number))
            number += 1
            await asyncio.sleep(0.1)
        await controller.start()
        await until(lambda: number - 1 in controller.steps, "the newest step")
        await until(lambda: controller.reports[-1].health.batches_dropped > 0, "the count of drops")
        steps = controller.steps
        assert steps == list(range(steps[0], number)), "what is left is the newest, in order"
        assert steps[0] > 0

    play(tmp_path, body)


def test_a_controller_that_says_nothing_more_is_left_and_tried_again(tmp_path: Path) -> None:
    async def body(controller: PaperController, node: Node) -> None:
        controller.is_acknowledging = False
        writer = node.ring()
        await node.start(ack_timeout_s=0.3)
        writer.write(step(0))

        def told() -> list[list[NodeReport]]:
            """Streams that were not left before they had said all."""
            return [stream for stream in controller.streams if len(stream) > 1]

        await until(lambda: len(told()) >= 3, "a third stream")
        assert all(stream.count(stream[1]) == 1 for stream in told())
        controller.is_acknowledging = True
        writer.write(step(1))
        await until(lambda: 1 in controller.steps, "the second step")
        code, _ = await node.stop()
        assert code == 0

    play(tmp_path, body)


def test_reports_of_a_broken_stream_are_sent_again_on_the_next_one(tmp_path: Path) -> None:
    async def body(controller: PaperController, node: Node) -> None:
        controller.is_acknowledging = False
        writer = node.ring()
        await node.start()
        for number in range(6):
            writer.write(step(number))
            await until(lambda: number in controller.steps, f"step {number}")  # noqa: B023
        await controller.stop()
        controller.streams.clear()
        await controller.start()
        writer.write(step(6))
        await until(lambda: 6 in controller.steps, "the last step")
        # The first connection's sender must not take anything from the second one's mouth.
        assert controller.steps == list(range(7))

    play(tmp_path, body)


def test_a_report_the_controller_refuses_does_not_block_the_others(tmp_path: Path) -> None:
    async def body(controller: PaperController, node: Node) -> None:
        def has_step_13(report: Any) -> bool:
            return any(
                isinstance(record, StepRecord) and record.step == 13
                for job in report.jobs
                for record in job.records
            )

        controller.is_refused = has_step_13
        writer = node.ring()
        await node.start()
        writer.write(step(12))
        await until(lambda: 12 in controller.steps, "the step before the refused one")
        writer.write(step(13))
        await until(lambda: len(controller.streams) == 2, "a stream after the refusal")
        writer.write(step(14))
        await until(lambda: 14 in controller.steps, "the step after the refused one")
        await until(lambda: controller.reports[-1].health.batches_dropped, "its count")
        assert controller.steps == [12, 14]
        assert controller.reports[-1].health.batches_dropped == 1

    play(tmp_path, body)


def test_an_offer_reaches_file_and_slot_and_a_damaged_one_does_not(tmp_path: Path) -> None:
    async def body(controller: PaperController, node: Node) -> None:
        writer = node.ring()
        await node.start()
        await until(lambda: controller.reports, "the stream")
        layout = even_layout(ranks=range(4), num_layers=1, num_experts=4, replicas=2, generation=3)
        damaged = reports.offer_to_message("job", layout, 1)
        damaged.layout_json += b" "
        controller.say(control_pb2.AttachResponse(offer_plan=damaged))
        good = reports.offer_to_message("job", layout, 2)
        controller.say(control_pb2.AttachResponse(offer_plan=good))
        await until(lambda: writer.command().plan_generation == 3, "the plan in the slot")
        assert writer.command().base_generation == 2
        data = encode_layout(layout)
        assert writer.read_plan(3, hashlib.sha256(data).digest()) == data
        deaths = control_pb2.NotifyDeaths(job="job", ranks=[1, 3, 4_000_000_000])
        controller.say(control_pb2.AttachResponse(notify_deaths=deaths))
        await until(lambda: writer.command().dead_ranks == {1, 3}, "the dead in the slot")
        assert writer.command().plan_generation == 3
        elsewhere = control_pb2.NotifyDeaths(job="not-here", ranks=[2])
        controller.say(control_pb2.AttachResponse(notify_deaths=elsewhere))
        code, error = await node.stop()
        assert code == 0, error
        jobs = [path for path in node.rings.iterdir() if path.name != node_health.FILE_NAME]
        assert jobs == [node.rings / "job"]

    play(tmp_path, body)


def test_a_layout_too_large_for_the_stream_is_fetched_once_and_checked(tmp_path: Path) -> None:
    async def body(controller: PaperController, node: Node) -> None:
        writer = node.ring()
        await node.start()
        await until(lambda: controller.reports, "the stream")
        layout = even_layout(ranks=range(4), num_layers=1, num_experts=4, replicas=2, generation=3)
        offer = reports.offer_to_message("job", layout, 2)
        data, offer.layout_json = offer.layout_json, b""
        for wrong in (None, data + b" ", data):
            before = controller.num_fetches
            if wrong is not None:
                controller.layouts[offer.sha256] = wrong
            assert writer.command().plan_generation != 3
            controller.say(control_pb2.AttachResponse(offer_plan=offer))
            await until(lambda: controller.num_fetches > before, "a fetch")  # noqa: B023
        await until(lambda: writer.command().plan_generation == 3, "the plan in the slot")
        assert writer.read_plan(3, offer.sha256) == data
        controller.say(control_pb2.AttachResponse(offer_plan=offer))
        deaths = control_pb2.NotifyDeaths(job="job", ranks=[1])
        controller.say(control_pb2.AttachResponse(notify_deaths=deaths))
        await until(lambda: writer.command().dead_ranks == {1}, "what was sent after it")
        assert controller.num_fetches == 3

    play(tmp_path, body)


def test_the_controller_sets_the_report_interval_while_the_stream_is_open(tmp_path: Path) -> None:
    agent, _ = agent_of(tmp_path)
    pacing = control_pb2.ReportPacing(report_interval_s=2.5)
    agent.uplink._handle(control_pb2.AttachResponse(set_pacing=pacing))
    assert agent.pacer.interval_s == 2.5


def test_a_death_reaches_the_neighbours_without_any_controller(tmp_path: Path) -> None:
    async def body(controller: PaperController, node: Node) -> None:
        await controller.stop()
        neighbour = node.ring(0)
        node.ring(1, pid=4711)
        supervisor = Ring.create(
            node.rings,
            Attachment(job="job", rank=0, world_size=4, pid=7, role="supervisor"),
            file_name=shm_ring.SUPERVISOR_RING,
        )
        await node.start()
        await until(neighbour.heartbeat_mono_s, "a look")
        supervisor.write(RankExitRecord(rank=2, pid=9, exit_code=0, signal=0))
        supervisor.write(RankExitRecord(rank=1, pid=4711, exit_code=0, signal=9))
        await until(lambda: neighbour.command().dead_ranks, "the death")
        assert neighbour.command().dead_ranks == {1}, "a clean exit is no death"

    play(tmp_path, body)


def test_files_that_are_no_rings_are_told_and_the_others_are_read(tmp_path: Path) -> None:
    async def body(controller: PaperController, node: Node) -> None:
        writer = node.ring(0)
        write_steps(writer, range(3))
        assert writer.path is not None
        with writer.path.open("r+b") as file:
            file.seek(shm_ring.slot_offset(1) + 24)
            file.write(b"\xff\xff\xff")
        other = bytearray(node.ring(1).path.read_bytes())  # type: ignore[union-attr]
        other[8] = 77
        (node.rings / "job" / "rank-00002.ring").write_bytes(other)
        (node.rings / "job" / "rank-00003.ring").write_bytes(os.urandom(shm_ring.FILE_BYTES))
        (node.rings / "job" / "rank-00004.ring").mkdir()
        os.mkfifo(node.rings / "job" / "rank-00005.ring")
        (node.rings / "job" / "rank-00006.ring").symlink_to("/etc/hostname")
        await node.start()
        await until(lambda: controller.steps == [0, 2], "the two good steps")
        health = controller.reports[-1].health
        assert health.records_corrupt == 1
        named = {text.partition(":")[0] for text in health.unreadable}
        assert named == {f"job/rank-0000{i}.ring" for i in range(2, 7)}
        assert any("version 77" in text for text in health.unreadable)
        writer.write(step(9))
        await until(lambda: 9 in controller.steps, "a step after all that")
        code, error = await node.stop()
        assert code == 0
        assert error.count("version 77") == 1, "said once in the log"

    play(tmp_path, body)


def test_a_writer_killed_at_any_moment_leaves_only_whole_records(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from support.agents import Node, step\n"
        "ring = Node(Path(sys.argv[1]), 1).ring()\n"
        "print('up', flush=True)\n"
        "for number in range(10**9): ring.write(step(number))\n"
    )

    async def body(controller: PaperController, node: Node) -> None:
        await node.start()
        await until(lambda: controller.streams, "the agent")
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        writer = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        try:
            await until(lambda: len(controller.steps) > 3000, "many steps")
        finally:
            writer.kill()
            writer.communicate()
        seen = len(controller.reports)
        await until(lambda: any(not r.jobs for r in controller.reports[seen:]), "a quiet report")
        health = controller.reports[-1].health
        steps = controller.steps
        assert steps == sorted(set(steps))
        assert health.records_corrupt == 0
        assert health.records_lost == steps[-1] + 1 - len(steps), "every gap is counted"
        reborn = node.ring()
        reborn.write(step(2_000_000_000))
        await until(lambda: 2_000_000_000 in controller.steps, "the next life of the rank")

    play(tmp_path, body)


def test_a_new_agent_reads_what_is_still_in_the_rings(tmp_path: Path) -> None:
    async def body(controller: PaperController, node: Node) -> None:
        writer = node.ring()
        await node.start(rack="rack-7")
        write_steps(writer, range(2000))
        await until(lambda: 1999 in controller.steps, "the newest step")
        await node.kill()
        write_steps(writer, range(2000, 2010))
        controller.streams.clear()
        await node.start()
        await until(lambda: 2009 in controller.steps, "the step written last")
        assert controller.steps == list(range(2010 - shm_ring.SLOT_COUNT, 2010))
        assert controller.reports[-1].health.records_lost == 0, "they were read in another life"
        attached = [a for r in controller.reports for job in r.jobs for a in job.attached]
        assert {a.pid for a in attached} == {os.getpid()}
        assert len({hello.agent_incarnation for hello in controller.hellos}) == 2
        assert [hello.rack for hello in controller.hellos] == ["rack-7", ""]

    play(tmp_path, body)
