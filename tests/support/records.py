"""Hypothesis strategies for every record a rank can write, and a typical attachment."""

from hypothesis import strategies as st

from pacekeeper.core.telemetry.attachment import Attachment, Clock, ModelShape
from pacekeeper.core.telemetry.records import (
    MAX_S,
    SAVE_OUTCOMES,
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
    SnapshotRecord,
    StepRecord,
)
from pacekeeper.core.text import one_line

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
seconds = st.floats(0, MAX_S)
maybe = st.none() | st.floats(-MAX_S, MAX_S)
losses = st.none() | st.floats(allow_nan=False)


def printable(most: int) -> st.SearchStrategy[str]:
    """A reason as it comes through: one line."""
    return st.text(st.characters(codec="utf-8"), max_size=most).map(one_line)


records: st.SearchStrategy[Record] = st.one_of(
    st.builds(
        MicroBatchRecord, rank=u32, step=u32, micro_batch=u32, generation=u32,
        compute_s=seconds, tokens=u32, sum_len_squared=u64, expert_rows=u32,
        num_active_experts=u32, cpu_s=maybe, run_queue_s=maybe, stall_s=maybe, wait_s=maybe,
        ended_mono_s=seconds, num_documents=st.integers(0, 2**16 - 1),
        head_tokens=st.integers(0, 2**32 - 1),
        tensor_share=st.integers(0, WHOLE_SHARE).map(lambda part: part / WHOLE_SHARE),
        rows_over_16=u32, rows_over_64=u32, rows_over_256=u32, rows_over_1024=u32,
    ),
    st.builds(
        StepRecord, rank=u32, step=u32, generation=u32, duration_s=seconds, tokens=u64,
        loss=losses, is_redone=st.booleans(), ended_mono_s=seconds, transfer_s=maybe,
        transfer_bytes=u64, sum_len_squared=u64, input_wait_s=maybe,
        host_s=maybe,
    ),
    st.builds(
        ExpertLoadRecord, rank=u32, step=u32, generation=u32, layer=st.integers(0, 65535),
        first_expert=st.integers(0, 65535),
        counts=st.lists(u32, min_size=1, max_size=16).map(tuple),
    ),
    st.builds(
        PlanAppliedRecord, rank=u32, step=u32, generation=u32, previous_generation=u32,
        duration_s=seconds, moved_bytes=u64, is_regroup=st.booleans(), layout_crc=u32,
        ended_mono_s=seconds,
    ),
    st.builds(
        PlanRefusedRecord, rank=u32, generation=u32, plan_generation=u32, layout_crc=u32,
        reason=printable(24),
    ),
    *(st.builds(
        kind, rank=u32, step=u32, generation=u32,
        outcome=st.sampled_from(SAVE_OUTCOMES), duration_s=seconds, size_bytes=u64,
        ended_mono_s=seconds,
        reason=printable(18),
    ) for kind in (CheckpointRecord, SnapshotRecord)),
    st.builds(
        ProbeRecord, rank=u32, step=u32, generation=u32, number=u64, gemm_s=seconds,
        copy_s=seconds, exchange_s=seconds, duration_s=seconds, ended_mono_s=seconds,
    ),
    st.builds(
        PairRecord, rank=u32, step=u32, generation=u32, peer=u32, number=u64, num_bytes=u64,
        exchange_s=seconds,
    ),
    st.builds(
        RankExitRecord, rank=u32, pid=u32, exit_code=st.integers(-(2**31), 2**31 - 1),
        signal=u32, detected_mono_s=seconds,
    ),
)  # fmt: skip

SHAPE = ModelShape(
    num_layers=4, num_experts=8, experts_per_token=2, rows_per_step=32, slots_per_rank=8,
    expert_bytes=100, dense_bytes=1000,
)  # fmt: skip
ATTACHMENT = Attachment(job="j", rank=1, world_size=4, pid=7, clock=Clock.EMULATED, model=SHAPE)
