"""ResiHP's Scheduler, from its published rules: a baseline. Pure.

1. Tensor groups keep the k fastest devices, k a power of two, of the largest k * min speed (eq. 3
and 4); who is left over completes groups of its node. 2. Layers of slow stages go to the others,
the same cuts for all pipelines (3.3; no rule is published). 3. Forward by forward, stages of fast
pipelines take micro-batches of slow ones (Algorithm 1; `resihp_migration.py`). Where the paper
leaves a choice open, each is tried and the best is taken: cuts as they are, by the slowest pipeline
of a stage or by the mean; delta from 0 up; whether a stage waits for its next forward as 1F1B does,
takes what is ready, or leaves weight gradients for idle time (Fig. 6).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition_cost.compute import (
    GroupCost,
    held_bytes,
    layer_sums,
    row_s,
    shares_of,
)
from pacekeeper.simulator.baselines.even_pipelines import (
    Ranks,
    baseline_groups,
    batch_rows,
    even_cell,
    even_cost,
)
from pacekeeper.simulator.baselines.resihp_migration import Migration, StageOrder
from pacekeeper.simulator.baselines.step_simulation import NEVER, walks

DELTAS = (0, 1, 2, 4, NEVER)  # Algorithm 1's gap of progress, which is not published
ORDERS = (StageOrder.PROGRAM, StageOrder.READY, StageOrder.SPLIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResihpPlan:
    """groups[pipeline][stage]: the ranks that stay (none: a dead stage); ends: of the stages.

    delta: of Algorithm 1; order: of chunks on a stage. migrations: what other pipelines run of a
    pipeline's work. standby: living ranks left out.
    """

    groups: tuple[tuple[Ranks, ...], ...]
    ends: tuple[int, ...]
    delta: int
    order: StageOrder
    migrations: tuple[Migration, ...]
    step_s: float
    standby: tuple[int, ...]


def resihp(problem: PartitionProblem) -> ResihpPlan:
    """Raises ValueError where a stage has no living device left in any pipeline."""
    groups = [
        [
            exclude(ranks, problem, pipeline.cells[stage].first_layer, cell_end)
            for stage, (ranks, cell_end) in enumerate(zip(of_pipeline, pipeline.cuts, strict=True))
        ]
        for of_pipeline, pipeline in zip(
            baseline_groups(problem), problem.baseline.pipelines, strict=True
        )
    ]
    _use_standbys(groups, problem)
    costs = [[even_cost(ranks, problem) if ranks else None for ranks in of] for of in groups]
    for stage in range(len(groups[0])):
        if not any(of_pipeline[stage] for of_pipeline in groups):
            raise ValueError(f"stage {stage} has no living device")
    best: ResihpPlan | None = None
    used = {rank for of_pipeline in groups for ranks in of_pipeline for rank in ranks}
    standby = tuple(rank for rank in problem.living if rank not in used)
    for ends in _choices(costs, problem):
        for order in ORDERS:
            tried = walks(groups, ends, problem, deltas=DELTAS, order=order)
            for delta, walk in zip(DELTAS, tried, strict=True):
                if best is None or walk.step_s < best.step_s:
                    best = ResihpPlan(
                        groups=tuple(tuple(of_pipeline) for of_pipeline in groups),
                        ends=ends,
                        delta=delta,
                        order=order,
                        migrations=walk.migrations,
                        step_s=walk.step_s,
                        standby=standby,
                    )
    assert best is not None, "the baseline's cuts are always tried"
    return best


def _use_standbys(groups: list[list[Ranks]], problem: PartitionProblem) -> None:
    """Add unused ranks of a node to groups of the same node that lack devices (section 3.2)."""
    device_of = problem.device_of
    used = {rank for of_pipeline in groups for ranks in of_pipeline for rank in ranks}
    spare: dict[int, list[int]] = {}
    for rank in problem.living:
        if rank not in used:
            spare.setdefault(device_of[rank].node, []).append(rank)
    for at, stage, cell in problem.baseline.places():
        mine = groups[at][stage]
        nodes = {device_of[rank].node for rank in cell.ranks}
        if len(mine) == len(cell.ranks) or len(nodes) > 1:
            continue
        (node,) = nodes
        pool = [*mine, *spare.get(node, ())]
        most = len(cell.ranks)
        better = exclude(pool, problem, cell.first_layer, cell.end_layer, most=most)
        if _worth(better, problem) > _worth(mine, problem):
            groups[at][stage] = better
            spare[node] = [rank for rank in pool if rank not in better]


def _worth(ranks: Ranks, problem: PartitionProblem) -> float:
    """k * min speed."""
    return len(ranks) * min((problem.device_of[rank].speed for rank in ranks), default=0.0)


def exclude(
    ranks: Sequence[int],
    problem: PartitionProblem,
    first_layer: int,
    end_layer: int,
    *,
    most: int | None = None,
) -> Ranks:
    """Equations 3 and 4: the k fastest, k = 2^q from what memory needs, of most k * min speed.

    `most`: of k, where there are more ranks than a group has.
    """
    living = [rank for rank in ranks if problem.device_of[rank].speed > 0.0]
    by_speed = sorted(living, key=lambda rank: (-problem.device_of[rank].speed, rank))
    best: Ranks = ()
    best_speed = 0.0
    size = 1
    while size <= min(len(by_speed), most or len(by_speed)):
        chosen = tuple(sorted(by_speed[:size]))
        speed = size * problem.device_of[by_speed[size - 1]].speed
        if speed >= best_speed and _fits(chosen, problem, first_layer, end_layer):
            best, best_speed = chosen, speed
        size *= 2
    return best


def _fits(ranks: Ranks, problem: PartitionProblem, first_layer: int, end_layer: int) -> bool:
    cell = even_cell(ranks, first_layer, end_layer, problem)
    sums, heads, columns = (
        layer_sums(problem.model, problem.links),
        shares_of(cell.attention),
        shares_of(cell.mlp),
    )
    for rank in ranks:
        used = held_bytes(
            sums,
            heads.get(rank, 0.0),
            columns.get(rank, 0.0),
            rows=batch_rows(problem),
            num_held=1,
            sharers=1,
        )
        if used[end_layer] - used[first_layer] > problem.device_of[rank].memory_bytes:
            return False
    return True


def _choices(
    costs: Sequence[Sequence[GroupCost | None]], problem: PartitionProblem
) -> list[tuple[int, ...]]:
    """Cuts to try: the baseline's; layers by what a stage is worth, its slowest or its mean."""
    baseline = problem.baseline.pipelines[0].cuts
    sizes = [end - first for first, end in zip((0, *baseline[:-1]), baseline, strict=True)]
    sums = layer_sums(problem.model, problem.links)
    worth = []
    for stage in range(len(baseline)):
        known = [of[stage] for of in costs]
        healthy = max(1.0 / float(row_s(sums, cost)[-1]) for cost in known if cost is not None)
        worth.append(
            [
                0.0 if cost is None else 1.0 / float(row_s(sums, cost)[-1]) / healthy
                for cost in known
            ]
        )
    slowest = [min((w for w in of if w > 0.0), default=1.0) for of in worth]
    means = [sum(of) / len(of) for of in worth]
    found = [baseline, _repartition(sizes, slowest), _repartition(sizes, means)]
    return list(dict.fromkeys(found))


def _repartition(sizes: Sequence[int], worth: Sequence[float]) -> tuple[int, ...]:
    """Each stage its layers times its worth, rounded down; the rest where there is least for it."""
    counts = [max(1, int(size * part)) for size, part in zip(sizes, worth, strict=True)]
    while sum(counts) < sum(sizes):
        counts[min(range(len(counts)), key=lambda i: ((counts[i] + 1) / worth[i], i))] += 1
    while sum(counts) > sum(sizes):
        counts[max(range(len(counts)), key=lambda i: (counts[i] / worth[i], i))] -= 1
    return tuple(sum(counts[: stage + 1]) for stage in range(len(counts)))
