"""A rank, a node, or everybody? From ratios of ranks to the place of a fault. Pure.

Compute times only: a link shows itself in transfer times, which are not looked at here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log
from statistics import median

from pacekeeper.core.incidents.findings import FindingKind

ALIKE = 1.15  # slowdowns of one cause differ by this factor at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one fault sits. `node` is empty unless all its ranks, two or more, share the fault."""

    kind: FindingKind
    ranks: tuple[int, ...]
    node: str
    slowdown: float
    reason: str


def localise(
    ratios: Mapping[int, float], node_of: Mapping[int, str], *, min_slowdown: float = 1.10
) -> tuple[Place, ...]:
    """Group slow ranks by cause, the worst first; empty where nobody is slow.

    ratios: observed / expected of each rank, *not* relative to peers, or "everybody" could not be
    seen; node_of: the node of each of these ranks. All ranks of a node slow alike while other
    nodes have healthy ones: the host. More than half of all ranks slow, over two nodes or more:
    what they share, which is no host of theirs. Else each rank by itself. Raises ValueError for a
    rank without a node.
    """
    homeless = sorted(set(ratios) - set(node_of))
    if homeless:
        raise ValueError(f"ranks {homeless} have no node")
    slow = {rank: ratio for rank, ratio in ratios.items() if ratio >= min_slowdown}
    if not slow:
        return ()
    nodes: dict[str, list[int]] = {}
    for rank in sorted(ratios):
        nodes.setdefault(node_of[rank], []).append(rank)
    struck = {name for name, ranks in nodes.items() if any(rank in slow for rank in ranks)}
    if len(nodes) > 1 and len(struck) > 1 and 2 * len(slow) > len(ratios) and _are_alike(slow):
        return (_everybody(slow, len(ratios), len(struck)),)
    places = []
    for name in sorted(struck):
        own = {rank: slow[rank] for rank in nodes[name] if rank in slow}
        whole = len(own) == len(nodes[name]) > 1 and len(nodes) > 1
        places += [_host(name, own)] if whole and _are_alike(own) else _devices(name, own)
    return tuple(sorted(places, key=lambda place: (-place.slowdown, place.ranks)))


def _are_alike(slow: Mapping[int, float]) -> bool:
    return max(slow.values()) <= min(slow.values()) * ALIKE


def _typical(slow: Mapping[int, float]) -> float:
    return exp(median(log(ratio) for ratio in slow.values()))


def _everybody(slow: Mapping[int, float], num_ranks: int, num_nodes: int) -> Place:
    slowdown = _typical(slow)
    return Place(
        kind=FindingKind.HOST,
        ranks=tuple(sorted(slow)),
        node="",
        slowdown=slowdown,
        reason=f"{len(slow)} of {num_ranks} ranks on {num_nodes} nodes are x{slowdown:.2f} slow "
        "alike: something they share, not a device or a host",
    )


def _host(node: str, own: Mapping[int, float]) -> Place:
    slowdown = _typical(own)
    return Place(
        kind=FindingKind.HOST,
        ranks=tuple(sorted(own)),
        node=node,
        slowdown=slowdown,
        reason=f"all {len(own)} ranks of node {node} are x{slowdown:.2f} slow alike, other nodes "
        "have healthy ranks",
    )


def _devices(node: str, own: Mapping[int, float]) -> list[Place]:
    return [
        Place(
            kind=FindingKind.DEVICE,
            ranks=(rank,),
            node="",
            slowdown=slowdown,
            reason=f"rank {rank} on node {node} is x{slowdown:.2f} slow, unlike its neighbours",
        )
        for rank, slowdown in sorted(own.items())
    ]
