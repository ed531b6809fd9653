"""Candidate tensor groups and their stages.

Groups of one stage hold the same state, so swapping them between pipelines moves nothing: sorted by
speed, slow groups share a pipeline and delay no other. Within a node ranks may change groups: slow
ranks together, or equal sums of speed. Where ranks are missing, pipelines are dropped and their
groups lengthen or complete others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pacekeeper.controller.planning.model.partition import Partition, StageShard
from pacekeeper.controller.planning.model.problem import Device, PartitionProblem

Ranks = tuple[int, ...]
Deal = Callable[[Sequence[int], Sequence[int], Mapping[int, Device]], list[Ranks]]

MAX_GIVEN_UP = 6  # pipelines, beyond which no draft goes


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateGroups:
    """groups[pipeline][stage]: ranks of each tensor group, in the order of their shard runs."""

    name: str
    groups: tuple[tuple[Ranks, ...], ...]
    expert_groups: tuple[int | None, ...]


def candidate_groups(problem: PartitionProblem) -> list[CandidateGroups]:
    """Distinct candidates to price; the first is the present one if all its groups live."""
    living = set(problem.living)
    # Who has a bad past stands by first, if it costs nothing: so the others are drafted, too.
    trusting = _trusting(problem)
    found: list[CandidateGroups] = []
    now, baseline = (
        ("groups as they are", problem.now, False),
        ("groups of the baseline", problem.baseline, True),
    )
    for name, partition, is_baseline in (now, baseline):
        start = _living(_draft(name, partition), living)
        if is_baseline:
            start = _with_spares(start, problem, living)
        ways = [start, *_without_hopeless(start, problem)]
        for how, deal in (("slow ones together", _by_speed), ("even groups", _even_speeds)):
            ways.append(_regrouped(start, f"{name}, {how}", deal, problem.device_of))
        for way in ways:
            whole = _completed(way, problem)
            if trusting is not problem:
                whole += _completed(way, trusting)
            found += [draft for one in whole for draft in (one, _sorted(one, problem.device_of))]
    seen: dict[tuple[tuple[Ranks, ...], ...], CandidateGroups] = {}
    for draft in found:
        seen.setdefault(draft.groups, draft)
    return list(seen.values())


def _trusting(problem: PartitionProblem) -> PartitionProblem:
    """The problem without doubted devices; the same object where there are none."""
    if not any(device.is_doubted for device in problem.devices):
        return problem
    return replace(
        problem, devices=tuple(replace(device, is_doubted=False) for device in problem.devices)
    )


def shard_ranks(cell: StageShard) -> Ranks:
    """The ranks of a cell, in the order of their runs; those without attention last."""
    return tuple(dict.fromkeys(run.rank for run in (*cell.attention, *cell.mlp)))


def _draft(name: str, partition: Partition) -> CandidateGroups:
    return CandidateGroups(
        name=name,
        groups=tuple(
            tuple(shard_ranks(cell) for cell in pipeline.cells) for pipeline in partition.pipelines
        ),
        expert_groups=tuple(pipeline.expert_group for pipeline in partition.pipelines),
    )


def _living(draft: CandidateGroups, living: set[int]) -> CandidateGroups:
    groups = tuple(
        tuple(tuple(rank for rank in ranks if rank in living) for ranks in pipeline)
        for pipeline in draft.groups
    )
    return CandidateGroups(name=draft.name, groups=groups, expert_groups=draft.expert_groups)


def _without_hopeless(draft: CandidateGroups, problem: PartitionProblem) -> list[CandidateGroups]:
    """Without groups for which one layer takes longer than a healthy group's whole stage."""
    healthy = problem.baseline.pipelines[0].cells
    size = len(shard_ranks(healthy[0]))
    per_stage = len(problem.model.layers) / len(healthy)
    groups = tuple(
        tuple(
            ranks if _speed(ranks, problem.device_of) * per_stage >= size else ()
            for ranks in pipeline
        )
        for pipeline in draft.groups
    )
    if groups == draft.groups:
        return []
    return [
        CandidateGroups(
            name=f"{draft.name}, without the slowest groups",
            groups=groups,
            expert_groups=draft.expert_groups,
        )
    ]


