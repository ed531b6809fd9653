"""Lazarus' expert placement, from its published rules: a baseline. Pure.

Replica counts in proportion to load with a floor (paper Eq. 1), then maximum rank overlap (paper
4.1): experts in groups by count, each group on nodes of its own, so that their node sets nest.
Where the last group is cut short the promise "survives fewer than `min_hosts` losses" may break
(research 1.6): this module keeps the published rule, the planner does not rest on it.
"""

from collections.abc import Sequence

Placement = tuple[tuple[int, ...], ...]  # by node: the expert in each slot, ascending


def replica_counts(loads: Sequence[float], *, num_slots: int, min_replicas: int) -> tuple[int, ...]:
    """How many replicas each expert gets (paper Eq. 1); with fewer slots than floors, no floor.

    loads [experts] in rows. The last expert by load takes what is left, so the counts add up to
    `num_slots`. Raises ValueError for fewer slots than experts, or loads that are none.
    """
    if num_slots < len(loads):
        raise ValueError(f"{num_slots} slots can not hold {len(loads)} experts")
    if not loads or min(loads) < 0.0:
        raise ValueError("loads must be of at least one expert, and not negative")
    floor = min_replicas if min_replicas * len(loads) <= num_slots else 1
    by_load = sorted(range(len(loads)), key=lambda e: (loads[e], e))
    counts = [0] * len(loads)
    left, rows = num_slots, float(sum(loads))
    for place, expert in enumerate(by_load):
        share = loads[expert] / rows if rows > 0.0 else 1.0 / (len(loads) - place)
        counts[expert] = max(int(share * left + 1e-9), floor)
        left -= counts[expert]
        rows -= loads[expert]
    return tuple(counts)


def maximum_rank_overlap(
    counts: Sequence[int], *, num_nodes: int, slots_per_node: int
) -> Placement:
    """Nodes for counts [experts] of replicas that fill all slots (paper 4.1, research 1.4).

    The paper leaves open how vacant slots are filled ("uniformly"): here each replica left over
    goes to the node with most vacancies, one without the expert first. Raises ValueError where the
    counts do not fill the slots.
    """
    if sum(counts) != num_nodes * slots_per_node or min(counts, default=0) < 1:
        raise ValueError(
            f"{sum(counts)} replicas of {len(counts)} experts, each at least once, do not fill"
            f" {num_nodes} nodes of {slots_per_node} slots"
        )
    by_count = sorted(range(len(counts)), key=lambda e: (counts[e], e))
    nodes: list[list[int]] = [[] for _ in range(num_nodes)]
    left = list(counts)
    first = 0
    for start in range(0, len(by_count), slots_per_node):
        group = by_count[start : start + slots_per_node]
        end = min(first + counts[group[0]], num_nodes)
        for node in nodes[first:end]:
            node.extend(group)
        for expert in group:
            left[expert] -= end - first
        first = end
    for expert in by_count:
        for _ in range(left[expert]):
            nodes_with_room = [n for n in range(num_nodes) if len(nodes[n]) < slots_per_node]
            at = min(nodes_with_room, key=lambda n: (expert in nodes[n], len(nodes[n]), n))
            nodes[at].append(expert)
    return tuple(tuple(sorted(node)) for node in nodes)
