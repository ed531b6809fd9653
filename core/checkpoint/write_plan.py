"""Who writes which piece of a checkpoint: each once, the busiest rank as little as can be.

Pure. Sharding of MoC-System (section 4) over pieces: an expert's may be written by any of its
hosts, a dense block's by any rank that holds it. Given the pieces of one partial checkpoint, this
is their "adaptive" sharding: dense pieces fill up the ranks that write no expert. Where MoC's unit
is a layer, large pieces are cut: an embedding would else be one rank's alone.
"""

from collections.abc import Collection, Hashable, Mapping
from heapq import heapify, heapreplace

from pacekeeper.core.checkpoint.manifest import Piece
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.replica_spread import NO_DOMAINS, DomainOf, domain_of_rank

MIN_STRIP_BYTES = 1 << 16  # fewer are not worth a place of their own in the manifest
STRIPS_PER_RANK = 4  # of the mean that a rank writes: what is given away as one


def cut_pieces(
    layout: Layout, size_bytes: Mapping[Piece, int], num_rows: Mapping[Piece, int]
) -> dict[Piece, int]:
    """The same pieces, large ones that several ranks hold in strips of equal rows; their bytes.

    None of these is larger than a fourth of what a rank writes in the mean, unless by one row, or
    less than LEAST_BYTES. So there are at most STRIPS_PER_RANK more pieces than before per rank.
    """
    mean = sum(size_bytes.values()) // len(layout.ranks)
    most = max(MIN_STRIP_BYTES, mean // STRIPS_PER_RANK)
    found: dict[Piece, int] = {}
    for piece, size in size_bytes.items():
        strips = 1
        if size > most and len(layout.holders(piece.block)) > 1:
            strips = max(1, min(-(-size // most), num_rows[piece]))
        for strip in piece.cut(strips):
            found[strip] = len(strip.rows(size))  # rows are as long as each other, nearly
    return found


def assign_writers(layout: Layout, size_bytes: Mapping[Piece, int]) -> dict[Piece, int]:
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
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # of holders, as their loads were
    for piece in order:
        on = tuple(holders[piece])
        if on not in heaps:
            heaps[on] = [(load[rank], rank) for rank in on]
            heapify(heaps[on])
        heap = heaps[on]
        while load[rank := heap[0][1]] != heap[0][0]:  # loads only grow: the truth comes up
            heapreplace(heap, (load[rank], rank))
        chosen[piece] = rank
        load[rank] += size_bytes[piece]
    is_settled = False
    while not is_settled:  # ends: each turn makes the sum of the squared loads smaller
        is_settled = True
        least = min(load.values())  # no turn makes it less
        for piece in order:
            size, here = size_bytes[piece], chosen[piece]
            if least + size >= load[here]:
                continue
            there = min(holders[piece], key=lambda r: (load[r], r))
            if load[there] + size < load[here]:
                chosen[piece] = there
                load[here] -= size
                load[there] += size
                is_settled = False
    return chosen


def assign_mirrors(ranks: Collection[int], domain_of: DomainOf = NO_DOMAINS) -> dict[int, int]:
    """The keeper of each rank: each keeps one. Empty where nobody else is there.

    Where no domain has more than half of the ranks, every keeper is in another one. Where one has,
    as many of its ranks as can be have theirs elsewhere, and all ranks of the others have.
    """
    in_domain: dict[Hashable, list[int]] = {}
    for rank in sorted(ranks):
        in_domain.setdefault(domain_of_rank(domain_of, rank), []).append(rank)
    circle = [rank for members in in_domain.values() for rank in members]
    if len(circle) < 2:
        return {}
    widest = max(map(len, in_domain.values()))
    step = widest if widest < len(circle) else 1
    return {rank: circle[(i + step) % len(circle)] for i, rank in enumerate(circle)}