def _with_spares(
    draft: CandidateGroups, problem: PartitionProblem, living: set[int]
) -> CandidateGroups:
    """Living ranks without a place take the places of dead ones: of their node first."""
    placed = {rank for pipeline in draft.groups for ranks in pipeline for rank in ranks}
    spares = sorted(living - placed)
    if not spares:
        return draft
    groups = [[list(ranks) for ranks in pipeline] for pipeline in draft.groups]
    for at, stage, cell in problem.baseline.places():
        lost = len(cell.ranks) - len(groups[at][stage])
        nodes = {problem.device_of[rank].node for rank in cell.ranks}
        for _ in range(lost):
            if spares:
                taken = min(spares, key=lambda r: (problem.device_of[r].node not in nodes, r))
                spares.remove(taken)
                groups[at][stage].append(taken)
    return CandidateGroups(
        name=draft.name,
        groups=tuple(tuple(tuple(ranks) for ranks in pipeline) for pipeline in groups),
        expert_groups=draft.expert_groups,
    )


def _speed(ranks: Sequence[int], device_of: Mapping[int, Device]) -> float:
    return sum(device_of[rank].speed for rank in ranks)


def _sorted(draft: CandidateGroups, device_of: Mapping[int, Device]) -> CandidateGroups:
    """In each stage the fastest group, then that with the fastest links, in the first pipeline.

    Among pipelines of one depth. So slow groups and slow links delay as few pipelines as they can.
    """
    groups = [list(pipeline) for pipeline in draft.groups]
    by_depth: dict[int, list[int]] = {}
    for at, pipeline in enumerate(groups):
        by_depth.setdefault(len(pipeline), []).append(at)
    for depth, members in by_depth.items():
        for stage in range(depth):
            ordered = sorted(
                (groups[at][stage] for at in members),
                key=lambda g: (
                    -_speed(g, device_of),
                    -min((device_of[rank].link_speed for rank in g), default=1.0),
                ),
            )
            for at, group in zip(members, ordered, strict=True):
                groups[at][stage] = group
    return CandidateGroups(
        name=f"{draft.name}, sorted",
        groups=tuple(tuple(pipeline) for pipeline in groups),
        expert_groups=draft.expert_groups,
    )


def _regrouped(
    draft: CandidateGroups,
    name: str,
    deal: Deal,
    device_of: Mapping[int, Device],
) -> CandidateGroups:
    """Ranks change groups inside their node, where that node's devices differ or some are lost."""
    places: dict[int, list[tuple[int, int]]] = {}
    for at, pipeline in enumerate(draft.groups):
        for stage, ranks in enumerate(pipeline):
            nodes = {device_of[rank].node for rank in ranks}
            if len(nodes) == 1:
                places.setdefault(nodes.pop(), []).append((at, stage))
    groups = [list(pipeline) for pipeline in draft.groups]
    for cells in places.values():
        sizes = [len(groups[at][stage]) for at, stage in cells]
        pool = [rank for at, stage in cells for rank in groups[at][stage]]
        if len(cells) == 1 or (
            len({device_of[rank].speed for rank in pool}) == 1 and len(set(sizes)) == 1
        ):
            continue
        for (at, stage), ranks in zip(cells, deal(pool, sizes, device_of), strict=True):
            groups[at][stage] = ranks
    return CandidateGroups(
        name=name,
        groups=tuple(tuple(pipeline) for pipeline in groups),
        expert_groups=draft.expert_groups,
    )


def _by_speed(
    pool: Sequence[int], sizes: Sequence[int], device_of: Mapping[int, Device]
) -> list[Ranks]:
    """Groups of the sizes they had, filled by speed; in a group the ranks keep their order."""
    by_speed = sorted(pool, key=lambda rank: (-device_of[rank].speed, pool.index(rank)))
    dealt, at = [], 0
    for size in sizes:
        chosen = set(by_speed[at : at + size])
        dealt.append(tuple(rank for rank in pool if rank in chosen))
        at += size
    return dealt


