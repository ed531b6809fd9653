"""Converts reports, attachments and plans between messages and the plain values of `core`.

Called by the agent's uplink and the controller's ingest. `records.py` converts records to columns,
`samples.py` the samples of devices and hosts.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import chain

from pacekeeper.core.layout.codec import encode_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.pipeline_schedule import Schedule
from pacekeeper.core.telemetry.attachment import (
    JOB_NAME_RULE,
    Attachment,
    Clock,
    ModelShape,
    is_job_name,
)
from pacekeeper.core.telemetry.microbatch_table import MicroBatchTable
from pacekeeper.core.telemetry.node_report import (
    JobReport,
    NodeReport,
    PlanFile,
)
from pacekeeper.core.telemetry.records import (
    LOADS_PER_RECORD,
    ExpertLoadRecord,
    MicroBatchRecord,
    Record,
)
from pacekeeper.core.text import one_line
from pacekeeper.protos import control_pb2, telemetry_pb2
from pacekeeper.protos.convert.plain import message_of
from pacekeeper.protos.convert.records import (
    KINDS,
    MAX_RECORDS,
    fill_columns,
    loads_from_columns,
    micro_batches_in,
    num_rows,
    records_in,
)
from pacekeeper.protos.convert.samples import (
    UnreadSamples,
    device_from_message,
    device_to_message,
    health_from_message,
    host_from_message,
    host_to_message,
)
from pacekeeper.protos.convert.signs import MAX_STACKS, phases_from_messages, stack_from_message

PROTOCOL_VERSION = 2  # since 2 agents fetch large layouts by a call of their own
_NUMBER_OF_SCHEDULE: dict[Schedule | None, telemetry_pb2.PipelineSchedule] = {
    None: telemetry_pb2.PIPELINE_SCHEDULE_UNKNOWN,
    Schedule.ONE_F_ONE_B: telemetry_pb2.PIPELINE_SCHEDULE_ONE_F_ONE_B,
    Schedule.INTERLEAVED: telemetry_pb2.PIPELINE_SCHEDULE_INTERLEAVED,
    Schedule.ZERO_BUBBLE: telemetry_pb2.PIPELINE_SCHEDULE_ZERO_BUBBLE,
}
# Other numbers are schedules that this version does not know.
_SCHEDULE_OF_NUMBER = {
    telemetry_pb2.PIPELINE_SCHEDULE_UNSPECIFIED: Schedule.ONE_F_ONE_B,
    **{number: schedule for schedule, number in _NUMBER_OF_SCHEDULE.items()},
}
_PLAIN_SHAPE_FIELDS = tuple(f.name for f in fields(ModelShape) if f.name != "schedule")
MAX_CALLS_PER_CONNECTION = 128
MAX_PARTS = {"jobs": 1024, "devices": 1024}  # a few bytes each, and a millisecond to look at
HANDSHAKE_MS = 20_000
CONNECTION_GRACE_MS = 5_000  # for calls that are open when a connection is over

# The BDP probe answers each small batch with pings: most of the network work of periodic messages.
_COMMON = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
)
GRPC_OPTIONS_CLIENT = (
    *_COMMON,
    ("grpc.keepalive_permit_without_calls", 1),
    # The controller is in the private network: ignore the proxy of the environment.
    ("grpc.enable_http_proxy", 0),
    # One connection per channel: an agent's calls go to the ingest process of its stream.
    ("grpc.use_local_subchannel_pool", 1),
)
GRPC_OPTIONS_SERVER = (
    *_COMMON,
    # After a restart all agents reconnect at once; the defaults would cancel half of them.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
    # Seconds; longer than any client waits.
    ("grpc.server_max_unrequested_time_in_server", 120),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Otherwise a second controller could bind the same port.
    ("grpc.so_reuseport", 0),
)


def server_options(
    max_message_bytes: int, connection_s: float | None
) -> tuple[tuple[str, int], ...]:
    """A server's options. `connection_s`: a connection is made anew after so long; None: never."""
    options = {**dict(GRPC_OPTIONS_SERVER), "grpc.max_receive_message_length": max_message_bytes}
    if connection_s is not None:
        options["grpc.max_concurrent_streams"] = MAX_CALLS_PER_CONNECTION
        options["grpc.server_handshake_timeout_ms"] = HANDSHAKE_MS
        options["grpc.max_connection_age_ms"] = round(connection_s * 1e3)
        options["grpc.max_connection_age_grace_ms"] = CONNECTION_GRACE_MS
    return tuple(options.items())


