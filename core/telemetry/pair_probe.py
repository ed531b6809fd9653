"""The probe of pairs of ranks: which probe numbers request it, and which ranks meet in which round.

The number of a probe holds its kind, so that no other part of the road from controller to rank has
to know it. Read by the controller, which numbers probes, and by the trainer, which runs them.
"""

from collections.abc import Mapping, Sequence

Pair = tuple[int, int]
"""Two ranks, the smaller first."""


def is_pairwise(number: int) -> bool:
    """Whether a probe measures the pairs of ranks beside the devices: odd numbers do."""
    return number % 2 == 1


def next_number(newest: int, *, unix_s: float, pairwise: bool) -> int:
    """Return the number of the next probe.

    Args:
        newest: The number of the last one.
        unix_s: Now; numbers ascend from one start of the controller to the next.
        pairwise: Whether it is to measure pairs.
    """
    number = max(newest + 1, round(unix_s * 1e3))
    return number if is_pairwise(number) is pairwise else number + 1


def rounds_of(ranks: Sequence[int]) -> tuple[tuple[Pair, ...], ...]:
    """Return rounds of disjoint pairs, in which each pair of ranks meets once.

    N - 1 rounds for an even number of ranks, N for an odd one, where one rank rests in each: the
    circle method of round-robin tournaments.

    Args:
        ranks: Ascending.
    """
    circle: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        met = zip(circle[:half], reversed(circle[half:]), strict=True)
        pairs = [(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None]
        rounds.append(tuple(sorted(pairs)))
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return tuple(rounds) if len(ranks) > 1 else ()


def crossing_load(
    rounds: Sequence[Sequence[Pair]], node_of: Mapping[int, str]
) -> dict[Pair, tuple[bool, int]]:
    """Return what each pair shares its path with, by which pairs can be compared.

    Args:
        rounds: Pairs that exchange at the same time.
        node_of: The node of each rank.

    Returns:
        For each pair: whether its ranks are on different nodes, and how many pairs of its round
        cross the edge of the busier of its nodes (0 inside a node).
    """
    found: dict[Pair, tuple[bool, int]] = {}
    for pairs in rounds:
        crossing: dict[str, int] = {}
        for pair in pairs:
            nodes = {node_of[rank] for rank in pair}
            for node in nodes if len(nodes) > 1 else ():
                crossing[node] = crossing.get(node, 0) + 1
        for pair in pairs:
            nodes = {node_of[rank] for rank in pair}
            is_between = len(nodes) > 1
            load = max(crossing[node] for node in nodes) if is_between else 0
            found[pair] = is_between, load
    return found
