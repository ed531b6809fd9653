"""A slow rank is found at the same step with and without the report interval.

The same steps go into one controller twice: by the rings of a node whose agent keeps the
controller's report interval, and by a stream that reports each step at once.
"""

import sys
import time
from pathlib import Path

from pacekeeper.core.layout.codec import encode_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.node_report import JobReport
from pacekeeper.protos import status_pb2
from pacekeeper.trainer.hooks.ring_writer import Ring
from support.agents import Node
from support.commands import Started
from support.controllers import (
    ControllerProcess,
    ScriptedAgent,
    applied,
    attached,
    attachments,
    first_layout,
    step_records,
    until,
)

STEP_S = 1.05  # longer than the interval of so small a fleet
SLOW, SLOW_FROM, NUM_STEPS = {2: 2.0}, 16, 40
CONFIG = "[detector]\nskip_steps = 1\nwarmup_steps = 8\n"


def rings_of(node: Node, job: str, layout: Layout) -> dict[int, Ring]:
    """Rings of all ranks of `job` on the node, beside their layout file."""
    rings = {a.rank: Ring.create(node.rings, a) for a in attachments(job, layout.ranks)}
    name = shm_ring.layout_file_name(layout.generation)
    (node.rings / job / name).write_bytes(encode_layout(layout))
    for record in applied(layout, step=0):
        rings[record.rank].write(record)
    return rings


def test_a_slow_rank_is_found_at_the_same_step_as_without_an_interval(tmp_path: Path) -> None:
    config = tmp_path / "controller.toml"
    config.write_text(CONFIG)
    layout = first_layout()
    with ControllerProcess(tmp_path, "--config", str(config)) as controller:
        node = Node(tmp_path, int(controller.address.rpartition(":")[2]))
        rings = rings_of(node, "paced", layout)
        at_once = ScriptedAgent(controller.address)
        at_once.report_and_wait(attached("at-once", layout))
        flags = ["--controller", controller.address, "--ring-dir", str(node.rings)]
        agent = Started("agent", *flags, "--metrics-listen", "", errors=sys.stderr.fileno())
        try:
            found = _found_steps(controller, at_once, rings, layout)
        finally:
            agent.kill()
            agent.wait(60.0)
            at_once.close()
    assert found["paced"] == found["at-once"]


def _found_steps(
    controller: ControllerProcess,
    at_once: ScriptedAgent,
    rings: dict[int, Ring],
    layout: Layout,
) -> dict[str, int]:
    for number in range(NUM_STEPS):
        began_s = time.monotonic()
        records = step_records(number, layout, SLOW if number >= SLOW_FROM else None)
        for record in records:
            rings[record.rank].write(record)
        at_once.report(JobReport(job="at-once", records=records))
        until(f"step {number} is known", lambda: _steps(controller) == {number})  # noqa: B023
        incidents = controller.status.ListIncidents(status_pb2.ListIncidentsRequest()).incidents
        found = {one.job: one.found_step for one in incidents if one.kind == "device"}
        if len(found) == 2:
            return found
        time.sleep(max(0.0, began_s + STEP_S - time.monotonic()))
    raise AssertionError(f"never found in both jobs: {found}")


def _steps(controller: ControllerProcess) -> set[int]:
    jobs = controller.status.ListJobs(status_pb2.ListJobsRequest()).jobs
    return {job.step for job in jobs} if len(jobs) == 2 else set()