def report_to_message(report: NodeReport) -> telemetry_pb2.NodeReport:
    """The message of a report, records as packed columns."""
    return telemetry_pb2.NodeReport(
        sequence=report.sequence,
        sent_mono_s=report.sent_mono_s,
        jobs=[_job_to_message(job) for job in report.jobs],
        devices=[device_to_message(sample) for sample in report.devices],
        host=None if report.host is None else host_to_message(report.host),
        health=message_of(telemetry_pb2.AgentHealth, report.health),
    )


def report_from_message(message: telemetry_pb2.NodeReport) -> NodeReport:
    """The report in a message. Raises ValueError, which names the invalid column."""
    _refuse_many_parts(message)
    return NodeReport(
        sequence=message.sequence,
        sent_mono_s=message.sent_mono_s,
        jobs=tuple(map(_with_records, _jobs_from_messages(message.jobs))),
        devices=tuple(device_from_message(sample) for sample in message.devices),
        host=host_from_message(message.host) if message.HasField("host") else None,
        health=health_from_message(message.health),
    )


def report_from_parts(parts: telemetry_pb2.NodeReportParts) -> NodeReport:
    """The report in a message, its samples and health still encoded.

    The bytes must have been parsed as a NodeReport before, so that decoding them later cannot fail.
    Raises as `report_from_message`.
    """
    _refuse_many_parts(parts)
    return NodeReport(
        sequence=parts.sequence,
        sent_mono_s=parts.sent_mono_s,
        jobs=_jobs_from_messages(parts.jobs) if parts.jobs else (),
        unread=UnreadSamples(parts),
    )


def _refuse_many_parts(message: telemetry_pb2.NodeReport | telemetry_pb2.NodeReportParts) -> None:
    for name, most in MAX_PARTS.items():
        if len(getattr(message, name)) > most:
            raise ValueError(f"more than {most} {name} in one report")


def _jobs_from_messages(messages: Iterable[telemetry_pb2.JobReport]) -> tuple[JobReport, ...]:
    jobs, num_records = list[JobReport](), 0
    for job in messages:
        jobs.append(_job_from_message(job))
        num_records += len(jobs[-1].records) + sum(map(len, jobs[-1].micro_batches))
        if num_records > MAX_RECORDS:
            raise ValueError(f"more than {MAX_RECORDS} records in one report")
    return tuple(jobs)


def _with_records(job: JobReport) -> JobReport:
    """The same job report with its micro-batches as records."""
    records = chain.from_iterable(table.records() for table in job.micro_batches)
    return replace(job, records=(*records, *job.records), micro_batches=())


def offer_to_message(
    job: str, layout: Layout, base_generation: int, run_id: int = 0
) -> control_pb2.OfferPlan:
    """The offer of a layout, with the digest that ranks check."""
    data = encode_layout(layout)
    return control_pb2.OfferPlan(
        job=job,
        generation=layout.generation,
        base_generation=base_generation,
        layout_json=data,
        sha256=hashlib.sha256(data).digest(),
        run_id=run_id,
    )


def offer_from_message(message: control_pb2.OfferPlan) -> PlanFile:
    """The plan in a message. Raises ValueError if its digest does not match."""
    if hashlib.sha256(message.layout_json).digest() != message.sha256:
        raise ValueError(
            f"plan {message.generation} of job {message.job!r} does not match its digest"
        )
    return PlanFile(
        job=message.job,
        generation=message.generation,
        base_generation=message.base_generation,
        data=message.layout_json,
        sha256=message.sha256,
        run_id=message.run_id,
    )


