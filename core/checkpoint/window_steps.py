"""The length of a window, and which blocks are saved after which of its steps.

Only the copy stops training, so the bytes per rank of a stage count: pieces are spread over them
(core/checkpoint/write_plan.py). The windows of all stages start together. Experts come first, layer
by layer, then dense blocks: a replay computes least when whole layers wait for their state.
"""

from collections.abc import Mapping
from itertools import chain, zip_longest
from math import inf

from pacekeeper.core.checkpoint.manifest import Piece
from pacekeeper.core.checkpoint.sparse_window import BlockCost, ReplayStep, Window, plan_window
from pacekeeper.core.layout.layout import Block, BlockKind, Layout

# The longest that is chosen: with weights a third of the state, twice as many steps save only a
# twelfth of it per step, and cost twice as many steps done again.
MAX_WINDOW_STEPS = 8


def block_costs(size_bytes: Mapping[Piece, int]) -> dict[Block, BlockCost]:
    """The cost of saving each block, from the bytes of all pieces."""
    whole: dict[Block, int] = {}
    weights: dict[Block, int] = {}
    for piece, size in size_bytes.items():
        whole[piece.block] = whole.get(piece.block, 0) + size
        if not piece.kind:
            weights[piece.block] = weights.get(piece.block, 0) + size
    return {
        block: BlockCost(
            state_bytes=size,
            weight_bytes=weights.get(block, 0),
            tokens=0.0 if block.kind is BlockKind.EXPERT else inf,
        )
        for block, size in whole.items()
    }


def window_within_bytes(
    layout: Layout, costs: Mapping[Block, BlockCost], rank_bytes: float
) -> Window:
    """The shortest window in which no stage's ranks copy more than `rank_bytes` each on average.

    All ranks count as one stage where pipelines have cuts of their own.

    Raises:
        ValueError: weights and one state do not fit.
    """
    parts = []
    by_span = [set(layout.ranks_of_layer(span.start)) for span in layout.spans]
    for ranks in by_span if layout.has_equal_cuts else [set(layout.working)]:
        own = {block: cost for block, cost in costs.items() if ranks & {*layout.holders(block)}}
        parts.append(plan_window(own, rank_bytes * len(ranks)).turns)
    return Window(turns=tuple(tuple(chain(*turn)) for turn in zip_longest(*parts, fillvalue=())))


def window_of_steps(layout: Layout, costs: Mapping[Block, BlockCost], num_steps: int) -> Window:
    """The window of at most `num_steps` steps that copies least after its busiest one."""
    least, most = 0, max(1, sum(cost.state_bytes for cost in costs.values()))
    best = window_within_bytes(layout, costs, most)
    while most - least > 1:  # more bytes never make it longer
        middle = (least + most) // 2
        try:
            found = window_within_bytes(layout, costs, middle)
        except ValueError:
            least = middle
            continue
        if len(found.turns) > num_steps:
            least = middle
        else:
            most, best = middle, found
    return best


def fewest_steps(layout: Layout, costs: Mapping[Block, BlockCost], rank_bytes: float) -> int:
    """The length of a window whose copies fit into `rank_bytes` per rank and step.

    Returns:
        MAX_WINDOW_STEPS where none fits; 1 while nothing is known (0 bytes).
    """
    if rank_bytes <= 0.0:
        return 1
    try:
        found = len(window_within_bytes(layout, costs, rank_bytes).turns)
    except ValueError:
        return MAX_WINDOW_STEPS
    return min(found, MAX_WINDOW_STEPS)


def pieces_to_write(at: ReplayStep, pieces: Mapping[Piece, int]) -> dict[Piece, int]:
    """Those of `pieces` that are written after a step of a window, as its replay needs them."""
    loads, frozen = set(at.loads), set(at.frozen)
    return {
        piece: size
        for piece, size in pieces.items()
        if piece.block in loads or (piece.block in frozen and not piece.kind)
    }
