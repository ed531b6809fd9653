"""Greyhound's S2 and S3, from their published rules: a baseline. Pure.

S2 hands whole micro-batches from slow pipelines to fast ones (integers N_i of least variance of
N_i * t_i); S3 exchanges groups first, so that slow ones stand in as few pipelines as can be. Shards
and layers stay as they are, so a slow rank slows its whole group (research 5.1).
"""

from collections.abc import Sequence

import numpy as np

from pacekeeper.controller.planning.model.partition import Partition
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition_cost.compute import layer_sums
from pacekeeper.controller.planning.partition_cost.step_time import price
from pacekeeper.simulator.baselines.even_pipelines import (
    assembled,
    baseline_groups,
    batch_rows,
    even_cost,
    num_batches,
    stage_s,
)

SLOW = 1.1  # times the median: what counts as a slow pipeline


def greyhound(problem: PartitionProblem) -> Partition:
    """The better of S2 alone, S3 with S2, and nothing. Raises ValueError where a rank is dead."""
    dead = [rank for rank in problem.baseline.ranks if problem.device_of[rank].speed <= 0.0]
    if dead:
        raise ValueError(f"Greyhound plans around slow ranks, {dead} are dead")
    choices = [problem.baseline, s2(problem, baseline_groups(problem)), s2(problem, s3(problem))]
    return min(choices, key=lambda partition: price(partition, problem).step_s)


def s2(problem: PartitionProblem, groups: Sequence[Sequence[tuple[int, ...]]]) -> Partition:
    """Whole micro-batches by the pace of each pipeline's slowest stage."""
    ends = [pipeline.cuts for pipeline in problem.baseline.pipelines]
    sums, rows = layer_sums(problem.model, problem.links), batch_rows(problem)
    paces = [
        max(
            stage_s(even_cost(ranks, problem), first, end, rows, sums)
            for ranks, first, end in zip(of_pipeline, (0, *cuts[:-1]), cuts, strict=True)
        )
        for of_pipeline, cuts in zip(groups, ends, strict=True)
    ]
    if max(paces) <= SLOW * float(np.median(paces)):
        counts = tuple(len(p.micro_batches) for p in problem.baseline.pipelines)
    else:
        counts = least_variance(num_batches(problem), paces)
    return assembled(groups, ends, counts, problem)


def s3(problem: PartitionProblem) -> list[list[tuple[int, ...]]]:
    """In each stage the groups by their slowest rank: slow ones in the same pipelines."""
    groups = baseline_groups(problem)
    for stage in range(len(groups[0])):
        ordered = sorted(
            (of_pipeline[stage] for of_pipeline in groups),
            key=lambda ranks: -min(problem.device_of[rank].speed for rank in ranks),
        )
        for of_pipeline, ranks in zip(groups, ordered, strict=True):
            of_pipeline[stage] = ranks
    return groups


def least_variance(total: int, paces: Sequence[float]) -> tuple[int, ...]:
    """Integers N_i >= 1 that add up to `total`, of least variance of N_i * t_i.

    From the even split one micro-batch after the other changes hands while that lowers the variance
    (published: a mixed-integer program for the same aim). Raises ValueError for fewer than one
    each.
    """
    if total < len(paces):
        raise ValueError(f"{total} micro-batches for {len(paces)} pipelines")
    pace = np.array(paces)
    whole = 1.0 / pace
    counts = np.maximum(np.floor(total * whole / whole.sum()), 1.0)
    while counts.sum() < total:
        counts[int(np.argmin((counts + 1.0) * pace))] += 1.0
    while counts.sum() > total:
        able = np.where(counts > 1.0, counts * pace, -np.inf)
        counts[int(np.argmax(able))] -= 1.0
    while True:
        best, best_pair = float((counts * pace).var()), None
        for giver in np.flatnonzero(counts > 1.0).tolist():
            for taker in range(len(pace)):
                if taker != giver:
                    counts[giver] -= 1.0
                    counts[taker] += 1.0
                    found = float((counts * pace).var())
                    if found < best * (1.0 - 1e-9):
                        best, best_pair = found, (giver, taker)
                    counts[giver] += 1.0
                    counts[taker] -= 1.0
        if best_pair is None:
            return tuple(int(count) for count in counts)
        counts[best_pair[0]] -= 1.0
        counts[best_pair[1]] += 1.0