def _job_to_message(job: JobReport) -> telemetry_pb2.JobReport:
    message = telemetry_pb2.JobReport(
        job=job.job,
        run_id=job.run_id,
        attached=[attachment_to_message(a) for a in job.attached],
        layouts=[
            telemetry_pb2.LayoutFile(generation=generation, layout_json=data)
            for generation, data in job.layouts
        ],
        phases=[message_of(telemetry_pb2.RankPhase, phase) for phase in job.phases],
        stacks=[message_of(telemetry_pb2.RankStack, stack) for stack in job.stacks],
    )
    for column_group, kind in KINDS:
        records = [record for record in job.records if isinstance(record, kind)]
        if records:
            fill_columns(getattr(message, column_group), records)
    for load in job.records:
        if isinstance(load, ExpertLoadRecord):
            columns = message.expert_loads
            for name in ("rank", "step", "generation", "layer", "first_expert"):
                getattr(columns, name).append(getattr(load, name))
            columns.num_counts.append(len(load.counts))
            columns.counts.extend(load.counts)
            columns.num_ranks.append(load.num_ranks)
    return message


def _job_from_message(message: telemetry_pb2.JobReport) -> JobReport:
    if not is_job_name(message.job):
        raise ValueError(f"job name {message.job!r:.100}: expected {JOB_NAME_RULE}")
    records: list[Record] = []
    tables = tuple[MicroBatchTable, ...]()
    for column_group, kind in KINDS:
        if not message.HasField(column_group):
            continue
        columns, where = getattr(message, column_group), f"{message.job} {column_group}"
        if kind is MicroBatchRecord:
            told = micro_batches_in(columns, where)
            tables = () if told is None else (told,)
        else:
            records += records_in(columns, kind, where)
    if message.HasField("expert_loads"):
        loads, most = message.expert_loads, LOADS_PER_RECORD * MAX_RECORDS
        num_rows(loads, f"{message.job} expert_loads")
        records += loads_from_columns(loads, message.job, most_counts=most)
    return JobReport(
        job=message.job,
        run_id=message.run_id,
        attached=tuple(_attachment_from_message(a) for a in message.attached),
        records=tuple(records),
        micro_batches=tables,
        layouts=tuple((f.generation, f.layout_json) for f in message.layouts),
        phases=tuple(phases_from_messages(message.phases, message.job)),
        stacks=tuple(map(stack_from_message, message.stacks[:MAX_STACKS])),
    )


def attachment_to_message(attachment: Attachment) -> telemetry_pb2.Attachment:
    """The message of an attachment. Raises ValueError for values that exceed the wire format."""
    message = message_of(telemetry_pb2.Attachment, attachment, model=None)
    if attachment.model is not None:
        for name in _PLAIN_SHAPE_FIELDS:
            setattr(message.model, name, getattr(attachment.model, name))
        message.model.schedule = _NUMBER_OF_SCHEDULE[attachment.model.schedule]
    return message


def _attachment_from_message(message: telemetry_pb2.Attachment) -> Attachment:
    model = None
    if message.HasField("model"):
        plain = {name: getattr(message.model, name) for name in _PLAIN_SHAPE_FIELDS}
        model = ModelShape(**plain, schedule=_SCHEDULE_OF_NUMBER.get(message.model.schedule))
    return Attachment(
        job=message.job,
        rank=message.rank,
        world_size=message.world_size,
        pid=message.pid,
        role=one_line(message.role),
        clock=Clock(message.clock),
        device_uuid=one_line(message.device_uuid),
        model=model,
        run_id=message.run_id,
        can_probe=message.can_probe,
        plan_kinds=one_line(message.plan_kinds),
    )
