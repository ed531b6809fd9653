"""The cheaper steps towards another partition: other rows only, other runs of shards only. Pure.

Layers, groups and pipelines stay as they are, so that a layout's cheap levels are priced like its
expensive ones.
"""

from pacekeeper.controller.planning.model.partition import Partition
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition.builder import Builder
from pacekeeper.controller.planning.partition_cost.step_time import Pricer


def with_other_rows(partition: Partition, problem: PartitionProblem) -> Partition:
    """The rows for which its pipelines end together.

    Raises:
        ValueError: there are too few rows.
    """
    found = Builder(problem, Pricer(problem)).rebuild(partition, has_other_shards=False)
    if found is None:
        raise ValueError(
            f"{problem.rows_per_step} rows are too few for {len(partition.pipelines)} pipelines"
        )
    return found


def with_other_shards(partition: Partition, problem: PartitionProblem) -> Partition | None:
    """Runs by speed in each of its groups, every rank with a shard at least, and the rows for that.

    None where a group has more ranks than shards, or there are too few rows.
    """
    return Builder(problem, Pricer(problem)).rebuild(partition, has_other_shards=True)
