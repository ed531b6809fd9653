"""The payload of a ring slot: the kind of a record and its fields in bytes.

None in a record is NaN in the payload. The `pack_*` functions take fields instead of a record: for
the training process, where creating a frozen record costs more than packing and writing it.
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import astuple, fields
from functools import partial
from operator import attrgetter

from pacekeeper.core.telemetry.records import (
    LOADS_PER_RECORD,
    MAX_DOCUMENTS,
    MICRO_BATCH_COLUMNS,
    PAYLOAD_BYTES,
    SAVE_OUTCOMES,
    TIME_BOUNDS,
    WHOLE_SHARE,
    CheckpointRecord,
    ExpertLoadRecord,
    MicroBatchRecord,
    PairRecord,
    PlanAppliedRecord,
    PlanRefusedRecord,
    ProbeRecord,
    RankExitRecord,
    Record,
    RecordKind,
    SnapshotRecord,
    StepRecord,
    payload_of,
)
from pacekeeper.core.text import one_line

_NAN = math.nan
_NO_LOADS = (0,) * LOADS_PER_RECORD

_SLOT_COLUMNS = sorted(MICRO_BATCH_COLUMNS.items(), key=lambda column: column[1].place)
_MICRO_BATCH, _IS_MICRO_BATCH = payload_of(
    RecordKind.MICRO_BATCH, "".join(column.code for _, column in _SLOT_COLUMNS)
)
_MICRO_BATCH_NAMES = tuple(name for name, _ in _SLOT_COLUMNS)
_MICRO_BATCH_VALUES = attrgetter(*MICRO_BATCH_COLUMNS)
_FIXED_POINT = tuple((column.place, column.one) for _, column in _SLOT_COLUMNS if column.one)
_OPTIONAL = tuple(each.name for each in fields(MicroBatchRecord) if each.default is None)
_STEP, _IS_STEP = payload_of(RecordKind.STEP, "IIIIQddddQQdd")
_EXPERT_LOAD, _IS_EXPERT_LOAD = payload_of(RecordKind.EXPERT_LOAD, f"IIIHHH2x{LOADS_PER_RECORD}I")
_PLAN_APPLIED, _IS_PLAN_APPLIED = payload_of(RecordKind.PLAN_APPLIED, "IIIIIIQdd")
_PROBE, _IS_PROBE = payload_of(RecordKind.PROBE, "III4xQddddd")
_PAIR, _IS_PAIR = payload_of(RecordKind.PAIR, "IIIIQQd")
_RANK_EXIT, _IS_RANK_EXIT = payload_of(RecordKind.RANK_EXIT, "IIiId")
REASON_BYTES = 96
_PLAN_REFUSED, _IS_PLAN_REFUSED = payload_of(RecordKind.PLAN_REFUSED, f"IIII{REASON_BYTES}s")
CAUSE_BYTES = 72
_CHECKPOINT, _IS_CHECKPOINT = payload_of(RecordKind.CHECKPOINT, f"IIIIQdd{CAUSE_BYTES}s")
_SNAPSHOT, _IS_SNAPSHOT = payload_of(RecordKind.SNAPSHOT, f"IIIIQdd{CAUSE_BYTES}s")
_KIND = struct.Struct("<H")


def pack(record: Record) -> bytes:
    """The payload (PAYLOAD_BYTES) of `record`. Raises struct.error on overflow."""
    match record:
        case MicroBatchRecord():
            return pack_micro_batch(*_MICRO_BATCH_VALUES(record))
        case StepRecord():
            return pack_step(*astuple(record))
        case ExpertLoadRecord():
            if len(record.counts) > LOADS_PER_RECORD:
                raise ValueError(f"a ring's record holds 1 to {LOADS_PER_RECORD} loads")
            assert record.num_ranks == 1, "a ring is one rank's"
            return pack_expert_load(*astuple(record)[:-1])
        case PlanAppliedRecord():
            return pack_plan_applied(*astuple(record))
        case ProbeRecord():
            return _PROBE.pack(_IS_PROBE, *astuple(record))
        case PairRecord():
            return _PAIR.pack(_IS_PAIR, *astuple(record))
        case PlanRefusedRecord():
            *numbers, reason = astuple(record)
            encoded = reason.encode(errors="replace")[:REASON_BYTES]
            return _PLAN_REFUSED.pack(_IS_PLAN_REFUSED, *numbers, encoded)
        case CheckpointRecord() | SnapshotRecord():
            is_stored = isinstance(record, CheckpointRecord)
            return (_CHECKPOINT if is_stored else _SNAPSHOT).pack(
                _IS_CHECKPOINT if is_stored else _IS_SNAPSHOT,
                record.rank,
                record.step,
                record.generation,
                SAVE_OUTCOMES.index(record.outcome),
                record.size_bytes,
                record.duration_s,
                record.ended_mono_s,
                record.reason.encode(errors="replace")[:CAUSE_BYTES],
            )
        case RankExitRecord():
            return _RANK_EXIT.pack(_IS_RANK_EXIT, *astuple(record))


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
    head_tokens: int,
    tensor_share: float,
    *rows_over: int,
) -> bytes:
    """The payload of a MicroBatchRecord whose fields are the arguments, in its order.

    It runs in every micro-batch of the training process. A loop over MICRO_BATCH_COLUMNS takes 3.5
    times as long (4.6 us instead of 1.3), so the order of the slot is written out; a test compares
    it with the schema.
    """
    return _MICRO_BATCH.pack(
        _IS_MICRO_BATCH,
        rank,
        step,
        micro_batch,
        generation,
        num_active_experts,
        num_documents if num_documents < MAX_DOCUMENTS else MAX_DOCUMENTS,
        int(tensor_share * WHOLE_SHARE + 0.5),
        tokens,
        head_tokens,
        expert_rows,
        sum_len_squared,
        compute_s,
        _NAN if cpu_s is None else cpu_s,
        _NAN if run_queue_s is None else run_queue_s,
        _NAN if stall_s is None else stall_s,
        _NAN if wait_s is None else wait_s,
        ended_mono_s,
        *rows_over,
    )


def pack_step(
    rank: int,
    step: int,
    generation: int,
    duration_s: float,
    tokens: int,
    loss: float | None,
    is_redone: bool,
    ended_mono_s: float,
    transfer_s: float | None,
    transfer_bytes: int,
    sum_len_squared: int,
    input_wait_s: float | None,
    host_s: float | None,
) -> bytes:
    """The payload of a StepRecord of these fields, in its order."""
    return _STEP.pack(
        _IS_STEP,
        rank,
        step,
        generation,
        1 if is_redone else 0,  # whatever kind of truth it is
        tokens,
        duration_s,
        _NAN if loss is None else loss,
        ended_mono_s,
        _NAN if transfer_s is None else transfer_s,
        transfer_bytes,
        sum_len_squared,
        _NAN if input_wait_s is None else input_wait_s,
        _NAN if host_s is None else host_s,
    )


def pack_expert_load(
    rank: int, step: int, generation: int, layer: int, first_expert: int, counts: Sequence[int]
) -> bytes:
    """The payload of an ExpertLoadRecord of these fields, in its order."""
    return _EXPERT_LOAD.pack(
        _IS_EXPERT_LOAD,
        rank,
        step,
        generation,
        layer,
        first_expert,
        len(counts),
        *counts,
        *_NO_LOADS[len(counts) :],
    )


def pack_plan_applied(
    rank: int,
    step: int,
    generation: int,
    previous_generation: int,
    duration_s: float,
    moved_bytes: int,
    is_regroup: bool,
    layout_crc: int,
    ended_mono_s: float,
) -> bytes:
    """The payload of a PlanAppliedRecord of these fields, in its order."""
    return _PLAN_APPLIED.pack(
        _IS_PLAN_APPLIED,
        rank,
        step,
        generation,
        previous_generation,
        1 if is_regroup else 0,
        layout_crc,
        moved_bytes,
        duration_s,
        ended_mono_s,
    )


def unpack(payload: bytes) -> Record:
    """Parse the record in a slot's payload.

    Raises:
        ValueError: wrong size, unknown kind or impossible values.
    """
    if len(payload) != PAYLOAD_BYTES:
        raise ValueError(f"a payload has {PAYLOAD_BYTES} bytes, got {len(payload)}")
    (kind,) = _KIND.unpack_from(payload)
    reader = _READERS.get(kind)
    if reader is None:
        raise ValueError(f"unknown record kind {kind}")
    record = reader(payload)
    for name, (least, most) in TIME_BOUNDS.items():
        value = getattr(record, name, None)
        if value is not None and not least <= value <= most:  # the wire would refuse all with it
            raise ValueError(f"impossible duration in {record}")
    moments = [getattr(record, name, 0.0) for name in ("ended_mono_s", "detected_mono_s")]
    if not all(math.isfinite(value) for value in moments):
        raise ValueError(f"impossible time in {record}")
    return record


def _read_micro_batch(payload: bytes) -> Record:
    _, *slot = _MICRO_BATCH.unpack(payload)
    for place, one in _FIXED_POINT:
        slot[place] /= one
    values = dict(zip(_MICRO_BATCH_NAMES, slot, strict=True))
    for name in _OPTIONAL:
        values[name] = _to_optional(values[name])
    return MicroBatchRecord(**values)


def _read_step(payload: bytes) -> Record:
    _, rank, step, generation, flags, tokens, *times, moved, squared, input_s, host_s = (
        _STEP.unpack(payload)
    )
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
        transfer_bytes=moved,
        sum_len_squared=squared,
        input_wait_s=_to_optional(input_s),
        host_s=_to_optional(host_s),
    )


def _read_expert_load(payload: bytes) -> Record:
    _, rank, step, generation, layer, first, count, *counts = _EXPERT_LOAD.unpack(payload)
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


def _read_plan_applied(payload: bytes) -> Record:
    _, rank, step, generation, previous, flags, crc, moved, duration_s, ended_mono_s = (
        _PLAN_APPLIED.unpack(payload)
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


def _read_plan_refused(payload: bytes) -> Record:
    _, rank, generation, plan_generation, layout_crc, encoded = _PLAN_REFUSED.unpack(payload)
    return PlanRefusedRecord(
        rank=rank,
        generation=generation,
        plan_generation=plan_generation,
        layout_crc=layout_crc,
        reason=_to_text(encoded),
    )


def _read_save(
    kind: type[CheckpointRecord] | type[SnapshotRecord], payload: bytes
) -> CheckpointRecord | SnapshotRecord:
    _, rank, step, generation, outcome, *others, encoded = _CHECKPOINT.unpack(payload)
    if outcome >= len(SAVE_OUTCOMES):
        raise ValueError(f"unknown outcome {outcome} of a checkpoint")
    size, duration_s, ended_mono_s = others
    return kind(
        rank=rank,
        step=step,
        generation=generation,
        outcome=SAVE_OUTCOMES[outcome],
        duration_s=duration_s,
        size_bytes=size,
        reason=_to_text(encoded),
        ended_mono_s=ended_mono_s,
    )


def _read_plainly(kind: Callable[..., Record], layout: struct.Struct, payload: bytes) -> Record:
    """Parse a record whose payload holds its fields unchanged and in order."""
    names = (field.name for field in fields(kind))  # type: ignore[arg-type]
    return kind(**dict(zip(names, layout.unpack(payload)[1:], strict=True)))


_READERS: dict[int, Callable[[bytes], Record]] = {
    RecordKind.MICRO_BATCH: _read_micro_batch,
    RecordKind.STEP: _read_step,
    RecordKind.EXPERT_LOAD: _read_expert_load,
    RecordKind.PLAN_APPLIED: _read_plan_applied,
    RecordKind.PLAN_REFUSED: _read_plan_refused,
    RecordKind.CHECKPOINT: partial(_read_save, CheckpointRecord),
    RecordKind.SNAPSHOT: partial(_read_save, SnapshotRecord),
    RecordKind.RANK_EXIT: partial(_read_plainly, RankExitRecord, _RANK_EXIT),
    RecordKind.PROBE: partial(_read_plainly, ProbeRecord, _PROBE),
    RecordKind.PAIR: partial(_read_plainly, PairRecord, _PAIR),
}


def _to_text(encoded: bytes) -> str:
    """Decode text without a cut-off last character and without the padding."""
    return one_line(encoded.decode(errors="ignore").rstrip("\0"))


def _to_optional(value: float) -> float | None:
    return None if math.isnan(value) else value
