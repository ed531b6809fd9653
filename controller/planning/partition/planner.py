"""The partition planner: the cheapest partition for the present device speeds.

For each candidate of tensor groups: shards by speed, optimal stage boundaries for each pipeline (or
for those that share experts), rows so that all end together. The cheapest in seconds until the next
plan wins, the present partition included; its forecast is a longest path (research 3, 8). Groups
are found with the first schedule of the problem; the best of them are built with the others, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from pacekeeper.controller.planning.model.partition import Moves, Partition, PartitionPlan
from pacekeeper.controller.planning.model.problem import PartitionProblem, healthy
from pacekeeper.controller.planning.partition.builder import Builder
from pacekeeper.controller.planning.partition.constraints import is_allowed
from pacekeeper.controller.planning.partition.group_search import (
    CandidateGroups,
    candidate_groups,
)
from pacekeeper.controller.planning.partition_cost.memory import memory_bytes
from pacekeeper.controller.planning.partition_cost.state_transfer import moves
from pacekeeper.controller.planning.partition_cost.step_time import Pricer, price
from pacekeeper.core.layout.pipeline_schedule import Schedule
from pacekeeper.core.text import format_s

SAME = 1e-9  # two forecasts that differ by rounding only
NUM_EXACT = 4  # of the best drafts by the closed form: priced by longest paths, as what runs now is


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    draft: CandidateGroups | None  # None: what runs now
    partition: Partition
    step_s: float
    moves: Moves

    @property
    def name(self) -> str:
        return "as it is" if self.draft is None else self.draft.name

    def cost_s(self, num_steps: int) -> float:
        return self.step_s * num_steps + self.moves.move_s


def plan_partition(problem: PartitionProblem) -> PartitionPlan:
    """The cheapest partition of the living devices.

    Raises:
        ValueError: no partition of the living devices holds the model.
    """
    pricer = Pricer(problem)
    first, *others = problem.schedules
    candidates = []
    if is_allowed(problem.now, problem):
        candidates.append(_candidate(None, problem.now, pricer, is_exact=False))
    candidates += _built(candidate_groups(problem), first, pricer)
    if not candidates:
        raise ValueError("no partition of the living devices holds the model")
    num_steps = problem.prices.num_steps
    candidates.sort(key=lambda candidate: candidate.cost_s(num_steps))
    best_found = candidates[:NUM_EXACT]
    now = [found for found in candidates[NUM_EXACT:] if found.draft is None]
    drafts = list(dict.fromkeys(found.draft for found in best_found if found.draft))
    for schedule in others:
        more = _built(drafts, schedule, pricer)
        same = replace(problem.now, schedule=schedule)
        if is_allowed(same, problem):
            more.append(_candidate(None, same, pricer, is_exact=False))
        candidates += more
        best_found += more
    exact = [
        _candidate(found.draft, found.partition, pricer, is_exact=True)
        for found in (*best_found, *now)
    ]
    best = _least_doubted(exact, problem)
    return _plan(best, len(candidates), problem)


def _built(
    drafts: Sequence[CandidateGroups], schedule: Schedule, pricer: Pricer
) -> list[_Candidate]:
    """The partitions of these groups that are allowed; shards by memory only where they must.

    Rows by stage are further partitions, where the trainer can deal them.
    """
    problem = pricer.problem
    builders = [Builder(problem, pricer, schedule)]
    if any(device.link_speed < 1.0 for device in problem.devices):
        # Groups without slow links may be slower for their pipelines than those with them.
        devices = tuple(replace(device, link_speed=1.0) for device in problem.devices)
        builders.append(Builder(replace(problem, devices=devices), pricer, schedule))
    found = []
    for draft, builder, is_by_stage in product(drafts, builders, (False, True)):
        for is_tight in (False, True):
            partition = builder.build(draft, is_tight=is_tight, is_by_stage=is_by_stage)
            if partition is not None and is_allowed(partition, problem):
                found.append(_candidate(draft, partition, pricer, is_exact=False))
                break
    return found


def _least_doubted(candidates: Sequence[_Candidate], problem: PartitionProblem) -> _Candidate:
    """The cheapest; of those that cost the same the one with fewest that have a bad past."""
    num_steps = problem.prices.num_steps
    least = min(candidate.cost_s(num_steps) for candidate in candidates)
    alike = [one for one in candidates if one.cost_s(num_steps) <= least * (1.0 + SAME)]
    doubted = {device.rank for device in problem.devices if device.is_doubted}
    return min(
        alike,
        key=lambda one: (len(doubted.intersection(one.partition.ranks)), one.cost_s(num_steps)),
    )


def _candidate(
    draft: CandidateGroups | None, partition: Partition, pricer: Pricer, *, is_exact: bool
) -> _Candidate:
    return _Candidate(
        draft=draft,
        partition=partition,
        step_s=pricer.price(partition, is_exact=is_exact).step_s,
        moves=moves(partition, pricer.problem),
    )


def _plan(best: _Candidate, num_candidates: int, problem: PartitionProblem) -> PartitionPlan:
    placed = set(best.partition.ranks)
    known = set(problem.baseline.ranks) | set(problem.now.ranks)
    fluid_s = price(problem.baseline, healthy(problem)).step_s * problem.fluid_ratio
    return PartitionPlan(
        partition=best.partition,
        step_s=best.step_s,
        fluid_s=fluid_s,
        memory_bytes=tuple(sorted(memory_bytes(best.partition, problem).items())),
        moves=best.moves,
        standby=tuple(rank for rank in problem.living if rank not in placed),
        evicted=tuple(sorted(r for r in known if problem.device_of[r].speed <= 0.0)),
        reason=_in_words(best, num_candidates, fluid_s),
    )


def _in_words(best: _Candidate, num_candidates: int, fluid_s: float) -> str:
    count, runs = best.moves.total_bytes, best.partition.schedule
    return (
        f"{best.name}, {runs}: {format_s(best.step_s)} a step, {fluid_s / best.step_s:.1%} of the "
        f"fluid limit, {count:.3g} bytes to move; the cheapest of {num_candidates} partitions"
    )
