"""The bodies of records, at most 112 bytes each in a ring slot. Pure: values in, bytes out.

What is None in a record is a NaN in its body.
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import astuple, fields
from enum import IntEnum
from functools import partial

from pacekeeper.core.records import (
    DURATIONS,
    LOADS_PER_RECORD,
    ExpertLoadRecord,
    MicroBatchRecord,
    PlanAppliedRecord,
    PlanRefusedRecord,
    ProbeRecord,
    RankExitRecord,
    Record,
    StepRecord,
)

BODY_BYTES = 112
WHOLE_SHARE = 1 << 15  # a tensor share of 1 in a slot: shares of 2^k virtual shards are exact
MOST_DOCUMENTS = 0xFFFF  # a slot has room for: more count as so many


class RecordKind(IntEnum):
    """Numbers on disk: never reuse one."""

    MICRO_BATCH = 1
    STEP = 2
    EXPERT_LOAD = 3
    PLAN_APPLIED = 4
    RANK_EXIT = 5
    PROBE = 6
    PLAN_REFUSED = 7


_MICRO_BATCH = struct.Struct("<IIIIIHHQQQddddddIIII")
_STEP = struct.Struct("<IIIIQddddQ")
_EXPERT_LOAD = struct.Struct(f"<IIIHHHH{LOADS_PER_RECORD}I")
_PLAN_APPLIED = struct.Struct("<IIIIIIQdd")
_PROBE = struct.Struct("<III4xQddddd")
_RANK_EXIT = struct.Struct("<IIiId")
_PLAN_REFUSED = struct.Struct("<IIII")  # and the reason, to the end of the body
REASON_BYTES = BODY_BYTES - _PLAN_REFUSED.size


def pack(record: Record) -> tuple[RecordKind, bytes]:
    """The kind and the body (at most BODY_BYTES) of `record`. Raises struct.error on overflow."""
    match record:
        case MicroBatchRecord():
            return RecordKind.MICRO_BATCH, pack_micro_batch(
                record.rank,
                record.step,
                record.micro_batch,
                record.generation,
                record.compute_s,
                record.tokens,
                record.sum_len_squared,
                record.expert_rows,
                record.num_active_experts,
                record.cpu_s,
                record.run_queue_s,
                record.stall_s,
                record.wait_s,
                record.ended_mono_s,
                record.num_documents,
                record.tensor_share,
                (
                    record.rows_over_16,
                    record.rows_over_64,
                    record.rows_over_256,
                    record.rows_over_1024,
                ),
            )
        case StepRecord():
            return RecordKind.STEP, _STEP.pack(
                record.rank,
                record.step,
                record.generation,
                int(record.is_redone),
                record.tokens,
                record.duration_s,
                _from_optional(record.loss),
                record.ended_mono_s,
                _from_optional(record.transfer_s),
                record.transfer_bytes,
            )
        case ExpertLoadRecord():
            return RecordKind.EXPERT_LOAD, _pack_expert_load(record)
        case PlanAppliedRecord():
            return RecordKind.PLAN_APPLIED, _PLAN_APPLIED.pack(
                record.rank,
                record.step,
                record.generation,
                record.previous_generation,
                int(record.is_regroup),
                record.layout_crc,
                record.moved_bytes,
                record.duration_s,
                record.ended_mono_s,
            )
        case ProbeRecord():
            return RecordKind.PROBE, _PROBE.pack(*astuple(record))
        case PlanRefusedRecord():
            return RecordKind.PLAN_REFUSED, _pack_plan_refused(record)
        case RankExitRecord():
            return RecordKind.RANK_EXIT, _RANK_EXIT.pack(*astuple(record))


def pack_micro_batch(
    rank: int,
    step: int,
    micro_batch: int,
    generation: int,
    compute_s: float,
    tokens: int,
    sum_len_squared: int,
    expert_rows: int,
    num_active_experts: int,
    cpu_s: float | None,
    run_queue_s: float | None,
    stall_s: float | None,
    wait_s: float | None,
    ended_mono_s: float,
    num_documents: int,
    tensor_share: float,
    rows_over: Sequence[int],
) -> bytes:
    """The body of a MicroBatchRecord of these fields, in its order, without making one.

    For the seam: a frozen record of 20 fields costs more than packing and writing it.
    """
    return _MICRO_BATCH.pack(
        rank,
        step,
        micro_batch,
        generation,
        num_active_experts,
        num_documents if num_documents < MOST_DOCUMENTS else MOST_DOCUMENTS,
        int(tensor_share * WHOLE_SHARE + 0.5),
        tokens,
        sum_len_squared,
        expert_rows,
        compute_s,
        math.nan if cpu_s is None else cpu_s,
        math.nan if run_queue_s is None else run_queue_s,
        math.nan if stall_s is None else stall_s,
        math.nan if wait_s is None else wait_s,
        ended_mono_s,
        *rows_over,
    )


def unpack(kind: int, body: bytes) -> Record:
    """The record in a slot's body. Raises ValueError for an unknown kind or impossible values."""
    try:
        reader = _READERS[RecordKind(kind)]
    except (ValueError, KeyError):
        raise ValueError(f"unknown record kind {kind}") from None
    try:
        record = reader(body)
    except struct.error:
        raise ValueError(f"a body of {len(body)} bytes is no record of kind {kind}") from None
    durations = [getattr(record, name, 0.0) for name in DURATIONS]
    if not all(math.isfinite(value) and value >= 0.0 for value in durations):
        raise ValueError(f"impossible duration in {record}")
    moments = [getattr(record, name, 0.0) for name in ("ended_mono_s", "detected_mono_s")]
    if not all(math.isfinite(value) for value in moments):
        raise ValueError(f"impossible time in {record}")
    return record


