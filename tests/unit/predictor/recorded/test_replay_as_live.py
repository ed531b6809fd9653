"""A job that was watched and recorded: replay names the same rank, cause and link as live."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.agent.rings.ring_batch import RingBatch
from pacekeeper.agent.trace_recorder import TraceRecorder
from pacekeeper.core.incidents.findings import FindingKind
from pacekeeper.core.telemetry.records import MicroBatchRecord, Record, StepRecord
from pacekeeper.predictor.recorded.analyze import analyze
from pacekeeper.predictor.recorded.anomalies import AnomalyKind
from pacekeeper.simulator.readers.native import read_native
from support.fabrics import Fabric
from support.machine_driver import FIRST, JOB, WARM, Driver, applied, attachment, started, step
from support.symptoms import DEVICE, HOST

SLOW = 2
NODES = {"node-0": (0, 1), "node-1": (2, 3)}
AHEAD_S = {"node-0": 0.0, "node-1": 5000.0}  # each node has its own clock
SHOWN: dict[str, tuple[Mapping[str, Any], Mapping[str, Any], float | None]] = {
    "a hot device": ({"clock_event_reasons": 0x40, "sm_clock_mhz": 1300.0}, {}, None),
    "a stranger on the device": ({"processes": (102, 4242)}, {}, None),
    "a node without memory": ({}, {"memory_full_ratio": 0.5}, None),
    "a thread that stands still": ({}, {}, 1.0),
    "nothing": ({}, {}, 0.0),
    "nothing that tells of threads": ({}, {}, None),
}


@pytest.mark.parametrize("name", SHOWN)
def test_the_rank_and_its_cause_are_the_same(tmp_path: Path, name: str) -> None:
    driver = Driver()
    recordings = {
        node: TraceRecorder.begin(tmp_path, node=node, max_bytes=1 << 24) for node in NODES
    }
    for node, ranks in NODES.items():
        known = tuple(attachment(rank, device_uuid=f"gpu-{rank}") for rank in ranks)
        driver.agent(node)
        driver.report(attached=known, node=node, layouts=[FIRST])
        recordings[node].write([RingBatch(job=JOB, attached=known)])
    driver.report(*applied(FIRST))
    for number in range(WARM + 20):
        driver.now_s += 1.0
        is_slow = number >= WARM
        records = step(number, slow=SLOW if is_slow else None, generation=1)
        for node, ranks in NODES.items():
            _see(driver, recordings[node], node, ranks, records, name if is_slow else "nothing")
    for recording in recordings.values():
        recording.close()
    (incident,) = driver.job.incidents
    replayed = analyze(read_native(sorted(tmp_path.iterdir()))).anomalies
    (found,) = (anomaly for anomaly in replayed if anomaly.kind is AnomalyKind.COMPUTE)
    live = incident.finding
    assert (found.rank, found.first_step) == (live.rank, live.onset_step) == (SLOW, WARM)
    assert _uncounted(found.cause) == _uncounted(live.cause_text) != ""


def _uncounted(cause: str) -> str:
    """Without what grows with the time looked at: live, a cause is told at the first sample."""
    return re.sub(r"\d+ of \d+ samples|\d+% of its time", "some", cause)


def _see(
    driver: Driver,
    recording: TraceRecorder,
    node: str,
    ranks: tuple[int, ...],
    records: list[Record],
    name: str,
) -> None:
    """What the agent of a node reads in a step: reported, and recorded."""
    device, host, stall_ratio = SHOWN[name]
    now_s = driver.now_s + AHEAD_S[node]
    devices = [
        replace(
            DEVICE, device_uuid=f"gpu-{rank}", sampled_s=now_s,
            **{"processes": (100 + rank,)} | (dict(device) if rank == SLOW else {}),
        )
        for rank in ranks
    ]  # fmt: skip
    sampled = replace(HOST, sampled_s=now_s, **(host if SLOW in ranks else {}))
    own = tuple(_timed(r, now_s, stall_ratio) for r in records if r.rank in ranks)
    driver.report(*own, node=node, devices=devices, host=sampled)
    recording.write([RingBatch(job=JOB, records=own)], devices, sampled)


def _timed(record: Record, now_s: float, stall_ratio: float | None) -> Record:
    if isinstance(record, StepRecord):
        return replace(record, ended_mono_s=now_s)
    if not isinstance(record, MicroBatchRecord):
        return record
    stall_s = None
    if stall_ratio is not None:
        stall_s = stall_ratio * max(0.0, record.compute_s - 0.102) if record.rank == SLOW else 0.0
    return replace(record, ended_mono_s=now_s, stall_s=stall_s, run_queue_s=stall_s and 0.0)


def test_a_slow_link_is_the_same(tmp_path: Path) -> None:
    driver, fabric = started(), Fabric(5)
    recordings = {
        node: TraceRecorder.begin(tmp_path, node=node, max_bytes=1 << 24) for node in NODES
    }
    for node, ranks in NODES.items():
        recordings[node].write([RingBatch(job=JOB, attached=tuple(map(attachment, ranks)))])
    for number in range(80):
        driver.now_s += 1.0
        records = fabric.records(number, {1: 2.5} if 40 <= number < 60 else {})
        driver.report(*records)
        for node, ranks in NODES.items():
            own = tuple(record for record in records if record.rank in ranks)
            recordings[node].write([RingBatch(job=JOB, records=own)])
    for recording in recordings.values():
        recording.close()
    (incident,) = driver.job.incidents
    (found,) = analyze(read_native(sorted(tmp_path.iterdir()))).anomalies
    live = incident.finding
    assert (found.kind, found.rank, found.first_step) == (AnomalyKind.LINK, 1, 40)
    assert (live.kind, live.rank, live.onset_step) == (FindingKind.LINK, 1, 40)
    assert found.reason.startswith(live.reason)
    assert found.last_step == 59 and not incident.is_open
