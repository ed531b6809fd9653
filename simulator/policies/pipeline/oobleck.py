"""Oobleck (SOSP'23), alone and strengthened: pipelines of fewer nodes, by templates.

A node is a tensor group; one that loses a rank is gone. A pipeline goes on with the groups it has
left, layers divided anew by the template for so many; with fewer than the smallest template it
borrows from the largest pipeline, or its groups join the others. Whole micro-batches follow the
pipelines' throughput. Below f + 1 smallest templates it stops. `is_strengthened`: with Greyhound's
detection, so that micro-batches follow slow ranks, too (research 4, 5.10).
"""

from dataclasses import dataclass

from pacekeeper.controller.planning.model.problem import PartitionProblem, healthy
from pacekeeper.controller.planning.partition.layer_split import StageBoundaries
from pacekeeper.controller.planning.partition_cost.compute import layer_sums
from pacekeeper.simulator.baselines.even_pipelines import (
    Ranks,
    assembled,
    batch_rows,
    cuts_for,
    even_cost,
    even_counts,
    num_batches,
    stage_s,
)
from pacekeeper.simulator.jobs.pipeline import PipelineJob
from pacekeeper.simulator.jobs.pipeline_assignment import Planned, Work
from pacekeeper.simulator.policies.pipeline.base import Known, PipelineMoment, PipelinePolicy
from pacekeeper.simulator.policies.pipeline.greyhound import S2_STEPS
from pacekeeper.simulator.policies.pipeline.recycle import whole_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Oobleck(PipelinePolicy):
    """`failures`: its f, nodes that may fail at once."""

    name: str = "oobleck"
    notice_steps: int = S2_STEPS
    validate_s: float = 3.0
    failures: int = 1
    is_strengthened: bool = False

    def work_for(self, problem: PartitionProblem) -> Work | None:
        as_new = healthy(problem)
        groups = [[ranks for ranks in of if ranks] for of in whole_groups(problem)]
        smallest = _smallest(as_new)
        if sum(map(len, groups)) < (self.failures + 1) * smallest:
            return None
        pipelines = _regrouped(groups, smallest)
        cuts = [_template(as_new, len(of)) for of in pipelines]
        ends = [found.ends for found in cuts if found is not None]
        if len(ends) < len(cuts):
            return None
        known = problem if self.is_strengthened else as_new
        paces = [_pace_s(of, of_ends, known) for of, of_ends in zip(pipelines, ends, strict=True)]
        counts = even_counts(num_batches(problem), paces, [1] * len(paces))
        return Planned(partition=assembled(pipelines, ends, counts, problem))

    def notices(self, moment: PipelineMoment, job: PipelineJob, known: Known) -> bool:
        return self.is_strengthened


def _template(problem: PartitionProblem, num_groups: int) -> StageBoundaries | None:
    """The best cuts for so many healthy groups; None where they do not hold the model."""
    if num_groups > len(problem.model.layers):
        return None
    cost = even_cost(problem.baseline.pipelines[0].cells[0].ranks, problem)
    sums = layer_sums(problem.model, problem.links)
    per_pipeline = num_batches(problem) // len(problem.baseline.pipelines)
    return cuts_for([cost] * num_groups, sums, batch_rows(problem), per_pipeline)


def _smallest(problem: PartitionProblem) -> int:
    """The fewest groups that hold the model; as many as the baseline has."""
    most = len(problem.baseline.pipelines[0].cells)
    fitting = (size for size in range(1, most) if _template(problem, size) is not None)
    return next(fitting, most)


def _regrouped(groups: list[list[Ranks]], smallest: int) -> list[list[Ranks]]:
    """Pipelines of `smallest` groups at least."""
    pipelines = [list(of) for of in groups if of]
    while True:
        short = min(pipelines, key=len)
        largest = max(pipelines, key=len)
        if len(short) >= smallest:
            return pipelines
        if len(largest) > smallest:
            short.append(largest.pop())
            continue
        pipelines.remove(short)
        for group in short:
            min(pipelines, key=len).append(group)


def _pace_s(groups: list[Ranks], ends: tuple[int, ...], problem: PartitionProblem) -> float:
    """Of one micro-batch on the slowest stage."""
    sums, rows = layer_sums(problem.model, problem.links), batch_rows(problem)
    return max(
        stage_s(even_cost(ranks, problem), first, end, rows, sums)
        for ranks, first, end in zip(groups, (0, *ends[:-1]), ends, strict=True)
    )
