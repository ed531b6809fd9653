"""How survivors go on by themselves: the same layout without the dead, every expert re-hosted.

All ranks could compute it alike; the leader does and the others take its answer. The controller
improves on it later: this rule only has to be safe, balanced and deterministic.
"""

from collections.abc import Collection
from dataclasses import replace

from pacekeeper.core.errors import LostStateError
from pacekeeper.core.layout import ExpertHosts, Host, Layout


def shrink(layout: Layout, *, dead: Collection[int], generation: int, min_hosts: int = 2) -> Layout:
    """`layout` without the `dead` ranks, where every expert has `min_hosts` hosts again (or all).

    A tensor group that lost a rank leaves its stage. A survivor's share grows in proportion; an
    expert below `min_hosts` gets the least burdened rank as a fresh host and the shares even out.
    Raises LostStateError where an expert has no living host or a stage no whole group.
    """
    gone = set(dead)
    stages = []
    for stage in layout.stages:
        groups = tuple(g for g in stage.groups if not any(run.rank in gone for run in g))
        if not groups:
            raise LostStateError(
                f"no living rank holds layers {stage.first_layer} to {stage.end_layer - 1}",
                remedy="restart from a checkpoint",
            )
        stages.append(replace(stage, groups=groups))
    kept = {rank: share for rank, share in layout.batch_shares if rank not in gone}
    batch = {g[0].rank: kept.get(g[0].rank, 0.0) for g in stages[0].groups}
    experts = tuple(
        _rehost(layer, layout.experts[layer], stage.ranks, gone, min_hosts)
        for stage in stages
        for layer in range(stage.first_layer, stage.end_layer)
    )
    return replace(
        layout,
        generation=generation,
        stages=tuple(stages),
        experts=experts,
        batch_shares=_normalised(batch),
    )


def _rehost(
    layer: int,
    experts: tuple[ExpertHosts, ...],
    staying: tuple[int, ...],
    gone: set[int],
    min_hosts: int,
) -> tuple[ExpertHosts, ...]:
    """`staying`: the ranks that still run this layer; others may live and be a source only."""
    shares: list[dict[int, float]] = []
    for expert, hosts in enumerate(experts):
        if all(host.rank in gone for host in hosts):
            raise LostStateError(
                f"layer {layer} expert {expert}: all its hosts "
                f"{[host.rank for host in hosts]} are dead",
                remedy="restart from a checkpoint, with more replicas per expert",
            )
        left = {host.rank: host.share for host in hosts if host.rank in staying}
        shares.append(dict(_normalised(left)))
    slots = {rank: sum(rank in s for s in shares) for rank in staying}
    enough = min(max(1, min_hosts), len(staying))
    for hosts_of_expert in shares:
        while len(hosts_of_expert) < enough:
            fresh = min(
                (rank for rank in staying if rank not in hosts_of_expert),
                key=lambda rank: (slots[rank], rank),
            )
            slots[fresh] += 1
            hosts_of_expert[fresh] = 0.0
            for rank in hosts_of_expert:
                hosts_of_expert[rank] = 1.0 / len(hosts_of_expert)
    return tuple(tuple(Host(rank, s[rank]) for rank in sorted(s)) for s in shares)


def _normalised(shares: dict[int, float]) -> tuple[tuple[int, float], ...]:
    total = sum(shares.values())
    return tuple(
        (rank, share / total if total > 0.0 else 1.0 / len(shares))
        for rank, share in sorted(shares.items())
    )
