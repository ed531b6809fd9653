"""Trace files: what is written comes back, and what is damaged is refused with its reason."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.layout.pipeline_schedule import Schedule
from pacekeeper.core.telemetry.attachment import Attachment, Clock
from pacekeeper.core.telemetry.records import MicroBatchRecord, Record
from pacekeeper.core.telemetry.samples import DeviceHealth, DeviceSample, HostSample
from pacekeeper.core.telemetry.trace_jsonl import (
    TraceHeader,
    attached_line,
    header_line,
    parse_fact,
    parse_header,
    parse_object,
    record_line,
)
from support.records import ATTACHMENT, SHAPE, records

number = st.floats(allow_nan=False, allow_infinity=False)
maybe, count = st.none() | number, st.none() | st.integers(0, 2**63)
healths = st.builds(
    DeviceHealth, nvlinks=count, is_remap_pending=st.none() | st.booleans(),
    power_limit_max_watts=maybe, xids=st.sampled_from([None, (), (79, 63)]),
)  # fmt: skip
devices = st.builds(
    DeviceSample, device_index=st.integers(0, 99), device_uuid=st.text(max_size=9),
    sampled_s=number, name=st.text(max_size=9), sm_clock_mhz=maybe, temperature_celsius=maybe,
    memory_used_bytes=count, clock_event_reasons=count, ecc_uncorrected=count,
    processes=st.none() | st.lists(st.integers(0, 2**22), max_size=3).map(tuple),
    is_lost=st.booleans(), power_cap_held_s=maybe, health=st.none() | healths,
)  # fmt: skip
hosts = st.builds(
    HostSample, sampled_s=number, num_cores=count, load_1min=maybe, memory_bytes=count,
    io_full_ratio=maybe, swap_in_bytes_per_s=maybe,
)  # fmt: skip
HEADER = TraceHeader(job=ATTACHMENT.job, run_id=7, node="node-0")


@given(records)
def test_a_record_comes_back(record: Record) -> None:
    line = record_line(record)
    assert "\n" not in line
    assert parse_fact(parse_object(line), HEADER) == record


@given(devices | hosts)
def test_a_sample_comes_back(sample: DeviceSample | HostSample) -> None:
    assert parse_fact(parse_object(record_line(sample)), HEADER) == sample


@given(st.text(max_size=9), st.integers(0, 2**42), st.text(max_size=9))
def test_a_header_comes_back(job: str, run_id: int, node: str) -> None:
    header = TraceHeader(job=job, run_id=run_id, node=node)
    assert parse_header(header_line(header)) == header


def test_an_attachment_comes_back_with_what_the_header_says() -> None:
    bare = Attachment(job=HEADER.job, rank=1, world_size=2, pid=3, clock=Clock.CUDA, run_id=7)
    assert parse_fact(parse_object(attached_line(bare)), HEADER) == bare
    assert '"job"' not in attached_line(bare)
    whole = parse_fact(parse_object(attached_line(ATTACHMENT)), TraceHeader(job=ATTACHMENT.job))
    assert whole == ATTACHMENT


@pytest.mark.parametrize("schedule", [*Schedule, None])
def test_a_pipeline_schedule_comes_back(schedule: Schedule | None) -> None:
    told = replace(ATTACHMENT, model=replace(SHAPE, schedule=schedule))
    found = parse_fact(parse_object(attached_line(told)), TraceHeader(job=told.job))
    assert found == told and isinstance(found, Attachment)
    assert found.model is not None and found.model.schedule is schedule  # a member, not its text


def test_a_line_without_a_schedule_is_that_of_1f1b_and_an_unknown_one_of_none() -> None:
    line = parse_object(attached_line(ATTACHMENT))
    assert "schedule" not in line["model"]
    assert parse_fact(line, TraceHeader(job=ATTACHMENT.job)) == ATTACHMENT
    line["model"]["schedule"] = "zero_bubble_v"
    found = parse_fact(line, HEADER)
    assert isinstance(found, Attachment) and found.model == replace(SHAPE, schedule=None)


def test_what_was_not_measured_is_not_written() -> None:
    record = MicroBatchRecord(
        rank=0, step=1, micro_batch=0, generation=1, compute_s=0.5, tokens=9, cpu_s=None
    )
    assert "cpu_s" not in json.loads(record_line(record))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "no JSON"),
        ("[1]", "a line: expected an object, got list"),
        ('{"kind": "dance"}', "unknown kind 'dance'"),
        ('{"kind": "step", "rank": 0}', "missing"),
        (
            '{"kind": "step", "rank": "0", "step": 1, "generation": 1, "duration_s": 1, '
            '"tokens": 1}',
            "rank: expected int, got '0'",
        ),
        (
            '{"kind": "step", "rank": 0, "step": 1, "generation": 1, "duration_s": "x", '
            '"tokens": 1}',
            "duration_s: expected a number",
        ),
        ('{"kind": "step", "colour": 1}', "colour: no such field"),
        (
            '{"kind": "expert_load", "rank": 0, "step": 1, "generation": 1, "layer": 0, '
            '"first_expert": 0, "counts": ["a"]}',
            "counts: expected whole numbers",
        ),
        (
            '{"kind": "device", "device_index": 0, "device_uuid": "d", "sampled_s": 1, '
            '"health": {"is_remap_pending": 1}}',
            "is_remap_pending: expected true or false, got 1",
        ),
        (
            '{"kind": "device", "device_index": 0, "device_uuid": "d", "sampled_s": 1, '
            '"health": 7}',
            "health: expected an object",
        ),
        ('{"kind": "attached", "rank": 5, "world_size": 2, "pid": 1}', "rank 5 is not in a world"),
        ('{"kind": "attached", "rank": 0, "world_size": 2, "pid": 1, "clock": "sun"}', "sun"),
        ('{"kind": "attached", "rank": 0, "model": {"schedule": 3}}', "schedule"),
    ],
)
def test_a_damaged_line_says_what_is_wrong(line: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason.replace("(", r"\(")):
        parse_fact(parse_object(line), HEADER)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "no JSON"),
        ('{"kind": "step"}', "its first line is no header"),
        (header_line(HEADER).replace('"version":1', '"version":9'), "version 9, this side reads 1"),
        (header_line(HEADER).replace('"life":7', '"life":"x"'), "run_id: expected int"),
    ],
)
def test_another_file_is_refused(line: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_header(line)