def _read_micro_batch(body: bytes) -> Record:
    rank, step, micro_batch, generation, active, documents, share, tokens, squared, rows, *more = (
        _MICRO_BATCH.unpack_from(body)
    )
    compute_s, cpu_s, run_queue_s, stall_s, wait_s, ended_mono_s, *over = more
    return MicroBatchRecord(
        rank=rank,
        step=step,
        micro_batch=micro_batch,
        generation=generation,
        compute_s=compute_s,
        tokens=tokens,
        sum_len_squared=squared,
        expert_rows=rows,
        num_active_experts=active,
        cpu_s=_to_optional(cpu_s),
        run_queue_s=_to_optional(run_queue_s),
        stall_s=_to_optional(stall_s),
        wait_s=_to_optional(wait_s),
        ended_mono_s=ended_mono_s,
        num_documents=documents,
        tensor_share=share / WHOLE_SHARE,
        rows_over_16=over[0],
        rows_over_64=over[1],
        rows_over_256=over[2],
        rows_over_1024=over[3],
    )


def _read_step(body: bytes) -> Record:
    rank, step, generation, flags, tokens, *times, transfer_bytes = _STEP.unpack_from(body)
    duration_s, loss, ended_mono_s, transfer_s = times
    return StepRecord(
        rank=rank,
        step=step,
        generation=generation,
        duration_s=duration_s,
        tokens=tokens,
        loss=_to_optional(loss),
        is_redone=bool(flags & 1),
        ended_mono_s=ended_mono_s,
        transfer_s=_to_optional(transfer_s),
        transfer_bytes=transfer_bytes,
    )


def _pack_expert_load(record: ExpertLoadRecord) -> bytes:
    counts = record.counts + (0,) * (LOADS_PER_RECORD - len(record.counts))
    return _EXPERT_LOAD.pack(
        record.rank,
        record.step,
        record.generation,
        record.layer,
        record.first_expert,
        len(record.counts),
        0,
        *counts,
    )


def _read_expert_load(body: bytes) -> Record:
    rank, step, generation, layer, first, count, _, *counts = _EXPERT_LOAD.unpack_from(body)
    if count > LOADS_PER_RECORD:
        raise ValueError(f"{count} loads in a record of {LOADS_PER_RECORD}")
    return ExpertLoadRecord(
        rank=rank,
        step=step,
        generation=generation,
        layer=layer,
        first_expert=first,
        counts=tuple(counts[:count]),
    )


def _read_plan_applied(body: bytes) -> Record:
    rank, step, generation, previous, flags, crc, moved, duration_s, ended_mono_s = (
        _PLAN_APPLIED.unpack_from(body)
    )
    return PlanAppliedRecord(
        rank=rank,
        step=step,
        generation=generation,
        previous_generation=previous,
        duration_s=duration_s,
        moved_bytes=moved,
        is_regroup=bool(flags & 1),
        layout_crc=crc,
        ended_mono_s=ended_mono_s,
    )


def _pack_plan_refused(record: PlanRefusedRecord) -> bytes:
    *numbers, reason = astuple(record)
    told: bytes = reason.encode(errors="replace")[:REASON_BYTES]
    return _PLAN_REFUSED.pack(*numbers) + told


def _read_plan_refused(body: bytes) -> Record:
    rank, generation, plan_generation, layout_crc = _PLAN_REFUSED.unpack_from(body)
    # A character that was cut in two is left out, and the zeros a slot pads with.
    reason = body[_PLAN_REFUSED.size :].decode(errors="ignore").rstrip("\0")
    return PlanRefusedRecord(
        rank=rank,
        generation=generation,
        plan_generation=plan_generation,
        layout_crc=layout_crc,
        reason=reason,
    )


def _read_plainly(kind: Callable[..., Record], layout: struct.Struct, body: bytes) -> Record:
    """A record whose body holds its fields as they are, in order."""
    names = (field.name for field in fields(kind))  # type: ignore[arg-type]
    return kind(**dict(zip(names, layout.unpack_from(body), strict=True)))


_READERS: dict[RecordKind, Callable[[bytes], Record]] = {
    RecordKind.MICRO_BATCH: _read_micro_batch,
    RecordKind.STEP: _read_step,
    RecordKind.EXPERT_LOAD: _read_expert_load,
    RecordKind.PLAN_APPLIED: _read_plan_applied,
    RecordKind.PLAN_REFUSED: _read_plan_refused,
    RecordKind.RANK_EXIT: partial(_read_plainly, RankExitRecord, _RANK_EXIT),
    RecordKind.PROBE: partial(_read_plainly, ProbeRecord, _PROBE),
}


def _from_optional(value: float | None) -> float:
    return math.nan if value is None else value


def _to_optional(value: float) -> float | None:
    return None if math.isnan(value) else value
