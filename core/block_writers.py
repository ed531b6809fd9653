"""Who writes which block of a checkpoint: each block once, the busiest rank as little as can be.

Pure. "Equal sharding" of MoC-System (section 4) over whole blocks: an expert may be written by any
of its hosts, a dense block by any rank that holds it.
"""

from collections.abc import Mapping

from pacekeeper.core.layout import Block, Layout


def writers(layout: Layout, size_bytes: Mapping[Block, int]) -> dict[Block, int]:
    """The rank that writes each block of `layout.blocks()`: one of its holders.

    Blocks with few holders are given away first, then large ones, each to its least burdened
    holder; then blocks go on to another holder as long as the busier of the two gains. The same on
    all ranks. The busiest rank writes at most one block's bytes more than the mean where all ranks
    hold all (Graham's bound for list scheduling).
    """
    holders = {block: layout.holders(block) for block in layout.blocks()}
    load = dict.fromkeys(layout.ranks, 0)
    order = sorted(holders, key=lambda b: (len(holders[b]), -size_bytes[b], b))
    chosen: dict[Block, int] = {}
    for block in order:
        rank = min(holders[block], key=lambda r: (load[r], r))
        chosen[block] = rank
        load[rank] += size_bytes[block]
    is_settled = False
    while not is_settled:  # ends: each turn makes the sum of the squared loads smaller
        is_settled = True
        for block in order:
            size, here = size_bytes[block], chosen[block]
            there = min(holders[block], key=lambda r: (load[r], r))
            if load[there] + size < load[here]:
                chosen[block] = there
                load[here] -= size
                load[there] += size
                is_settled = False
    return chosen
