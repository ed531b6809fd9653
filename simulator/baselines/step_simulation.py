"""A step of even groups that hand micro-batches over to each other, walked in time. Pure.

What ResiHP's Algorithm 1 and ReCycle's rerouting run on: one cut of layers for all pipelines, even
shards in each group, and stages that may be dead in some pipelines (`resihp_migration.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition_cost.collectives import gradient_sync_s
from pacekeeper.controller.planning.partition_cost.compute import (
    GroupCost,
    constant_s,
    layer_sums,
    row_s,
)
from pacekeeper.controller.planning.partition_cost.memory import in_flight
from pacekeeper.core.layout.pipeline_schedule import Schedule
from pacekeeper.simulator.baselines.even_pipelines import Ranks, batch_rows, even_cell, even_cost
from pacekeeper.simulator.baselines.resihp_migration import Migration, StageWork, migrate_each

NEVER = 1 << 30  # a delta that no gap of progress passes: only dead stages' work changes hands


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
    is_eager: bool = False,
    is_split: bool = False,
) -> Walk:
    """groups[pipeline][stage]: the ranks of each (none: dead); ends: of the stages.

    counts: micro-batches that each pipeline begins with, as the baseline if absent. `is_eager`: a
    stage runs forwards as they come, 1F1B's bound on activations aside; `is_split`: weight
    gradients wait for idle time. Raises ValueError where a rank of a group is dead.
    """
    (walk,) = walks(
        groups,
        ends,
        problem,
        deltas=(delta,),
        counts=counts,
        is_eager=is_eager,
        is_split=is_split,
    )
    return walk


def walks(
    groups: Sequence[Sequence[Ranks]],
    ends: Sequence[int],
    problem: PartitionProblem,
    *,
    deltas: Sequence[int],
    counts: Sequence[int] | None = None,
    is_eager: bool = False,
    is_split: bool = False,
) -> tuple[Walk, ...]:
    """The same for each of `deltas`: what they share is priced once."""
    costs = [[even_cost(ranks, problem) if ranks else None for ranks in of] for of in groups]
    work = _work(costs, ends, problem, counts, is_eager, is_split)
    sync_s = _sync_s(groups, ends, problem)
    found = migrate_each(work, deltas=deltas)
    return tuple(Walk(step_s=step_s + sync_s, migrations=moved) for step_s, moved in found)


def _work(
    costs: Sequence[Sequence[GroupCost | None]],
    ends: Sequence[int],
    problem: PartitionProblem,
    counts: Sequence[int] | None,
    is_eager: bool,
    is_split: bool,
) -> StageWork:
    sums, rows = layer_sums(problem.model, problem.links), batch_rows(problem)
    ratio = problem.model.backward_ratio
    forward: list[list[float | None]] = []
    backward: list[list[float | None]] = []
    weight: list[list[float]] = []
    for of_pipeline in costs:
        forward.append([])
        backward.append([])
        weight.append([])
        for cost, first, end in zip(of_pipeline, (0, *ends[:-1]), ends, strict=True):
            if cost is None:
                forward[-1].append(None)
                backward[-1].append(None)
                weight[-1].append(0.0)
                continue
            of_row, fixed = row_s(sums, cost), constant_s(sums, cost)
            both = rows * float(of_row[end] - of_row[first]) + float(fixed[end] - fixed[first])
            told = (end - first) * (rows * cost.sum_row_s + cost.sum_s)
            own = (both - 2.0 * told) / (1.0 + ratio)
            forward[-1].append(own + told)
            backward[-1].append(ratio * own + told)
            weight[-1].append(0.5 * ratio * own if is_split else 0.0)
    num_stages = len(ends)
    batches = [len(pipeline.micro_batches) for pipeline in problem.baseline.pipelines]
    if counts is not None:
        batches = list(counts)
    most = sum(batches)
    lanes = max(1, min(cost.num_ranks for of in costs for cost in of if cost is not None))
    return StageWork(
        forward_s=tuple(tuple(of) for of in forward),
        backward_s=tuple(tuple(of) for of in backward),
        weight_s=tuple(tuple(of) for of in weight),
        message_s=problem.links.between_latency_s
        + rows * problem.model.boundary_bytes / (problem.links.between_bytes_per_s * lanes),
        num_microbatches=tuple(batches),
        in_flight=tuple(
            most if is_eager else in_flight(num_stages, s, max(batches), Schedule.ONE_F_ONE_B)
            for s in range(num_stages)
        ),
    )


def _sync_s(
    groups: Sequence[Sequence[Ranks]], ends: Sequence[int], problem: PartitionProblem
) -> float:
    """Of the slowest cell of the first stage, which ends last."""
    nodes = {problem.device_of[rank].node for of in groups for ranks in of for rank in ranks}
    return max(
        gradient_sync_s(
            even_cell(of_pipeline[0], 0, ends[0], problem),
            len(groups),
            problem,
            is_inside=len(nodes) == 1,
        )
        for of_pipeline in groups
        if of_pipeline[0]
    )
