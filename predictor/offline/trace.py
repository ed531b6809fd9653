"""A recorded run as columns, whatever tool recorded it. Pure; the readers are in `simulator/`.

Columns of a table are equally long arrays, one row per observation, in no promised order. What a
source does not tell is NaN, a table it does not have is None: never a guess.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from pacekeeper.core.telemetry.samples import DeviceSample, HostSample
from pacekeeper.predictor.cost.features import Array, Positions


class Chunk(IntEnum):
    """What a worker computed in one go."""

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
    """One rank and its place: peers have the same stage (and do the same kind of work)."""

    rank: int
    stage: int = 0
    dp: int = 0
    node: str = ""
    device_uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComputeTable:
    """Compute times, one row per (step, rank, micro-batch, chunk, model chunk).

    micro_batch 0 where the source only tells sums per step. tokens, sum_len_squared, expert_rows:
    the row's work, NaN where unknown.
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpTable:
    """Every operation of every worker with its time: what a what-if replay needs.

    start_s is comparable within one step only. micro_batch and model_chunk -1 where they do not
    apply; sequence: position in the worker's order of operations of that type within the step.
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
    """Collectives and point-to-point transfers: `transfer_s` is end minus the latest start in the
    group (waiting left out); `group` numbers the entries of Trace.groups.
    """

    step: Positions
    group: Positions
    num_bytes: Array
    transfer_s: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnTransferTable:
    """What each rank needed in a step for collectives that all ranks entered together (waiting for
    nobody), one row per (step, rank) that ended; num_bytes: sent and received in them.

    NaN where it is not told.
    """

    step: Positions
    rank: Positions
    num_bytes: Array
    transfer_s: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnInputTable:
    """How long each rank waited for the input of a step, one row per (step, rank) that ended.

    input_s is a part of duration_s, the rank's step; NaN where it is not told.
    """

    step: Positions
    rank: Positions
    duration_s: Array
    input_s: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WaitTable:
    """Time a rank spent in collectives in a step, transfers and waiting together: who arrives last
    waits least.
    """

    step: Positions
    rank: Positions
    wait_s: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTable:
    """Whole steps of the job: for sources that tell no more. NaN where tokens are unknown.

    `work_class`: the same number for steps that do the same work by plan; None: not told.
    """

    step: Positions
    duration_s: Array
    tokens: Array
    sum_len_squared: Array
    work_class: Positions | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertLoadTable:
    """Token rows that were routed to each expert: one row per (step, layer, expert)."""

    step: Positions
    layer: Positions
    expert: Positions
    rows: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ThreadTable:
    """Where each rank's thread spent each step, one row per (step, rank), micro-batches summed.

    NaN where its clock does not tell. ended_s: end of the step on the clock of the rank's node.
    """

    step: Positions
    rank: Positions
    compute_s: Array
    run_queue_s: Array
    stall_s: Array
    ended_s: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutTable:
    """Under which layout (generation) each step ran, steps ascending, one row each."""

    step: Positions
    generation: Positions


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSamples:
    """What was sampled on one node, oldest first, on its own clock; `pids`: the job's processes."""

    node: str
    devices: Mapping[str, tuple[DeviceSample, ...]]  # by uuid
    host: tuple[HostSample, ...] = ()
    pids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """One recorded run. `notes` say in words what was missing, damaged or left out.

    `expert_compute`: times of the expert layers, with the waiting for their slowest host, where
    they are not part of `compute`; its model_chunk is the layer, counted within the stage.
    `groups`: the ranks of each communication group; with `expert_compute`, those that share
    experts. `resolution_s`: of the recording clock, 0 where it is fine. `layouts`: None where
    nothing tells that work was ever spread anew.
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
        """Of the layout that ran the step; 0 where nothing tells."""
        table = self.layouts
        if table is None or not len(table.step):
            return 0
        at = int(np.searchsorted(table.step, step, side="right")) - 1
        return int(table.generation[max(at, 0)])


def compute_of(ops: OpTable) -> ComputeTable:
    """The compute rows of a timeline; their work is unknown."""
    chunk_of = {OpType.FORWARD: Chunk.FORWARD, OpType.BACKWARD: Chunk.BACKWARD}
    kept = np.isin(ops.op, list(chunk_of))
    unknown = np.full(int(kept.sum()), np.nan)
    codes = np.vectorize({int(op): int(chunk) for op, chunk in chunk_of.items()}.__getitem__)
    return ComputeTable(
        step=ops.step[kept],
        rank=ops.rank[kept],
        micro_batch=ops.micro_batch[kept],
        chunk=codes(ops.op[kept]).astype(np.intp) if kept.any() else ops.op[kept],
        model_chunk=np.maximum(ops.model_chunk[kept], 0),
        compute_s=ops.duration_s[kept],
        tokens=unknown,
        sum_len_squared=unknown,
        expert_rows=unknown,
    )
