"""Which experts a partial checkpoint holds: K of N per layer, in turn or where most would be lost.

Pure. Partial experts checkpoint (PEC) of MoC-System (arXiv 2408.04307, section 3): all dense blocks
each time, experts by turns; over some checkpoints every expert is saved.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum

from pacekeeper.core.layout.layout import Block, BlockKind


class Order(StrEnum):
    """How the experts of a partial checkpoint are chosen."""

    TURN = "turn"  # one after the other
    LOAD = "load"  # most tokens since they were saved last
    RISK = "risk"  # most tokens likely to be lost: core/checkpoint/partial_experts.py


def by_need(need: Sequence[Sequence[float]], num_saved: int, number: int) -> frozenset[Block]:
    """Of each layer the `num_saved` experts with the greatest need, need[layer][expert].

    Where needs are equal, those whose turn is next at checkpoint `number` (0, 1, ..) come first, so
    equal experts take turns: of N in a layer, each stands in at least one of any ceil(N / K)
    checkpoints in a row. The turn is shifted by one checkpoint from one MoE layer to the next, so
    that ranks which hold different experts share the work. Raises ValueError for a `num_saved`
    below 1.
    """
    if num_saved < 1:
        raise ValueError(f"of each layer at least one expert is saved, got {num_saved}")
    moe = [(layer, needs) for layer, needs in enumerate(need) if needs]
    return frozenset(
        Block(BlockKind.EXPERT, layer, expert)
        for place, (layer, needs) in enumerate(moe)
        for expert in _greatest(needs, num_saved, (number + place) * num_saved)
    )


def _greatest(needs: Sequence[float], num_saved: int, first: int) -> Iterable[int]:
    return sorted(range(len(needs)), key=lambda e: (-needs[e], (e - first) % len(needs)))[
        :num_saved
    ]
