"""The records that a rank writes into its ring; `record_codec.py` has their bytes.

A value that was not measured is None. Times named `_mono_s` come from the monotonic clock of the
record's own node and are comparable within that node only.
"""

import struct
from dataclasses import dataclass, field, fields
from enum import Enum, IntEnum, auto
from typing import NamedTuple

LOADS_PER_RECORD = 16
SAVE_OUTCOMES = ("complete", "written", "skipped", "failed")
EXIT_UNKNOWN = -1  # exit code of a process without known end: no real exit code
WHOLE_SHARE = 1 << 15  # a tensor share of 1 in a slot: shares of 2^k virtual shards are exact
MAX_DOCUMENTS = 0xFFFF  # that a slot has room for: more are stored as this
MAX_S = 1e6  # eleven days: sums and products of reported times stay finite
# The least and the most that a time may be, by its name.
TIME_BOUNDS = {
    **dict.fromkeys(("compute_s", "duration_s", "gemm_s", "copy_s", "exchange_s"), (0.0, MAX_S)),
    # Some of these are what is left of others, and clocks differ by a little.
    **dict.fromkeys(
        ("cpu_s", "run_queue_s", "stall_s", "wait_s", "transfer_s", "input_wait_s", "host_s"),
        (-MAX_S, MAX_S),
    ),
}


class Use(Enum):
    """The role of a micro-batch field in cost models."""

    NONE = auto()  # identity and times
    FEATURE = auto()  # one term of the expected time
    DENSE_FEATURE = auto()  # the same, multiplied by the rank's tensor share


class Column(NamedTuple):
    """How one field of MicroBatchRecord is stored in a ring slot and used by cost models.

    Attributes:
        place: position among the fields of a slot.
        code: the slot's `struct` code.
        use: as a feature.
        one: fixed-point numbers: the stored value of 1.0; 0: stored unchanged.
    """

    place: int
    code: str
    use: Use = Use.NONE
    one: int = 0


def _column(*args: int | str | Use, **kwargs: int) -> dict[str, Column]:
    return {"column": Column(*args, **kwargs)}  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRecord:
    """One micro-batch on one rank: its features, and the compute time between collectives.

    Attributes:
        compute_s: device time (CUDA events), without waiting for other ranks.
        sum_len_squared: sum over documents of squared length, tokens^2: attention work.
        expert_rows: token rows that the rank's local experts computed, all layers together.
        num_active_experts: local experts with at least one row, all layers together.
        stall_s: wall time less CPU time less run-queue wait: its thread was not runnable.
        wait_s: time inside collectives.
        num_documents: 0: not reported.
        head_tokens: tokens whose logits this rank computed, where only some stages do; else 0.
        tensor_share: the rank's share of all attention and dense layers, 0 to 1.
        rows_over_16: rows beyond an expert's first 16, summed like `expert_rows`; likewise the
            other knots of core/telemetry/expert_row_features.py.
    """

    rank: int = field(metadata=_column(0, "I"))
    step: int = field(metadata=_column(1, "I"))
    micro_batch: int = field(metadata=_column(2, "I"))
    generation: int = field(metadata=_column(3, "I"))
    compute_s: float = field(metadata=_column(11, "d"))
    tokens: int = field(metadata=_column(7, "I", Use.DENSE_FEATURE))
    sum_len_squared: int = field(default=0, metadata=_column(10, "Q", Use.DENSE_FEATURE))
    expert_rows: int = field(default=0, metadata=_column(9, "I", Use.FEATURE))
    num_active_experts: int = field(default=0, metadata=_column(4, "I", Use.FEATURE))
    cpu_s: float | None = field(default=None, metadata=_column(12, "d"))
    run_queue_s: float | None = field(default=None, metadata=_column(13, "d"))
    stall_s: float | None = field(default=None, metadata=_column(14, "d"))
    wait_s: float | None = field(default=None, metadata=_column(15, "d"))
    ended_mono_s: float = field(default=0.0, metadata=_column(16, "d"))
    num_documents: int = field(default=0, metadata=_column(5, "H", Use.DENSE_FEATURE))
    head_tokens: int = field(default=0, metadata=_column(8, "I", Use.FEATURE))
    tensor_share: float = field(default=1.0, metadata=_column(6, "H", one=WHOLE_SHARE))
    rows_over_16: int = field(default=0, metadata=_column(17, "I", Use.FEATURE))
    rows_over_64: int = field(default=0, metadata=_column(18, "I", Use.FEATURE))
    rows_over_256: int = field(default=0, metadata=_column(19, "I", Use.FEATURE))
    rows_over_1024: int = field(default=0, metadata=_column(20, "I", Use.FEATURE))


