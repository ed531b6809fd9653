"""Between plain values and messages: the only place that knows both. NaN on the wire is None here.

Columns of a message are equally long; what is not is the sender's fault and a ValueError naming it.
A column of defaults is left out: it costs nothing, and who does not know it is still understood.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from pacekeeper.core.layout import Layout
from pacekeeper.core.layout_codec import encode_layout
from pacekeeper.core.plain_text import one_line
from pacekeeper.core.records import (
    DURATIONS,
    LOADS_PER_RECORD,
    CheckpointRecord,
    ExpertLoadRecord,
    MicroBatchRecord,
    PlanAppliedRecord,
    PlanRefusedRecord,
    ProbeRecord,
    RankExitRecord,
    Record,
    SnapshotRecord,
    StepRecord,
)
from pacekeeper.core.reports import (
    MAX_RECORDS_PER_REPORT,
    JobReport,
    NodeReport,
    PlanFile,
)
from pacekeeper.core.topology import (
    JOB_NAME_RULE,
    Attachment,
    Clock,
    ModelShape,
    is_job_name,
)
from pacekeeper.protos import control_pb2, telemetry_pb2
from pacekeeper.protos.load_columns import loads_from_columns
from pacekeeper.protos.samples import (
    UnreadSamples,
    device_from_message,
    device_to_message,
    health_from_message,
    host_from_message,
    host_to_message,
)

PROTOCOL_VERSION = 1
MAX_CALLS_PER_CONNECTION = 128
MAX_RECORDS = 4 * MAX_RECORDS_PER_REPORT  # in a report that is taken in
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
    # A controller is in the private network: the environment's proxy leads out of it.
    ("grpc.enable_http_proxy", 0),
    # A connection of its own for each channel: that of an agent's stream takes no other call.
    ("grpc.use_local_subchannel_pool", 1),
)
GRPC_OPTIONS_SERVER = (
    *_COMMON,
    # A restart brings all agents back at once: the defaults would cancel half of them.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
    # Seconds; who waits that long has given up by itself.
    ("grpc.server_max_unrequested_time_in_server", 120),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Else a second controller would share the port in silence.
    ("grpc.so_reuseport", 0),
)

T = TypeVar("T")
_NOT_NEGATIVE = (*DURATIONS, "tensor_share")
_MESSAGES: tuple[tuple[str, type[Any]], ...] = (
    ("micro_batches", MicroBatchRecord),
    ("steps", StepRecord),
    ("plans_applied", PlanAppliedRecord),
    ("plans_refused", PlanRefusedRecord),
    ("rank_exits", RankExitRecord),
    ("probes", ProbeRecord),
    ("checkpoints", CheckpointRecord),
    ("snapshots", SnapshotRecord),
)
# Asked of the classes once: at each report it would cost more than the report itself.
_NAMES = {kind: tuple(field.name for field in fields(kind)) for _, kind in _MESSAGES}
_DEFAULTS: dict[type[Any], dict[str, Any]] = {
    kind: {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    for _, kind in _MESSAGES
}


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
    """A batch as packed columns."""
    health = report.health
    return telemetry_pb2.NodeReport(
        sequence=report.sequence,
        sent_mono_s=report.sent_mono_s,
        jobs=[_job_to_message(job) for job in report.jobs],
        devices=[device_to_message(sample) for sample in report.devices],
        host=None if report.host is None else host_to_message(report.host),
        health=telemetry_pb2.AgentHealth(
            nvml=health.nvml,
            num_devices=health.num_devices,
            records_read=health.records_read,
            records_lost=health.records_lost,
            records_corrupt=health.records_corrupt,
            batches_dropped=health.batches_dropped,
            unreadable=list(health.unreadable),
        ),
    )


def report_from_message(message: telemetry_pb2.NodeReport) -> NodeReport:
    """The batch in a message. Raises ValueError naming the column that is wrong."""
    _refuse_many_parts(message)
    return NodeReport(
        sequence=message.sequence,
        sent_mono_s=message.sent_mono_s,
        jobs=_jobs_from_messages(message.jobs),
        devices=tuple(device_from_message(sample) for sample in message.devices),
        host=host_from_message(message.host) if message.HasField("host") else None,
        health=health_from_message(message.health),
    )


def report_from_parts(parts: telemetry_pb2.NodeReportParts) -> NodeReport:
    """The same batch of which nobody has looked at the samples yet. Raises as the other does.

    The bytes must have been a whole NodeReport: what is read later is read without a doubt.
    """
    _refuse_many_parts(parts)
    return NodeReport(
        sequence=parts.sequence,
        sent_mono_s=parts.sent_mono_s,
        jobs=_jobs_from_messages(parts.jobs),
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
        num_records += len(jobs[-1].records)
        if num_records > MAX_RECORDS:
            raise ValueError(f"more than {MAX_RECORDS} records in one report")
    return tuple(jobs)


def offer_to_message(
    job: str, layout: Layout, base_generation: int, life: int = 0
) -> control_pb2.OfferPlan:
    """A plan, with the digest that the rank will check."""
    data = encode_layout(layout)
    return control_pb2.OfferPlan(
        job=job,
        generation=layout.generation,
        base_generation=base_generation,
        layout_json=data,
        sha256=hashlib.sha256(data).digest(),
        life=life,
    )


def offer_from_message(message: control_pb2.OfferPlan) -> PlanFile:
    """The plan in a message. Raises ValueError where it does not fit its digest."""
    if hashlib.sha256(message.layout_json).digest() != message.sha256:
        raise ValueError(
            f"plan {message.generation} of job {message.job!r} does not fit its digest"
        )
    return PlanFile(
        job=message.job,
        generation=message.generation,
        base_generation=message.base_generation,
        data=message.layout_json,
        sha256=message.sha256,
        life=message.life,
    )


def _job_to_message(job: JobReport) -> telemetry_pb2.JobReport:
    message = telemetry_pb2.JobReport(
        job=job.job,
        life=job.life,
        attached=[attachment_to_message(a) for a in job.attached],
        layouts=[
            telemetry_pb2.LayoutFile(generation=generation, layout_json=data)
            for generation, data in job.layouts
        ],
    )
    for column_group, kind in _MESSAGES:
        records = [record for record in job.records if isinstance(record, kind)]
        if records:
            _fill_columns(getattr(message, column_group), records)
    for load in job.records:
        if isinstance(load, ExpertLoadRecord):
            columns = message.expert_loads
            for name in ("rank", "step", "generation", "layer", "first_expert"):
                getattr(columns, name).append(getattr(load, name))
            columns.num_counts.append(len(load.counts))
            columns.counts.extend(load.counts)
            columns.num_ranks.append(load.num_ranks)
    return message


def _fill_columns(columns: Any, records: Sequence[Any]) -> None:
    for field in fields(records[0]):
        values = [getattr(record, field.name) for record in records]
        if all(value == field.default for value in values):
            continue
        getattr(columns, field.name).extend(math.nan if v is None else v for v in values)


def _job_from_message(message: telemetry_pb2.JobReport) -> JobReport:
    if not is_job_name(message.job):
        raise ValueError(f"job name {message.job!r:.100}: expected {JOB_NAME_RULE}")
    records: list[Record] = []
    for column_group, kind in _MESSAGES:
        if message.HasField(column_group):
            columns = getattr(message, column_group)
            records += _from_columns(columns, kind, f"{message.job} {column_group}")
    if message.HasField("expert_loads"):
        loads, most = message.expert_loads, LOADS_PER_RECORD * MAX_RECORDS
        _length(loads, "rank", f"{message.job} expert_loads")
        records += loads_from_columns(loads, message.job, most_counts=most)
    return JobReport(
        job=message.job,
        life=message.life,
        attached=tuple(_attachment_from_message(a) for a in message.attached),
        records=tuple(records),
        layouts=tuple((f.generation, f.layout_json) for f in message.layouts),
    )


def _from_columns(columns: Any, kind: type[T], where: str) -> list[T]:
    names, defaults = _NAMES[kind], _DEFAULTS[kind]
    length = _length(columns, names[0], where)
    told, values = list[str](), list[list[Any]]()
    for name in names:
        column = list(getattr(columns, name))
        if len(column) != length:
            if column or name not in defaults:
                raise ValueError(f"{where}: column {name} has {len(column)} entries, not {length}")
            continue  # all of them are what a record has by default
        if name in defaults and defaults[name] is None:
            column = [None if value != value else value for value in column]
        elif column and isinstance(column[0], str):
            column = [one_line(value) for value in column]
        elif column and isinstance(column[0], float):
            _refuse_impossible(column, name, where)
        told.append(name)
        values.append(column)
    return [kind(**dict(zip(told, row, strict=True))) for row in zip(*values, strict=True)]


def _refuse_impossible(column: list[float], name: str, where: str) -> None:
    floor = 0.0 if name in _NOT_NEGATIVE else -math.inf
    if math.isfinite(sum(column)) and min(column) >= floor:
        return
    for value in column:
        if not (math.isfinite(value) and value >= floor):
            raise ValueError(f"{where}: impossible {name} {value}")


def _length(columns: Any, name: str, where: str) -> int:
    """How many records these columns hold. Few bytes can tell of more than the memory holds."""
    length = len(getattr(columns, name))
    if length > MAX_RECORDS:
        raise ValueError(f"{where}: {length} records, at most {MAX_RECORDS} may come at once")
    return length


def attachment_to_message(attachment: Attachment) -> telemetry_pb2.Attachment:
    """What a rank says of itself. Raises ValueError for values the wire has no room for."""
    message = telemetry_pb2.Attachment(
        job=attachment.job,
        rank=attachment.rank,
        world_size=attachment.world_size,
        pid=attachment.pid,
        role=attachment.role,
        clock=attachment.clock,
        device_uuid=attachment.device_uuid,
        life=attachment.life,
        can_probe=attachment.can_probe,
    )
    if attachment.model is not None:
        for field in fields(ModelShape):
            setattr(message.model, field.name, getattr(attachment.model, field.name))
    return message


def _attachment_from_message(message: telemetry_pb2.Attachment) -> Attachment:
    model = None
    if message.HasField("model"):
        model = ModelShape(**{f.name: getattr(message.model, f.name) for f in fields(ModelShape)})
    return Attachment(
        job=message.job,
        rank=message.rank,
        world_size=message.world_size,
        pid=message.pid,
        role=one_line(message.role),
        clock=Clock(message.clock),
        device_uuid=one_line(message.device_uuid),
        model=model,
        life=message.life,
        can_probe=message.can_probe,
    )
