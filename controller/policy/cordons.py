"""Cordoned ranks: no plan gives them work, and they are left out as soon as it may be. Pure.

A person wants that, so it need not gain time; it must leave every block with a holder and the job
with enough ranks. What they hold is copied from them: they live.
"""

from dataclasses import replace

from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.errors import LostStateError
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.shrink import ReplicationFloor, shrink

MARK = 0.5  # a speed below 1: who stands by with one is given no place when others join
SLACK = 1e-6  # of a share: rounding


def leaving(view: PlanningSnapshot) -> tuple[int, ...]:
    """Cordoned ranks that have work, ascending."""
    return tuple(sorted(view.cordoned & set(view.layout.working)))


def left_out(view: PlanningSnapshot, config: PolicyConfig) -> tuple[Layout | None, str]:
    """The layout without them, or None and why there is none."""
    ranks, layout = leaving(view), view.layout
    assert ranks, "somebody is to be left out"
    if len(view.cordoned) > config.max_acted_ratio * len(layout.ranks):
        why = f"{len(view.cordoned)} of {len(layout.ranks)} are more than max_acted_ratio"
        return None, why
    floor = ReplicationFloor(
        replicas=config.min_hosts,
        domain_of=view.node_of,
        slots_per_rank=view.shape.slots_per_rank or None,
    )
    try:
        fewer = shrink(
            layout,
            dead=ranks,
            generation=view.next_generation,
            floor=floor,
            are_experts_filled=True,
        )
    except LostStateError as error:
        return None, str(error)
    standing_by = tuple(sorted({*fewer.standing_by, *ranks}))
    return replace(fewer, standing_by=standing_by), ""


def marked(layout: Layout, view: PlanningSnapshot) -> Layout:
    """Cordoned ranks that stand by are named with a speed: newcomers do not bring them back."""
    speeds = {rank: min(speed, MARK) if rank in view.cordoned else speed
              for rank, speed in layout.speeds}  # fmt: skip
    for rank in set(layout.standing_by) & view.cordoned:
        speeds.setdefault(rank, MARK)
    return replace(layout, speeds=tuple(sorted(speeds.items())))


def adds_work(view: PlanningSnapshot, layout: Layout) -> tuple[int, ...]:
    """Cordoned ranks to which `layout` gives work they have not now, ascending."""
    now = view.layout
    return tuple(
        rank
        for rank in sorted(view.cordoned & set(layout.working))
        if rank not in now.working
        or _held(layout, rank) - _held(now, rank)
        or _share(layout, rank) > _share(now, rank) + SLACK
    )


def _held(layout: Layout, rank: int) -> set[tuple[int, int]]:
    return {
        (layer, expert)
        for layer, experts in enumerate(layout.experts)
        for expert, hosts in enumerate(experts)
        if any(host.rank == rank for host in hosts)
    }


def _share(layout: Layout, rank: int) -> float:
    """Of the batch, and of all experts' tokens."""
    of_experts = sum(
        host.share
        for experts in layout.experts
        for on in experts
        for host in on
        if host.rank == rank
    )
    count = sum(map(len, layout.experts))
    return dict(layout.batch_shares).get(rank, 0.0) + (of_experts / count if count else 0.0)
