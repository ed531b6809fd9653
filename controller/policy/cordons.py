"""Cordoned ranks: no plan gives them work, and a plan leaves them out as soon as possible.

Called by `decide`. An operator's order need not gain time, but every block must keep a holder and
the job enough ranks. The blocks of cordoned ranks are copied from these ranks, which are alive.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.errors import LostStateError
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.resize.shrink import ReplicationFloor, shrink
from pacekeeper.core.telemetry.attachment import Capability

STANDBY_SPEED = 0.5  # below 1: a standby rank with such a speed gets no work when nodes join
SHARE_ROUNDING = 1e-6


class KeptReason(StrEnum):
    """Why cordoned ranks keep their work."""

    TOO_MANY = "too_many"  # more than `max_acted_ratio` of the ranks are cordoned
    LOST_STATE = "lost_state"  # a block would have no holder
    NOT_ABLE = "not_able"  # the trainer cannot leave a rank without work
    LEVEL_WAITS = "level_waits"  # such a plan was rejected or denied a short time ago


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAtWork:
    """Cordoned ranks keep their work, for this reason."""

    reason: KeptReason
    text: str


def cordoned_at_work(view: PlanningSnapshot) -> tuple[int, ...]:
    """Return the cordoned ranks that have work, ascending."""
    return tuple(sorted(view.cordoned & set(view.layout.working)))


def layout_without_cordoned(view: PlanningSnapshot, config: PolicyConfig) -> Layout | KeptAtWork:
    """Return the layout without the cordoned ranks, or why they keep their work.

    Args:
        view: The job, in whose layout cordoned ranks have work.
        config: The policy's settings.
    """
    ranks, layout = cordoned_at_work(view), view.layout
    assert ranks, "cordoned ranks have work"
    if Capability.PARTITION not in view.capabilities:
        why = "the trainer cannot leave a rank without work"
        return KeptAtWork(reason=KeptReason.NOT_ABLE, text=why)
    if len(view.cordoned) > config.max_acted_ratio * len(layout.ranks):
        why = f"{len(view.cordoned)} of {len(layout.ranks)} are more than max_acted_ratio"
        return KeptAtWork(reason=KeptReason.TOO_MANY, text=why)
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
        return KeptAtWork(reason=KeptReason.LOST_STATE, text=str(error))
    return replace(fewer, standing_by=tuple(sorted({*fewer.standing_by, *ranks})))


def with_standby_speeds(layout: Layout, view: PlanningSnapshot) -> Layout:
    """Give cordoned standby ranks a low speed in the layout, so that a join gives them no work."""
    speeds = {
        rank: min(speed, STANDBY_SPEED) if rank in view.cordoned else speed
        for rank, speed in layout.speeds
    }
    for rank in set(layout.standing_by) & view.cordoned:
        speeds.setdefault(rank, STANDBY_SPEED)
    return replace(layout, speeds=tuple(sorted(speeds.items())))


def ranks_given_work(view: PlanningSnapshot, layout: Layout) -> tuple[int, ...]:
    """Return the cordoned ranks to which `layout` gives work that they do not have now."""
    now = view.layout
    return tuple(
        rank
        for rank in sorted(view.cordoned & set(layout.working))
        if rank not in now.working
        or _held(layout, rank) - _held(now, rank)
        or _share(layout, rank) > _share(now, rank) + SHARE_ROUNDING
    )


def _held(layout: Layout, rank: int) -> set[tuple[int, int]]:
    return {
        (layer, expert)
        for layer, experts in enumerate(layout.experts)
        for expert, replicas in enumerate(experts)
        if any(replica.rank == rank for replica in replicas)
    }


def _share(layout: Layout, rank: int) -> float:
    """Return a rank's part of the batch's dense work plus its mean share of the experts' tokens."""
    of_experts = sum(
        replica.share
        for experts in layout.experts
        for on in experts
        for replica in on
        if replica.rank == rank
    )
    count = sum(map(len, layout.experts))
    number, at = layout.place_of(rank)
    stage = layout.pipelines[at].stages[number]
    held = sum(run.end - run.first for run in stage.attention if run.rank == rank)
    of_stage = held / layout.num_attention_shards * stage.num_layers / layout.num_layers
    return layout.batch_share_of(rank) * of_stage + (of_experts / count if count else 0.0)
