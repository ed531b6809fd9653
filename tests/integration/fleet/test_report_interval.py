"""The report interval delays no detection where steps are longer than it.

By the real road: the same steps go into one controller twice, by the rings of a node whose agent
keeps the controller's report interval, and by a stream that reports each step at once. In seconds
of the job's time, on a clock of its own: the pacers of two agents, with the interval that the
controller sets for so many, before the controller's machine.
"""

import sys
import time
from pathlib import Path

import pytest

from pacekeeper.agent.rings.ring_batch import RingBatch
from pacekeeper.agent.uplink.pacing import ReportPacer
from pacekeeper.controller.ingest.report_pacing import pacing_for
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.node_report import JobReport
from pacekeeper.protos import status_pb2
from pacekeeper.trainer.hooks.ring_writer import Ring
from support import machine_driver
from support.agents import Node, rings_of
from support.commands import Started
from support.controllers import (
    ControllerProcess,
    ScriptedAgent,
    attached,
    first_layout,
    step_records,
    until,
)

STEP_S = 1.05  # longer than the interval of so small a fleet
SLOW, SLOW_FROM, NUM_STEPS = {2: 2.0}, 16, 40
CONFIG = "[detector]\nskip_steps = 1\nwarmup_steps = 8\n"


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


POLL_S = 0.1  # of an agent
BEGINS_SLOW = 24  # the step
LATE_S = {"node-0": 0.02, "node-1": 0.05}  # after the step, its ranks' records are read


@pytest.mark.parametrize(
    ("num_agents", "step_s", "most_s"),
    [
        # A step longer than the interval: as without one, but for the poll.
        (1000, 1.1, POLL_S),
        (4000, 2.3, POLL_S),
        (10_000, 5.7, POLL_S),
        # Shorter steps: the interval.
        (4000, 0.7, 2.0),
        (10_000, 2.3, 5.0),
    ],
)
def test_the_interval_delays_detection_by_less_than_itself_and_not_in_long_steps(
    num_agents: int, step_s: float, most_s: float
) -> None:
    interval_s = pacing_for(num_agents).report_interval_s
    assert (most_s == POLL_S) == (step_s > interval_s), "as the cases say"
    at_once_s = found_after_s(step_s, 0.0)
    assert at_once_s > 0.0
    assert found_after_s(step_s, interval_s) <= at_once_s + most_s + 1e-9


def found_after_s(step_s: float, interval_s: float) -> float:
    """From the begin of the first slow step to the incident; `interval_s` 0: each poll reports."""
    driver = machine_driver.started(machine_driver.QUICK)
    pacers = {node: ReportPacer() for node in LATE_S}
    for pacer in pacers.values():
        pacer.set_interval(interval_s)
    began_s, ended = driver.now_s, dict.fromkeys(LATE_S, 0)
    polls = 0
    while not driver.job.incidents:
        polls += 1
        driver.now_s = began_s + polls * POLL_S
        for node, pacer in pacers.items():
            ranks = [r for r, of in machine_driver.NODE_OF.items() if of == node]
            batches = []
            while driver.now_s - began_s >= (ended[node] + 1) * step_s + LATE_S[node]:
                number = ended[node]
                slow = 2 if number >= BEGINS_SLOW else None
                records = machine_driver.step(number, ranks=ranks, slow=slow, slowdown=1.2)
                batches.append(RingBatch(job=machine_driver.JOB, run_id=0, records=tuple(records)))
                ended[node] += 1
            mine = {machine_driver.JOB: {rank: 100 + rank for rank in ranks}}
            pacer.add(batches, mine, driver.now_s)
            if pacer.is_due(driver.now_s) if interval_s else batches:
                for batch in pacer.take(driver.now_s):
                    driver.report(*batch.records, node=node)
        driver.tick(0.0)
        assert ended["node-0"] < 10 * BEGINS_SLOW, "it is never found"
    (incident,) = driver.job.incidents
    assert incident.finding.rank == 2
    return driver.now_s - began_s - BEGINS_SLOW * step_s