MICRO_BATCH_COLUMNS: dict[str, Column] = {
    each.name: each.metadata["column"] for each in fields(MicroBatchRecord)
}
"""The one schema of micro-batches, in the order of the record's fields.

The ring codec (`record_codec`) and the feature table (`predictor/cost/features.py`) are made from
it; the wire has a column for each field, by name. A new field needs an entry here, a parameter of
`record_codec.pack_micro_batch`, a column in `telemetry.proto` and, for its new place in the slot, a
new `shm_ring.VERSION`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step as measured by one rank.

    Attributes:
        duration_s: includes the wait for the step's input.
        tokens: of the global batch.
        loss: of the global batch.
        transfer_s: own time in collectives that all ranks entered together, so without waiting;
            None: no such collective was timed.
        transfer_bytes: bytes sent and received in those collectives.
        sum_len_squared: of the global batch; 0: not reported.
        input_wait_s: this rank's own wait for input; None: not timed.
        host_s: this rank's own time on the host for planning exchanges, in no compute time; None:
            not timed.
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
    host_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoadRecord:
    """Tokens that this rank's batch routed to experts first_expert, first_expert + 1, ...

    `num_ranks`: the number of ranks of a node, `rank` among them, whose loads an agent added up. A
    ring record holds at most LOADS_PER_RECORD loads; the agent joins consecutive ones.
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
            raise ValueError("a load is of at least one rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAppliedRecord:
    """This rank trains under `generation` from `step` on; `is_regroup`: after a death."""

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
    """The process of a rank ended; `signal` is 0 for an exit with `exit_code`.

    The supervisor reports it. If the supervisor was killed, the agent does, with EXIT_UNKNOWN.
    """

    rank: int
    pid: int
    exit_code: int
    signal: int
    detected_mono_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecord:
    """Result of the fixed probe `number` that the controller requested.

    `gemm_s`, `copy_s`: one matrix product and one memory copy, by the rank's clock; `exchange_s`:
    one message to the next rank and from the previous one; `duration_s`: all of it.
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
class PairRecord:
    """A rank's measurement with `peer` in a probe of pairs; its ProbeRecord follows.

    `exchange_s`: one exchange of messages of `num_bytes` in both directions.
    """

    rank: int
    step: int
    generation: int
    peer: int
    number: int
    num_bytes: int
    exchange_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRefusedRecord:
    """This rank, which runs `generation`, cannot apply the plan `plan_generation`.

    `layout_crc` identifies the plan's content. The slot truncates the reason.
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
    """The result of this rank's part of the checkpoint of `step`: one of SAVE_OUTCOMES.

    "written": other ranks are not finished; "skipped": the previous checkpoint is still being
    written, for `duration_s` so far. The slot truncates the reason.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRecord(_SaveRecord):
    """The result of this rank's part of an in-memory snapshot.

    "complete": its copy and the one that it keeps for another rank are stored.
    """


SaveRecord = CheckpointRecord | SnapshotRecord
_OfStep = MicroBatchRecord | StepRecord | ExpertLoadRecord
_OfPlan = PlanAppliedRecord | PlanRefusedRecord
Record = _OfStep | _OfPlan | RankExitRecord | ProbeRecord | PairRecord | SaveRecord


PAYLOAD_BYTES = 116  # kind, two bytes that are zero, fields, zeros to the end


class RecordKind(IntEnum):
    """Numbers on disk; a number is never reused."""

    MICRO_BATCH = 1
    STEP = 2
    EXPERT_LOAD = 3
    PLAN_APPLIED = 4
    RANK_EXIT = 5
    PROBE = 6
    PLAN_REFUSED = 7
    CHECKPOINT = 8
    SNAPSHOT = 9
    PAIR = 11


def payload_of(kind: RecordKind, fields: str) -> tuple[struct.Struct, int]:
    """The struct of a whole payload with these fields, and the kind as a plain int for `struct`."""
    used = struct.Struct(f"<H2x{fields}").size
    return struct.Struct(f"<H2x{fields}{PAYLOAD_BYTES - used}x"), int(kind)
