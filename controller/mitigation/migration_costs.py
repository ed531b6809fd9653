"""The cost of applying a plan: as measured on earlier plans, else as configured.

A plan pauses training whatever it moves, and longer the more its busiest rank sends or receives.
Called by the policy's pricing, and by the machine with records of applied plans. Pure.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from pacekeeper.controller.state.job_parts import MeasuredMove
from pacekeeper.controller.state.state import JobState
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.layout.diff import StatePart, added_replicas, diff_layouts
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.core.telemetry.attachment import ModelShape
from pacekeeper.core.telemetry.records import PlanAppliedRecord

KEPT_MOVES = 16  # the newest: links and hosts change


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCosts:
    """The cost of applying a plan.

    Attributes:
        pause_s: Seconds that any plan takes.
        total_s_per_byte: Further seconds for each byte moved, summed over all ranks.
        busiest_s_per_byte: Further seconds for each byte moved by the busiest rank.
    """

    pause_s: float
    total_s_per_byte: float
    busiest_s_per_byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes of state that a plan copies, by all ranks together and by the one with most."""

    total_bytes: int
    busiest_bytes: int


def costs_of(moves: Sequence[MeasuredMove], config: PolicyConfig) -> MoveCosts:
    """Estimate the costs from measured moves, with the configured ones where none was measured.

    The pause is the median of moves without bytes. The rate is total seconds over total bytes, so
    that large moves weigh more.
    """
    still = [move.duration_s for move in moves if not move.total_bytes]
    pause_s = median(still) if still else config.plan_s
    spent_s = sum(max(0.0, move.duration_s - pause_s) for move in moves if move.total_bytes)
    total = sum(move.total_bytes for move in moves)
    busiest = sum(move.busiest_bytes for move in moves)
    return MoveCosts(
        pause_s=pause_s,
        total_s_per_byte=spent_s / total if total else config.move_s_per_byte,
        busiest_s_per_byte=spent_s / busiest if busiest else config.move_s_per_byte,
    )


def record_moves(job: JobState, records: Iterable[PlanAppliedRecord]) -> JobState:
    """Update the measured moves: the time of the slowest rank and the bytes of all ranks.

    Layouts that survivors agreed on and the first layout are not planned moves and are skipped.
    """
    fresh: dict[int, dict[int, PlanAppliedRecord]] = {}  # by generation and rank
    for record in records:
        if record.rank not in job.ranks or record.is_regroup:
            continue
        if not record.previous_generation or record.duration_s <= 0.0:
            continue
        known = job.plan.moves.get(record.generation)
        if known is None or record.rank not in known.ranks:  # else it is a repetition
            fresh.setdefault(record.generation, {}).setdefault(record.rank, record)
    if not fresh:
        return job
    moves = {
        **job.plan.moves,
        **{at: _with(job.plan.moves.get(at), told) for at, told in fresh.items()},
    }
    newest = sorted(moves)[-KEPT_MOVES:]
    return replace(
        job, plan=replace(job.plan, moves={generation: moves[generation] for generation in newest})
    )


def _with(known: MeasuredMove | None, told: Mapping[int, PlanAppliedRecord]) -> MeasuredMove:
    """Add all records of a report at once: the set of ranks is copied at each change."""
    known = known or MeasuredMove()
    num_bytes = [record.moved_bytes for record in told.values()]
    return MeasuredMove(
        ranks=known.ranks.union(told),
        duration_s=max(known.duration_s, *(record.duration_s for record in told.values())),
        total_bytes=known.total_bytes + sum(num_bytes),
        busiest_bytes=max(known.busiest_bytes, *num_bytes),
    )


def moved(old: Layout, new: Layout, shape: ModelShape) -> Moved:
    """Return the bytes that `new` copies where blocks lie as in `old`."""
    if (old.mesh, old.state_owners) == (new.mesh, new.state_owners):
        copies = Counter(added_replicas(old, new))
        return Moved(
            total_bytes=copies.total() * shape.expert_bytes,
            busiest_bytes=max(copies.values(), default=0) * shape.expert_bytes,
        )
    received: dict[int, float] = {}
    sent: dict[int, float] = {}
    of_state = shape.optimizer_bytes / max(shape.dense_bytes, 1)
    fraction = {StatePart.OPTIMIZER: of_state, StatePart.WEIGHTS: 1.0 - of_state}
    for transfer in diff_layouts(old, new):
        count = block_bytes(transfer.block, old, shape) * fraction.get(transfer.part, 1.0)
        received[transfer.destination] = received.get(transfer.destination, 0.0) + count
        if transfer.source is not None:
            sent[transfer.source] = sent.get(transfer.source, 0.0) + count
    return Moved(
        total_bytes=round(sum(received.values())),
        busiest_bytes=round(max([*received.values(), *sent.values()], default=0.0)),
    )


def block_bytes(block: Block, layout: Layout, shape: ModelShape) -> float:
    """Return the bytes of state of one block.

    Trainers report the sum of all state that is not experts'; it is spread evenly over the layers'
    virtual shards, with embedding, head and norms included.
    """
    match block.kind:
        case BlockKind.EXPERT:
            return float(shape.expert_bytes)
        case BlockKind.ATTENTION | BlockKind.DENSE_MLP:
            kinds = 2 if layout.has_dense_mlp(block.layer) else 1
            is_mlp = block.kind is BlockKind.DENSE_MLP
            shards = layout.num_mlp_shards if is_mlp else layout.num_attention_shards
            return shape.dense_bytes / (layout.num_layers * shards * kinds)
        case BlockKind.EMBEDDING | BlockKind.HEAD | BlockKind.NORM_ROUTER:
            return 0.0


def cost_s(moves: Moved, costs: MoveCosts, *, is_repartition: bool) -> float:
    """Return the seconds that a move takes.

    Copies of experts alone are summed over all ranks: they use links that the job uses at the same
    time. Where layers or shards move (`is_repartition`), all ranks wait for the busiest one.
    """
    if is_repartition:
        return costs.pause_s + moves.busiest_bytes * costs.busiest_s_per_byte
    return costs.pause_s + moves.total_bytes * costs.total_s_per_byte
