"""Everything that goes over the wire comes back as it was, and what is impossible is refused."""

import hashlib
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.layout.codec import encode_layout
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.pipeline_schedule import Schedule
from pacekeeper.core.telemetry.attachment import Attachment, ModelShape
from pacekeeper.core.telemetry.node_report import AgentHealth, JobReport, NodeReport, PlanFile
from pacekeeper.core.telemetry.record_codec import unpack
from pacekeeper.core.telemetry.records import (
    PAYLOAD_BYTES,
    ExpertLoadRecord,
    MicroBatchRecord,
    Record,
    RecordKind,
)
from pacekeeper.core.telemetry.samples import DeviceHealth, DeviceSample, HostSample
from pacekeeper.protos import telemetry_pb2
from pacekeeper.protos.convert import reports as wire
from support.records import ATTACHMENT, SHAPE, records

# What a node says in words is one printable line; other text becomes one (unit tests).
words = st.text(
    st.characters(codec="ascii", exclude_categories=["C"]) | st.just("\xe9"), max_size=9
)
BARE = Attachment(job="x", rank=0, world_size=1, pid=1)
FOREIGN = replace(ATTACHMENT, rank=2, plan_kinds="microbatch_counts")
numbers = st.integers(0, 2**31)
maybe_float = st.none() | st.floats(0, 1e9)
flags = st.none() | st.booleans()
healths = st.builds(
    DeviceHealth,
    sm_clock_set_mhz=maybe_float, pcie_errors=st.none() | numbers, nvlinks=st.none() | numbers,
    nvlink_bytes_per_s=maybe_float, is_remap_pending=flags, has_remap_failed=flags,
    recovery_action=st.none() | numbers, num_xids=st.none() | numbers,
    xids=st.sampled_from([None, (), (79,), (63, 94)]),
)  # fmt: skip
samples = st.builds(
    DeviceSample,
    parent_uuid=words, is_lost=st.booleans(), hw_thermal_held_s=maybe_float,
    nvlink_sent_bytes=st.none() | numbers, sm_active_ratio=maybe_float, answer_s=maybe_float,
    health=st.none() | healths,
    device_index=numbers, device_uuid=words, sampled_s=st.floats(0, 1e9),
    name=words, sm_clock_mhz=maybe_float, temperature_celsius=maybe_float,
    power_watts=maybe_float, utilisation_ratio=maybe_float, memory_used_bytes=st.none() | numbers,
    clock_event_reasons=st.none() | numbers, pcie_width=st.none() | numbers,
    ecc_uncorrected=st.none() | numbers, processes=st.none() | st.just(()) | st.just((1, 2)),
)  # fmt: skip
hosts = st.none() | st.builds(
    HostSample, sampled_s=st.floats(0, 1e9), num_cores=st.none() | numbers, load_1min=maybe_float,
    load_15min=maybe_float, cpu_some_ratio=maybe_float, io_full_ratio=maybe_float,
    memory_full_ratio=maybe_float, memory_available_bytes=st.none() | numbers,
    swap_in_bytes_per_s=maybe_float, tcp_resent_ratio=maybe_float,
    fabric_errors=st.none() | numbers, is_clock_synchronised=st.none() | st.booleans(),
)  # fmt: skip
health = st.builds(
    AgentHealth, nvml=words, num_devices=numbers, records_read=numbers,
    records_lost=numbers, records_corrupt=numbers, batches_dropped=numbers,
    unreadable=st.lists(words, max_size=2).map(tuple),
)  # fmt: skip
jobs = st.builds(
    JobReport,
    run_id=st.integers(0, 2**42),
    job=st.from_regex(r"[a-z0-9][a-z0-9-]{0,4}", fullmatch=True),
    attached=st.sampled_from([(), (ATTACHMENT,), (BARE, FOREIGN, ATTACHMENT)]),
    records=st.lists(records, max_size=6).map(tuple),
    layouts=st.lists(st.tuples(numbers, st.binary(max_size=9)), max_size=2).map(tuple),
)  # fmt: skip
reports = st.builds(
    NodeReport, sequence=numbers, sent_mono_s=st.floats(0, 1e9),
    jobs=st.lists(jobs, max_size=2).map(tuple), devices=st.lists(samples, max_size=2).map(tuple),
    health=health, host=hosts,
)  # fmt: skip


