"""Who writes which piece of a checkpoint: each once, the busiest rank as little as can be.

Pure. Sharding of MoC-System (section 4) over whole pieces: an expert's may be written by any of its
hosts, a dense block's by any rank that holds it. Given the pieces of one partial checkpoint, this
is their "adaptive" sharding: dense pieces fill up the ranks that write no expert.
"""

from collections.abc import Mapping

from pacekeeper.core.layout import Layout
from pacekeeper.core.manifest import Piece


def writers(layout: Layout, size_bytes: Mapping[Piece, int]) -> dict[Piece, int]:
    """The rank that writes each of these pieces: one of its block's holders.

    Pieces with few holders are given away first, then large ones, each to its least burdened
    holder; then pieces go on to another holder as long as the busier of the two gains. The same on
    all ranks. The busiest rank writes at most one piece's bytes more than the mean where all ranks
    hold all (Graham's bound for list scheduling).
    """
    holders = {piece: layout.holders(piece.block) for piece in size_bytes}
    load = dict.fromkeys(layout.ranks, 0)
    order = sorted(holders, key=lambda p: (len(holders[p]), -size_bytes[p], p))
    chosen: dict[Piece, int] = {}
    for piece in order:
        rank = min(holders[piece], key=lambda r: (load[r], r))
        chosen[piece] = rank
        load[rank] += size_bytes[piece]
    is_settled = False
    while not is_settled:  # ends: each turn makes the sum of the squared loads smaller
        is_settled = True
        for piece in order:
            size, here = size_bytes[piece], chosen[piece]
            there = min(holders[piece], key=lambda r: (load[r], r))
            if load[there] + size < load[here]:
                chosen[piece] = there
                load[here] -= size
                load[there] += size
                is_settled = False
    return chosen
