"""A planner in the manner of Malleus, from its published rules: a baseline. Pure.

Stragglers (rate of 1.2 or more) leave their tensor group, which is cut into powers of two by speed;
the parts are stages of their own. Each pipeline divides its layers by min max y_j * l_j under
memory, then whole micro-batches go by min max o_i * m_i with m_i at least the stages (research
5.2). Shards are even in each part, rows of a micro-batch are what they were.
"""

from collections.abc import Sequence

from pacekeeper.controller.planning.model.partition import Partition
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition_cost.compute import layer_sums
from pacekeeper.controller.planning.partition_cost.step_time import price
from pacekeeper.simulator.baselines.even_pipelines import (
    Ranks,
    assembled,
    baseline_groups,
    batch_rows,
    cuts_for,
    even_cost,
    even_counts,
    num_batches,
)

STRAGGLER = 1.2  # times as slow as specified


def malleus(problem: PartitionProblem) -> Partition:
    """The fastest of three: all stragglers in stages of their own, only large parts, none cut.

    Raises ValueError where no pipeline is left that holds the model.
    """
    found = []
    for least_part in (1, 2, None):
        partition = _planned(problem, least_part)
        if partition is not None:
            found.append(partition)
    if not found:
        raise ValueError("no pipeline of the living devices holds the model")
    return min(found, key=lambda partition: price(partition, problem).step_s)


def _planned(problem: PartitionProblem, least_part: int | None) -> Partition | None:
    """`least_part`: the smallest part that is used; None: groups are not cut."""
    sums, rows = layer_sums(problem.model, problem.links), batch_rows(problem)
    total = num_batches(problem)
    groups: list[list[Ranks]] = []
    ends: list[tuple[int, ...]] = []
    paces: list[float] = []
    per_pipeline = total // len(problem.baseline.pipelines)
    for of_pipeline in baseline_groups(problem):
        parts = [part for ranks in of_pipeline for part in parts_of(ranks, problem, least_part)]
        cuts = (
            cuts_for([even_cost(part, problem) for part in parts], sums, rows, per_pipeline)
            if parts
            else None
        )
        if cuts is not None:
            groups.append(parts)
            ends.append(cuts.ends)
            paces.append(cuts.slowest)
    if not groups:
        return None
    least = [min(len(parts), total // len(groups)) for parts in groups]
    return assembled(groups, ends, even_counts(total, paces, least), problem)


def parts_of(
    ranks: Sequence[int], problem: PartitionProblem, least_part: int | None
) -> list[Ranks]:
    """Powers of two by speed, largest first; parts that are too small stand by."""
    living = [rank for rank in ranks if problem.device_of[rank].speed > 0.0]
    by_speed = sorted(living, key=lambda rank: (-problem.device_of[rank].speed, rank))
    if not by_speed:
        return []
    fastest = problem.device_of[by_speed[0]].speed
    slow = [r for r in by_speed if fastest / problem.device_of[r].speed >= STRAGGLER]
    if not slow and len(by_speed) == len(ranks):
        return [tuple(by_speed)]
    if least_part is None:
        return [tuple(sorted(by_speed[: _power(len(by_speed))]))]
    healthy, parts = [r for r in by_speed if r not in slow], []
    for pool in (healthy, slow):
        left = list(pool)
        while left:
            size = _power(len(left))
            if size >= least_part:
                parts.append(tuple(sorted(left[:size])))
            left = left[size:]
    return parts


def _power(most: int) -> int:
    """The largest power of two up to `most`."""
    return 1 << (most.bit_length() - 1)