def by_kind(found: tuple[Record, ...]) -> list[Record]:
    """Records of one kind keep their order; kinds travel in groups."""
    return sorted(found, key=lambda record: type(record).__name__)


@given(reports)
def test_a_report_survives_the_wire(report: NodeReport) -> None:
    data = wire.report_to_message(report).SerializeToString()
    back = wire.report_from_message(telemetry_pb2.NodeReport.FromString(data))
    assert (back.sequence, back.devices, back.health, back.host) == (
        report.sequence,
        report.devices,
        report.health,
        report.host,
    )
    for ours, theirs in zip(report.jobs, back.jobs, strict=True):
        assert (ours.job, ours.attached, ours.layouts) == (
            theirs.job,
            theirs.attached,
            theirs.layouts,
        )
        assert by_kind(ours.records) == by_kind(theirs.records)


def shape_received(message: telemetry_pb2.NodeReport) -> ModelShape | None:
    """The model shape of the first rank, out of the message's bytes."""
    sent = telemetry_pb2.NodeReport.FromString(message.SerializeToString())
    return wire.report_from_message(sent).jobs[0].attached[0].model


@pytest.mark.parametrize("schedule", [*Schedule, None])
def test_every_pipeline_schedule_survives_the_wire(schedule: Schedule | None) -> None:
    shape = replace(SHAPE, schedule=schedule)
    job = JobReport(job="j", attached=(replace(ATTACHMENT, model=shape),))
    message = wire.report_to_message(NodeReport(sequence=1, sent_mono_s=0.0, jobs=(job,)))
    assert shape_received(message) == shape


def test_every_size_of_a_model_survives_the_wire() -> None:
    sizes: dict[str, Any] = {
        f.name: at for at, f in enumerate(fields(ModelShape), 1) if f.type is int
    }
    shape = ModelShape(**sizes)
    job = JobReport(job="j", attached=(replace(ATTACHMENT, model=shape),))
    message = wire.report_to_message(NodeReport(sequence=1, sent_mono_s=0.0, jobs=(job,)))
    assert shape_received(message) == shape


@pytest.mark.parametrize(("number", "schedule"), [(0, Schedule.ONE_F_ONE_B), (77, None)])
def test_an_older_node_runs_1f1b_and_a_newer_one_what_is_unknown_here(
    number: int, schedule: Schedule | None
) -> None:
    job = JobReport(job="j", attached=(ATTACHMENT,))
    message = wire.report_to_message(NodeReport(sequence=1, sent_mono_s=0.0, jobs=(job,)))
    message.jobs[0].attached[0].model.schedule = number  # type: ignore[assignment]
    assert shape_received(message) == replace(SHAPE, schedule=schedule)


def test_columns_of_different_length_are_the_senders_fault() -> None:
    message = telemetry_pb2.NodeReport()
    columns = message.jobs.add(job="j").micro_batches
    columns.rank.extend([0, 1])
    columns.step.extend([5])
    with pytest.raises(ValueError, match="j micro_batches: column step has 1 entries, not 2"):
        wire.report_from_message(message)


def test_a_column_of_defaults_costs_nothing_and_an_unknown_one_is_filled_in() -> None:
    told = MicroBatchRecord(
        rank=1, step=2, micro_batch=0, generation=1, compute_s=0.5, tokens=7, wait_s=0.1
    )
    jobs = (JobReport(job="j", records=(told, told)),)
    report = NodeReport(sequence=1, sent_mono_s=0.0, jobs=jobs)
    message = wire.report_to_message(report)
    columns = message.jobs[0].micro_batches
    assert len(columns.wait_s) == 2 and not columns.tensor_share and not columns.cpu_s
    (job,) = wire.report_from_message(message).jobs
    assert job.records == (told, told)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_impossible_times_are_refused(value: float) -> None:
    message = telemetry_pb2.NodeReport()
    columns = message.jobs.add(job="j").rank_exits
    assert columns is not None
    steps = message.jobs[0].steps
    for name in ("rank", "step", "generation", "tokens", "is_redone"):
        getattr(steps, name).append(0)
    steps.loss.append(0.0)
    steps.ended_mono_s.append(0.0)
    steps.duration_s.append(value)
    with pytest.raises(ValueError, match="impossible duration_s"):
        wire.report_from_message(message)


