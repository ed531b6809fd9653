"""A rank whose link is slow, from an agent's reports to who asks: a link, and closed when well."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.core.telemetry.node_report import JobReport
from pacekeeper.core.telemetry.records import Record, StepRecord
from pacekeeper.protos import status_pb2
from support.controllers import (
    ControllerProcess,
    ScriptedAgent,
    attached,
    first_layout,
    step_records,
)

JOB, SLOW, FAULT_STEP = "train", 2, 30
LAYOUT = first_layout()


def records(step: int, slowdown: float) -> Iterator[Record]:
    """A step whose ranks move different numbers of bytes at one speed, but for a slow one."""
    for record in step_records(step, LAYOUT):
        if isinstance(record, StepRecord):
            moved = 2_000_000 + 200_000 * ((step * 7 + record.rank * 3) % 11)
            jitter = 1.0 + 0.01 * ((step * 13 + record.rank * 29) % 7 - 3)
            took_s = (0.0005 + moved / 1e9) * jitter
            took_s *= slowdown if record.rank == SLOW else 1.0
            record = replace(record, transfer_s=took_s, transfer_bytes=moved)
        yield record


def test_a_slow_link_is_named_as_a_link_and_closed_when_it_is_well(tmp_path: Path) -> None:
    with ControllerProcess(tmp_path) as controller:
        agent = ScriptedAgent(controller.address)
        agent.report_and_wait(attached(JOB, LAYOUT))
        step = 0

        def train(slowdown: float) -> None:
            nonlocal step
            report = JobReport(job=JOB, records=tuple(records(step, slowdown)))
            step += 1
            (agent.report if step < FAULT_STEP else agent.report_and_wait)(report)

        def listed() -> list[Any]:
            request = status_pb2.ListIncidentsRequest(job=JOB)
            return list(controller.status.ListIncidents(request, timeout=30.0).incidents)

        while step < FAULT_STEP:
            train(1.0)
        assert listed() == []
        while not listed():
            assert step < FAULT_STEP + 20
            train(8.0)
        (found,) = listed()
        assert (found.kind, found.rank) == ("link", SLOW)
        assert found.slowdown == pytest.approx(8.0, rel=0.1)
        while not listed()[0].HasField("closed_unix_s"):
            assert step < FAULT_STEP + 60
            train(1.0)
        assert len(listed()) == 1
        (job,) = controller.status.ListJobs(status_pb2.ListJobsRequest(), timeout=30.0).jobs
        assert job.desired_generation in (0, LAYOUT.generation), "no layout avoids a link"
        assert {rank.state for rank in job.ranks} == {"alive"}