def _even_speeds(
    pool: Sequence[int], sizes: Sequence[int], device_of: Mapping[int, Device]
) -> list[Ranks]:
    """The fastest first, each to the group with the least speed: nearly equal sums (LPT)."""
    sums = [0.0] * len(sizes)
    chosen: list[set[int]] = [set() for _ in sizes]
    for rank in sorted(pool, key=lambda rank: (-device_of[rank].speed, pool.index(rank))):
        least = min(range(len(sums)), key=lambda i: (sums[i], i))
        sums[least] += device_of[rank].speed
        chosen[least].add(rank)
    return [tuple(rank for rank in pool if rank in some) for some in chosen]


def _completed(draft: CandidateGroups, problem: PartitionProblem) -> list[CandidateGroups]:
    """Drafts without an empty cell: itself, or with fewer cells or pipelines."""
    holed = [at for at, pipeline in enumerate(draft.groups) if not all(pipeline)]
    if not holed:
        return [draft]
    members: dict[int | None, list[int]] = {}
    for at, expert_group in enumerate(draft.expert_groups):
        members.setdefault(expert_group, []).append(at)
    found = []
    for given_up in range(min(len(holed), MAX_GIVEN_UP) + 1):
        groups: list[tuple[Ranks, ...]] = []
        expert_groups: list[int | None] = []
        for expert_group, group_members in members.items():
            pipelines = [draft.groups[at] for at in group_members]
            number = min(given_up, sum(not all(pipeline) for pipeline in pipelines))
            left = max(1, len(pipelines) - number)
            rebuild = _lengthened if expert_group is None else _levelled
            rebuilt = rebuild(pipelines, left, problem)
            groups += rebuilt
            expert_groups += [expert_group] * len(rebuilt)
        if groups and all(groups):
            found.append(
                CandidateGroups(
                    name=f"{draft.name}, {len(draft.groups) - len(groups)} pipelines less",
                    groups=tuple(groups),
                    expert_groups=tuple(expert_groups),
                )
            )
    return found


def _lengthened(
    pipelines: Sequence[tuple[Ranks, ...]], left: int, problem: PartitionProblem
) -> list[tuple[Ranks, ...]]:
    """The fastest `left` pipelines; each group of the others joins the slowest of them."""
    order = sorted(
        range(len(pipelines)),
        key=lambda at: (-sum(_speed(ranks, problem.device_of) for ranks in pipelines[at]), at),
    )
    kept = {
        at: [(stage, ranks) for stage, ranks in enumerate(pipelines[at]) if ranks]
        for at in sorted(order[:left])
    }
    donors = [
        (stage, ranks) for at in order[left:] for stage, ranks in enumerate(pipelines[at]) if ranks
    ]
    for donor in sorted(donors, key=lambda d: (-_speed(d[1], problem.device_of), d)):
        short = [at for at, cells in kept.items() if len(cells) < len(problem.model.layers)]
        if short:
            slowest = min(
                short,
                key=lambda at: (sum(_speed(g, problem.device_of) for _, g in kept[at]), at),
            )
            kept[slowest] = sorted([*kept[slowest], donor], key=lambda cell: cell[0])
    return [tuple(ranks for _, ranks in cells) for cells in kept.values() if cells]


def _levelled(
    pipelines: Sequence[tuple[Ranks, ...]], left: int, problem: PartitionProblem
) -> list[tuple[Ranks, ...]]:
    """`left` pipelines of one depth, of the fastest groups, each as near to its stage as can be.

    Of groups as fast as each other those with a bad past are left over.
    """
    found = [
        (stage, ranks) for pipeline in pipelines for stage, ranks in enumerate(pipeline) if ranks
    ]
    depth = min(max(map(len, pipelines)), len(found) // left)
    device_of = problem.device_of
    by_speed = sorted(
        found,
        key=lambda cell: (
            -_speed(cell[1], device_of), sum(device_of[r].is_doubted for r in cell[1]), cell
        ),
    )  # fmt: skip
    chosen = sorted(by_speed[: depth * left], key=lambda cell: cell[0])
    return [tuple(chosen[stage * left + at][1] for stage in range(depth)) for at in range(left)]
