"""Which rank writes which piece of a checkpoint, with the least work for the busiest rank.

The sharding of MoC-System (section 4), over pieces: any replica rank may write an expert's piece,
any rank that holds it a dense block's. Given the pieces of a partial checkpoint this is their
"adaptive" sharding: dense pieces go to ranks that write no expert. MoC's unit is a layer; here
large pieces such as the embedding are cut.
"""

from collections.abc import Collection, Hashable, Mapping

from pacekeeper.core.checkpoint.manifest import Piece
from pacekeeper.core.layout.balance import assign_evenly
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.replica_spread import NO_DOMAINS, DomainOf, domain_of_rank

MIN_STRIP_BYTES = 1 << 16  # fewer are not worth a place of their own in the manifest
STRIPS_PER_RANK = 4  # of the mean that a rank writes: what is given away as one


def cut_pieces(
    layout: Layout, size_bytes: Mapping[Piece, int], num_rows: Mapping[Piece, int]
) -> dict[Piece, int]:
    """The same pieces, with large ones that several ranks hold cut into strips of equal rows.

    No strip is larger than a fourth of a rank's mean part, unless by one row, or smaller than
    MIN_STRIP_BYTES, so there are at most STRIPS_PER_RANK more pieces per rank than before.

    Args:
        layout: gives the holders of each block.
        size_bytes: the bytes of each piece.
        num_rows: the most rows of a tensor of each piece.

    Returns:
        The bytes of each piece or strip.
    """
    mean = sum(size_bytes.values()) // len(layout.ranks)
    most = max(MIN_STRIP_BYTES, mean // STRIPS_PER_RANK)
    found: dict[Piece, int] = {}
    for piece, size in size_bytes.items():
        strips = 1
        if size > most and len(piece_holders(layout, piece)) > 1:
            strips = max(1, min(-(-size // most), num_rows[piece]))
        for strip in piece.cut(strips):
            found[strip] = len(strip.rows(size))  # rows are as long as each other, nearly
    return found


def assign_writers(layout: Layout, size_bytes: Mapping[Piece, int]) -> dict[Piece, int]:
    """The rank that writes each of these pieces: one that has it.

    Pieces with few holders are assigned first, then large ones, each to its least loaded holder;
    then pieces move to another holder while the busier of the two gains. Equal on all ranks. The
    busiest rank writes at most one piece's bytes more than the mean where all ranks hold all blocks
    (Graham's bound for list scheduling).
    """
    holders = {piece: piece_holders(layout, piece) for piece in sorted(size_bytes)}
    return assign_evenly(holders, size_bytes)


def piece_holders(layout: Layout, piece: Piece) -> tuple[int, ...]:
    """The ranks that have a piece: optimizer state may have an owner and a mirror only."""
    return layout.state_holders(piece.block) if piece.kind else layout.holders(piece.block)


def assign_mirrors(ranks: Collection[int], domain_of: DomainOf = NO_DOMAINS) -> dict[int, int]:
    """The rank that keeps a copy of each rank's snapshot; every rank keeps one copy.

    Where no domain has more than half of the ranks, every copy is in another domain. Otherwise as
    many ranks of that domain as possible have theirs elsewhere, and so do all ranks of the others.

    Returns:
        rank -> the rank that keeps its copy; empty for a single rank.
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