def test_an_offer_that_was_damaged_on_the_way_is_noticed() -> None:
    layout = even_layout(ranks=range(2), num_layers=1, num_experts=2, replicas=1)
    offer = wire.offer_to_message("j", layout, 1, 7)
    data = encode_layout(layout)
    digest = hashlib.sha256(data).digest()
    assert wire.offer_from_message(offer) == PlanFile(
        job="j", generation=layout.generation, base_generation=1, data=data, sha256=digest, run_id=7
    )
    offer.layout_json += b" "
    with pytest.raises(ValueError, match="digest"):
        wire.offer_from_message(offer)


@given(
    st.sampled_from(list(RecordKind)),
    st.binary(min_size=PAYLOAD_BYTES - 2, max_size=PAYLOAD_BYTES - 2),
)
def test_what_a_ring_lets_through_the_controller_takes(kind: RecordKind, rest: bytes) -> None:
    """Else one odd record in a ring would make the controller refuse its batch for ever."""
    try:
        record = unpack(kind.to_bytes(2, "little") + rest)
    except ValueError:
        return
    report = NodeReport(sequence=1, sent_mono_s=0.0, jobs=(JobReport(job="j", records=(record,)),))
    (job,) = wire.report_from_message(wire.report_to_message(report)).jobs
    assert job.records == (record,)


REQUIRED = [
    ("micro_batches", "compute_s"),
    ("micro_batches", "ended_mono_s"),
    ("steps", "duration_s"),
    ("steps", "ended_mono_s"),
    ("plans_applied", "duration_s"),
    ("plans_applied", "ended_mono_s"),
    ("rank_exits", "detected_mono_s"),
]


@pytest.mark.parametrize(("group", "column"), REQUIRED)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_must_be_measured_is_refused_by_its_name(
    group: str, column: str, value: float
) -> None:
    message = telemetry_pb2.NodeReport()
    columns = getattr(message.jobs.add(job="j"), group)
    for field in columns.DESCRIPTOR.fields:
        getattr(columns, field.name).append(0)
    assert wire.report_from_message(message).jobs[0].records
    getattr(columns, column)[0] = value
    with pytest.raises(ValueError, match=f"j {group}: impossible {column}"):
        wire.report_from_message(message)


@pytest.mark.parametrize(
    ("num_counts", "counts", "complaint"),
    [(0, [], "impossible num_counts 0"), (17, [1] * 17, "impossible num_counts 17"),
     (1, [1, 2], "counts holds 2 entries, num_counts sums to 1"),
     (3, [1], "num_counts sums to more")],
)  # fmt: skip
def test_counts_that_do_not_add_up_are_refused(
    num_counts: int, counts: list[int], complaint: str
) -> None:
    message = telemetry_pb2.NodeReport()
    loads = message.jobs.add(job="j").expert_loads
    for name in ("rank", "step", "generation", "layer", "first_expert"):
        getattr(loads, name).append(0)
    loads.num_counts.append(num_counts)
    loads.counts.extend(counts)
    with pytest.raises(ValueError, match=complaint):
        wire.report_from_message(message)


def test_loads_that_follow_each_other_come_as_one_record_and_others_alone() -> None:
    def loads(rank: int, layer: int, first: int, number: int) -> ExpertLoadRecord:
        counts = tuple(range(first, first + number))
        return ExpertLoadRecord(
            rank=rank, step=3, generation=1, layer=layer, first_expert=first, counts=counts
        )

    told = [loads(rank, 0, first, 16) for rank in (0, 1) for first in range(0, 64, 16)]
    told += [loads(1, 1, 0, 16), loads(1, 1, 32, 7), loads(1, 1, 39, 1), loads(1, 1, 8, 2)]
    report = NodeReport(
        sequence=1, sent_mono_s=0.0, jobs=(JobReport(job="j", records=tuple(told)),)
    )
    (job,) = wire.report_from_message(wire.report_to_message(report)).jobs
    assert job.records == (
        *(loads(0, 0, 0, 64), loads(1, 0, 0, 64)),
        *(loads(1, 1, 0, 16), loads(1, 1, 32, 8), loads(1, 1, 8, 2)),
    )


def test_a_clock_nobody_knows_is_refused() -> None:
    message = telemetry_pb2.NodeReport()
    message.jobs.add(job="j").attached.add(job="j", rank=0, world_size=1, clock="sundial")
    with pytest.raises(ValueError, match="sundial"):
        wire.report_from_message(message)
