"""The facts a rank reports, as values; `record_codec.py` has their bytes.

A value that was not measured is None. Times named `_mono_s` are read from the monotonic clock of
the record's own node and may be compared within that node only.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

LOADS_PER_RECORD = 16
SAVE_OUTCOMES = ("complete", "written", "skipped", "failed")
EXIT_UNKNOWN = -1  # the exit code of a process whose end nobody saw: no process ends with it
MAX_S = 1e6  # eleven days: sums and products of what is told stay finite
# The least and the most that a time may be, by its name.
TIME_BOUNDS = {
    **dict.fromkeys(("compute_s", "duration_s", "gemm_s", "copy_s", "exchange_s"), (0.0, MAX_S)),
    # Some of these are what is left of others, and clocks differ by a little.
    **dict.fromkeys(
        ("cpu_s", "run_queue_s", "stall_s", "wait_s", "transfer_s", "input_wait_s"),
        (-MAX_S, MAX_S),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRecord:
    """One micro-batch on one rank: the work it was given and the compute time between collectives.

    `compute_s` is what a device would report (CUDA events), never waiting for others.
    `sum_len_squared` is the sum over documents of squared length (attention work, tokens^2);
    `expert_rows` the token rows its local experts computed, all layers together;
    `num_active_experts` how many local experts got at least one row, all layers together.
    `rows_over_N`: the rows each local expert computed beyond its first N, added up the same way
    (core/telemetry/expert_row_features.py): how many rows lie where an expert's device is full.
    `num_documents`: 0 where not told. `tensor_share`: of all attention and dense layers, 0 to 1.
    `head_tokens`: those whose logits this rank computed, where only some stages do; else 0.
    """

    rank: int
    step: int
    micro_batch: int
    generation: int
    compute_s: float
    tokens: int
    sum_len_squared: int = 0
    expert_rows: int = 0
    num_active_experts: int = 0
    cpu_s: float | None = None
    run_queue_s: float | None = None
    stall_s: float | None = None  # wall - CPU - run queue: frozen
    wait_s: float | None = None  # inside collectives
    ended_mono_s: float = 0.0
    num_documents: int = 0
    head_tokens: int = 0
    tensor_share: float = 1.0
    rows_over_16: int = 0
    rows_over_64: int = 0
    rows_over_256: int = 0
    rows_over_1024: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step as this rank saw it; `tokens` and `loss` are of the global batch.

    So is `sum_len_squared`, 0 where not told. `duration_s` holds the wait for the step's input,
    wherever the trainer loads it; `input_wait_s` is this rank's own wait; None: not timed.
    `transfer_s`: own time in collectives that all ranks entered together (waiting for nobody), and
    `transfer_bytes` what was sent and received in them; None: no such collective was timed.
    """

    rank: int
    step: int
    generation: int
    duration_s: float
    tokens: int
    loss: float | None = None
    is_redone: bool = False
    ended_mono_s: float = 0.0
    transfer_s: float | None = None
    transfer_bytes: int = 0
    sum_len_squared: int = 0
    input_wait_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoadRecord:
    """Tokens this rank's own batch routed to experts first_expert, first_expert + 1, ...

    Those of `num_ranks` ranks of a node, of which `rank` is one, where an agent added them up. A
    ring's record holds LOADS_PER_RECORD at most; what follows each other is one on the wire's other
    side, whatever its length.
    """

    rank: int
    step: int
    generation: int
    layer: int
    first_expert: int
    counts: tuple[int, ...]
    num_ranks: int = 1

    def __post_init__(self) -> None:
        if not self.counts:
            raise ValueError("a record holds at least one load")
        if self.num_ranks < 1:
            raise ValueError("a load is that of a rank at least")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAppliedRecord:
    """This rank trains under `generation` from step `step` on; `is_regroup` after a death."""

    rank: int
    step: int
    generation: int
    previous_generation: int
    duration_s: float
    moved_bytes: int
    is_regroup: bool
    layout_crc: int
    ended_mono_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExitRecord:
    """A rank's process ended. `signal` is 0 for an exit by `exit_code`.

    The supervisor says it; where that was killed, the agent does, with `exit_code` EXIT_UNSEEN.
    """

    rank: int
    pid: int
    exit_code: int
    signal: int
    detected_mono_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecord:
    """What this rank read of the fixed probe that the controller asked for as `number`.

    Seconds of one matrix product and of one copy in memory, as the rank's clock tells them, and
    of one message to the next rank and from the one before; `duration_s`: of all of it.
    """

    rank: int
    step: int
    generation: int
    number: int
    gemm_s: float
    copy_s: float
    exchange_s: float
    duration_s: float
    ended_mono_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRefusedRecord:
    """This rank, which runs `generation`, can not follow the plan `plan_generation`.

    `layout_crc` names the plan's content. Of the reason a slot has room for the beginning.
    """

    rank: int
    generation: int
    plan_generation: int
    layout_crc: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _SaveRecord:
    rank: int
    step: int
    generation: int
    outcome: str
    duration_s: float
    size_bytes: int = 0
    reason: str = ""
    ended_mono_s: float = 0.0

    def __post_init__(self) -> None:
        if self.outcome not in SAVE_OUTCOMES:
            raise ValueError(f"outcome: expected one of {SAVE_OUTCOMES}, got {self.outcome!r:.40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord(_SaveRecord):
    """What became of this rank's part of the checkpoint of `step`: one of SAVE_OUTCOMES.

    "written": others are still at it; "skipped": the one before is still being written, for
    `duration_s` by now. Of the reason a slot has room for the beginning.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRecord(_SaveRecord):
    """The same of its part of a snapshot in memory: "complete" once its copy and the one that it
    keeps for another rank are there.
    """


SaveRecord = CheckpointRecord | SnapshotRecord
_OfStep = MicroBatchRecord | StepRecord | ExpertLoadRecord
_OfPlan = PlanAppliedRecord | PlanRefusedRecord
Record = _OfStep | _OfPlan | RankExitRecord | ProbeRecord | SaveRecord


PAYLOAD_BYTES = 116  # kind, two bytes that are zero, fields, zeros to the end


class RecordKind(IntEnum):
    """Numbers on disk: never reuse one."""

    MICRO_BATCH = 1
    STEP = 2
    EXPERT_LOAD = 3
    PLAN_APPLIED = 4
    RANK_EXIT = 5
    PROBE = 6
    PLAN_REFUSED = 7
    CHECKPOINT = 8
    SNAPSHOT = 9


def payload_of(kind: RecordKind, fields: str) -> tuple[struct.Struct, int]:
    """A whole payload with these fields, and its kind as the plain number that `struct` takes."""
    used = struct.Struct(f"<H2x{fields}").size
    return struct.Struct(f"<H2x{fields}{PAYLOAD_BYTES - used}x"), int(kind)
