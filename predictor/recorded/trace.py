"""A recorded run as tables of columns, independent of the tool that recorded it.

The readers in `simulator/` build a `Trace`; `analyze.analyze` consumes it. The columns of a table
are arrays of equal length, one row per observation, in no guaranteed order. A value that the source
does not record is NaN and a missing table is None; nothing is estimated.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from pacekeeper.core.telemetry.samples import DeviceSample, HostSample
from pacekeeper.predictor.cost.features import Array, Flags, Positions


class Chunk(IntEnum):
    """The kind of compute that one row times."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHT_GRADIENT = 2  # where a schedule splits the backward pass
    WHOLE = 3  # all compute of the micro-batch or step: the source does not split it


class OpType(IntEnum):
    """An operation on a worker's timeline."""

    FORWARD = 0
    BACKWARD = 1
    FORWARD_SEND = 2
    FORWARD_RECV = 3
    BACKWARD_SEND = 4
    BACKWARD_RECV = 5
    PARAMS_ALL_GATHER = 6
    GRADS_REDUCE_SCATTER = 7
    LAYERNORM_GRADS_ALL_REDUCE = 8
    EMBEDDING_GRADS_ALL_REDUCE = 9
    OPTIMIZER = 10
    CLIP_GRADS = 11
    GARBAGE_COLLECTION = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One rank and its place. Ranks of the same stage are peers (they do the same kind of work)."""

    rank: int
    stage: int = 0
    dp: int = 0
    node: str = ""
    device_uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComputeTable:
    """Compute times, one row per (step, rank, micro-batch, chunk, model chunk).

    micro_batch is 0 where the source records only sums per step. tokens, sum_len_squared and
    expert_rows are the row's work, NaN where unknown.
    """

    step: Positions
    rank: Positions
    micro_batch: Positions
    chunk: Positions  # values of Chunk
    model_chunk: Positions  # of an interleaved schedule, else 0
    compute_s: Array
    tokens: Array
    sum_len_squared: Array
    expert_rows: Array

    def usable(self, ranks: Iterable[int]) -> Flags:
        """Return which rows [rows] hold a positive, finite time of one of these ranks."""
        with np.errstate(invalid="ignore"):
            is_time = np.isfinite(self.compute_s) & (self.compute_s > 0.0)
        return np.asarray(is_time & np.isin(self.rank, list(ranks)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpTable:
    """Start and duration of every operation of every worker, as a what-if replay needs them.

    start_s is comparable within one step only. micro_batch and model_chunk are -1 where they do not
    apply. sequence is the position among the worker's operations of that type within the step.
    """

    step: Positions
    rank: Positions
    op: Positions  # values of OpType
    micro_batch: Positions
    model_chunk: Positions
    sequence: Positions
    start_s: Array
    duration_s: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransferTable:
    """Collectives and point-to-point transfers, without waiting time.

    `transfer_s` is the end minus the latest start in the group. `group` indexes Trace.groups.
    """

    step: Positions
    group: Positions
    num_bytes: Array
    transfer_s: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnTransferTable:
    """Time and bytes of each rank's collectives per step, without waiting for other ranks.

    One row per (step, rank) that finished the step. Only collectives that all ranks entered
    together count; num_bytes are the bytes sent and received in them. NaN where the rank did not
    report it.
    """

    step: Positions
    rank: Positions
    num_bytes: Array
    transfer_s: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnInputTable:
    """Time that each rank waited for its input, one row per (step, rank) that finished the step.

    input_s is a part of duration_s, the rank's step time. NaN where the rank did not report it.
    """

    step: Positions
    rank: Positions
    duration_s: Array
    input_s: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WaitTable:
    """Time per step that a rank spent in collectives, transfer and waiting together.

    The rank that arrives last has the shortest time.
    """

    step: Positions
    rank: Positions
    wait_s: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTable:
    """Step times of the whole job, for sources without times per rank.

    tokens and sum_len_squared are NaN where unknown. `work_class`: equal for steps that do the same
    work by plan; None where not recorded.
    """

    step: Positions
    duration_s: Array
    tokens: Array
    sum_len_squared: Array
    work_class: Positions | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertLoadTable:
    """Tokens routed to each expert, one row per (step, layer, expert)."""

    step: Positions
    layer: Positions
    expert: Positions
    rows: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ThreadTable:
    """Compute, run-queue and stall time of each rank's thread, one row per (step, rank).

    Times are sums over micro-batches, NaN where the rank's clock does not report them. ended_s is
    the end of the step on the clock of the rank's node.
    """

    step: Positions
    rank: Positions
    compute_s: Array
    run_queue_s: Array
    stall_s: Array
    ended_s: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutTable:
    """The layout (generation) that ran each step: one row per step, ascending."""

    step: Positions
    generation: Positions


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSamples:
    """Device and host samples of one node, oldest first, on its own clock; `pids` are the job's."""

    node: str
    devices: Mapping[str, tuple[DeviceSample, ...]]  # by uuid
    host: tuple[HostSample, ...] = ()
    pids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """One recorded run.

    Attributes:
        name: of the run.
        source: format it was read from.
        workers: the ranks and their places.
        compute: with a timeline `ops`, the same rows as `compute_of` returns.
        expert_compute: times of the expert layers where they are not part of `compute`, including
            the wait for the slowest replica rank; its model_chunk is the layer, counted within the
            stage.
        layouts: None where the source does not record whether work was redistributed.
        groups: ranks of each communication group; with `expert_compute`, those that share experts.
        resolution_s: of the recording clock, 0 if it is fine.
        notes: sentences on what was missing, damaged or left out.
    """

    name: str
    source: str
    workers: tuple[Worker, ...]
    compute: ComputeTable | None = None
    ops: OpTable | None = None
    transfers: TransferTable | None = None
    own_transfers: OwnTransferTable | None = None
    own_inputs: OwnInputTable | None = None
    waits: WaitTable | None = None
    steps: StepTable | None = None
    layouts: LayoutTable | None = None
    expert_loads: ExpertLoadTable | None = None
    expert_compute: ComputeTable | None = None
    threads: ThreadTable | None = None
    samples: tuple[NodeSamples, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    resolution_s: float = 0.0
    notes: tuple[str, ...] = ()

    def generation_at(self, step: int) -> int:
        """Return the generation of the layout that ran the step, 0 where unknown."""
        table = self.layouts
        if table is None or not len(table.step):
            return 0
        at = int(np.searchsorted(table.step, step, side="right")) - 1
        return int(table.generation[max(at, 0)])


def compute_of(ops: OpTable) -> ComputeTable:
    """Return the compute rows of a timeline; their work is unknown (NaN)."""
    kept = np.isin(ops.op, (OpType.FORWARD, OpType.BACKWARD))
    unknown = np.full(int(kept.sum()), np.nan)
    return ComputeTable(
        step=ops.step[kept],
        rank=ops.rank[kept],
        micro_batch=ops.micro_batch[kept],
        chunk=ops.op[kept],  # the same numbers
        model_chunk=np.maximum(ops.model_chunk[kept], 0),
        compute_s=ops.duration_s[kept],
        tokens=unknown,
        sum_len_squared=unknown,
        expert_rows=unknown,
    )
