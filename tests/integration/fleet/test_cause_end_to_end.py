"""Why a rank is slow, from an agent's samples over the controller and its store to who asks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pacekeeper.core.errors import ExitCode
from pacekeeper.core.telemetry.node_report import JobReport
from pacekeeper.core.telemetry.records import MicroBatchRecord, Record, StepRecord
from pacekeeper.core.telemetry.samples import DeviceSample
from pacekeeper.protos import status_pb2
from support.commands import pacekeeper
from support.controllers import (
    ControllerProcess,
    ScriptedAgent,
    attached,
    first_layout,
    step_records,
)
from support.symptoms import DEVICE, HOST

JOB, SLOW = "train", 1
LAYOUT = first_layout()
STEP_S = 6.0
CAUSE = (
    "confirmed thermal: the device reports hardware thermal slowdown in 2 of 2 samples "
    "(none of 3 peers); probable clocks: SM clock 1155 MHz where its peers ran 1900 MHz, which "
    "would make it x1.65 slow (none of 3 peers as low)"
)


def with_devices(report: JobReport) -> JobReport:
    told = tuple(replace(a, device_uuid=f"GPU-{a.rank}") for a in report.attached)
    return replace(report, attached=told)


def samples(now_s: float, *, is_hot: bool) -> tuple[DeviceSample, ...]:
    hot: dict[str, Any] = {"sm_clock_mhz": 1155.0, "clock_event_reasons": 0x40}
    return tuple(
        replace(
            DEVICE,
            device_uuid=f"GPU-{rank}",
            device_index=rank,
            sampled_s=now_s,
            processes=(1000 + rank,),
            **(hot if is_hot and rank == SLOW else {}),
        )
        for rank in LAYOUT.ranks
    )


def timed(records: tuple[Record, ...], now_s: float) -> tuple[Record, ...]:
    """The records of a step that took STEP_S and ended just now."""
    told: list[Record] = []
    for record in records:
        if isinstance(record, MicroBatchRecord):
            record = replace(record, ended_mono_s=now_s)
        elif isinstance(record, StepRecord):
            record = replace(record, ended_mono_s=now_s, duration_s=STEP_S)
        told.append(record)
    return tuple(told)


def train_until_found(controller: ControllerProcess, agent: ScriptedAgent) -> Any:
    """A sample in the middle of each step; one rank is throttled from step 20 on."""
    for step in range(40):
        is_hot = step >= 20
        now_s = 5000.0 + STEP_S * step
        records = step_records(step, LAYOUT, {SLOW: 1.65} if is_hot else None)
        agent.report(
            JobReport(job=JOB, records=timed(records, now_s)),
            devices=samples(now_s - STEP_S / 2, is_hot=is_hot),
            host=replace(HOST, sampled_s=now_s),
        )
        if is_hot:
            agent.report_and_wait()
            found = listed(controller)
            if found:
                return found[0]
    raise AssertionError("never found")


def listed(controller: ControllerProcess) -> list[Any]:
    request = status_pb2.ListIncidentsRequest(job=JOB)
    return list(controller.status.ListIncidents(request, timeout=30.0).incidents)


def test_an_incident_says_what_its_device_showed_also_after_a_kill(tmp_path: Path) -> None:
    with ControllerProcess(tmp_path) as controller:
        agent = ScriptedAgent(controller.address)
        agent.report_and_wait(with_devices(attached(JOB, LAYOUT)))
        incident = train_until_found(controller, agent)
        assert (incident.rank, incident.cause) == (SLOW, CAUSE)
        done = pacekeeper("incidents", "--controller", controller.api)
        assert done.returncode == ExitCode.OK, done.stderr
        assert f"    cause: {CAUSE}\n" in done.stdout
        assert f"incident=1 cause: {CAUSE}" in controller.log
        assert "event dropped" not in controller.log
        controller.kill()
    with ControllerProcess(tmp_path) as again:
        (incident,) = listed(again)
        assert incident.cause == CAUSE
