"""What a pipelined job can run on: a partition, or even groups that hand micro-batches over.

A policy for such jobs answers with one of these; `pipeline.py` says how long its step takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pacekeeper.controller.planning.model.partition import Partition, StageShard
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.simulator.baselines.even_pipelines import Ranks, even_cell
from pacekeeper.simulator.baselines.resihp_migration import StageOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Each pipeline runs its own micro-batches by the step program of the partition."""

    partition: Partition

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.partition.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """groups[pipeline][stage] with even shards (none: a dead stage); ends: of all stages.

    counts: micro-batches each pipeline begins with. delta: the gap of progress beyond which a stage
    takes over another pipeline's next forward; `step_simulation.NEVER`: dead stages' ones only.
    order: of the chunks on a stage.
    """

    groups: tuple[tuple[Ranks, ...], ...]
    ends: tuple[int, ...]
    counts: tuple[int, ...]
    delta: int
    order: StageOrder = StageOrder.PROGRAM

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for of in self.groups for ranks in of for rank in ranks))


Work = Planned | Handed


def cells_of(work: Work, problem: PartitionProblem) -> Mapping[int, StageShard]:
    """By rank: the cell whose state it holds."""
    match work:
        case Planned():
            return {rank: cell for _, _, cell in work.partition.places() for rank in cell.ranks}
        case Handed():
            firsts = (0, *work.ends[:-1])
            return {
                rank: even_cell(ranks, first, end, problem)
                for of_pipeline in work.groups
                for ranks, first, end in zip(of_pipeline, firsts, work.ends, strict=True)
                for rank in ranks
            }
