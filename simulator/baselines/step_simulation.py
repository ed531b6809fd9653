"""A step of even groups that hand micro-batches over to each other, walked in time. Pure.

What ResiHP's Algorithm 1 and ReCycle's rerouting run on: one cut of layers for all pipelines, even
shards in each group, and stages that may be dead in some pipelines (`resihp_migration.py`). Chunks,
messages and exchanges take what they take for the planner (`stage_times.py`, `step_time.py`): a
step without hand-overs in the program's order takes as long as the planner's price.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pacekeeper.controller.planning.model.partition import StageShard
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition_cost.stage_times import StageTimeModel
from pacekeeper.controller.planning.partition_cost.step_time import with_exchange
from pacekeeper.core.layout.pipeline_schedule import Schedule, num_in_flight
from pacekeeper.simulator.baselines.even_pipelines import Ranks, batch_rows, even_cell
from pacekeeper.simulator.baselines.resihp_migration import (
    Migrated,
    Migration,
    StageOrder,
    StageWork,
    migrate_each,
)

NEVER = 1 << 30  # a delta that no gap of progress passes: only dead stages' work changes hands

Cells = Sequence[Sequence[StageShard | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """How long a step took, and what changed hands."""

    step_s: float
    migrations: tuple[Migration, ...]


def walked(
    groups: Sequence[Sequence[Ranks]],
    ends: Sequence[int],
    problem: PartitionProblem,
    *,
    delta: int,
    counts: Sequence[int] | None = None,
    order: StageOrder = StageOrder.PROGRAM,
) -> Walk:
    """Walk one step.

    Args:
        groups: groups[pipeline][stage], the ranks of each; none: dead.
        ends: of the stages.
        problem: the devices' speeds.
        delta: of Algorithm 1.
        counts: micro-batches that each pipeline begins with, as the baseline if absent.
        order: of the chunks on a stage.

    Raises:
        ValueError: a rank of a group is dead.
    """
    (walk,) = walks(groups, ends, problem, deltas=(delta,), counts=counts, order=order)
    return walk


def walks(
    groups: Sequence[Sequence[Ranks]],
    ends: Sequence[int],
    problem: PartitionProblem,
    *,
    deltas: Sequence[int],
    counts: Sequence[int] | None = None,
    order: StageOrder = StageOrder.PROGRAM,
) -> tuple[Walk, ...]:
    """The same for each of `deltas`: what they share is priced once."""
    cells = [
        [
            even_cell(ranks, first, end, problem) if ranks else None
            for ranks, first, end in zip(of_pipeline, (0, *ends[:-1]), ends, strict=True)
        ]
        for of_pipeline in groups
    ]
    return walks_of_cells(cells, problem, deltas=deltas, counts=counts, order=order)


def walks_of_cells(
    cells: Cells,
    problem: PartitionProblem,
    *,
    deltas: Sequence[int],
    counts: Sequence[int] | None = None,
    order: StageOrder = StageOrder.PROGRAM,
) -> tuple[Walk, ...]:
    """The same for cells[pipeline][stage] of any runs of shards, with equal cuts; None: dead."""
    clock = StageTimeModel(problem)
    found = migrate_each(_work(cells, clock, counts, order), deltas=deltas)
    return tuple(
        Walk(step_s=_with_exchange(each, cells, clock), migrations=each.migrations)
        for each in found
    )


def _work(
    cells: Cells, clock: StageTimeModel, counts: Sequence[int] | None, order: StageOrder
) -> StageWork:
    problem = clock.problem
    rows = batch_rows(problem)
    is_split = order is StageOrder.SPLIT
    chunks = [[None if cell is None else clock.chunk_s(cell, rows) for cell in of] for of in cells]
    num_stages = len(cells[0])
    batches = [len(pipeline.micro_batches) for pipeline in problem.baseline.pipelines]
    if counts is not None:
        batches = list(counts)
    most = sum(batches)
    # In the place of a dead stage another pipeline's sends and receives.
    living = [next(cell for of in cells if (cell := of[s]) is not None) for s in range(num_stages)]
    return StageWork(
        forward_s=tuple(tuple(chunk and chunk[0] for chunk in of) for of in chunks),
        backward_s=tuple(tuple(chunk and chunk[1] + chunk[2] for chunk in of) for of in chunks),
        weight_s=tuple(
            tuple(chunk[2] if chunk and is_split else 0.0 for chunk in of) for of in chunks
        ),
        message_s=tuple(
            tuple(
                clock.boundary_s(of[s] or living[s], of[s + 1] or living[s + 1], rows)
                for s in range(num_stages - 1)
            )
            for of in cells
        ),
        num_microbatches=tuple(batches),
        in_flight=tuple(
            most
            if order is StageOrder.EAGER
            else num_in_flight(
                Schedule.ONE_F_ONE_B, s, num_stages=num_stages, num_microbatches=max(batches)
            )
            for s in range(num_stages)
        ),
        order=order,
    )


def _with_exchange(walk: Migrated, cells: Cells, clock: StageTimeModel) -> float:
    problem = clock.problem
    nodes = {problem.device_of[r].node for of in cells for cell in of if cell for r in cell.ranks}
    ends = [
        (end_s, clock.sync_s(cell, len(cells), len(nodes) == 1), cell.first_layer, cell.end_layer)
        for of, of_ends in zip(cells, walk.ends_s, strict=True)
        for cell, end_s in zip(of, of_ends, strict=True)
        if cell is not None
    ]
    return with_exchange(*np.array(ends).T)
