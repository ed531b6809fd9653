"""Cheaper steps towards another partition: other rows or runs of shards, other schedule. Pure.

Layers, groups and pipelines stay as they are, so that a layout's cheap levels are priced like its
expensive ones.
"""

from pacekeeper.controller.planning.model.partition import Partition
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition.builder import Builder
from pacekeeper.controller.planning.partition.constraints import is_allowed
from pacekeeper.controller.planning.partition_cost.step_time import Pricer


def with_other_rows(partition: Partition, problem: PartitionProblem) -> Partition:
    """The rows for which its pipelines end together, and the schedule that suits them.

    Raises:
        ValueError: there are too few rows.
    """
    found = _rebuilt(partition, problem, has_other_shards=False)
    if found is None:
        raise ValueError(
            f"{problem.rows_per_step} rows are too few for {len(partition.pipelines)} pipelines"
        )
    return found


def with_other_shards(partition: Partition, problem: PartitionProblem) -> Partition | None:
    """Runs by speed in each of its groups, every rank with a shard at least, and the rows for that.

    None where a group has more ranks than shards, or there are too few rows.
    """
    return _rebuilt(partition, problem, has_other_shards=True)


def _rebuilt(
    partition: Partition, problem: PartitionProblem, *, has_other_shards: bool
) -> Partition | None:
    """The cheapest that is allowed, of all schedules and of rows by pipeline and by stage.

    Where none is allowed, the first.
    """
    pricer = Pricer(problem)
    found = []
    for schedule in problem.schedules:
        builder = Builder(problem, pricer, schedule)
        for is_by_stage in (False, True):
            made = builder.rebuild(
                partition, has_other_shards=has_other_shards, is_by_stage=is_by_stage
            )
            found += [made] if made else []
    allowed = [made for made in found if is_allowed(made, problem)] or found[:1]
    return min(allowed, key=lambda made: pricer.price(made).step_s, default=None)
