"""Who writes which piece: each once, by a holder, and the busiest rank little."""

from itertools import pairwise, product
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.checkpoint.manifest import Piece
from pacekeeper.core.checkpoint.write_plan import (
    MIN_STRIP_BYTES,
    STRIPS_PER_RANK,
    assign_writers,
    cut_pieces,
)
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import BlockKind, Layout
from pacekeeper.core.layout.state_owners import assign_state_owners
from support.layouts import layouts


def sizes_of(layout: Layout, data: st.DataObject) -> dict[Piece, int]:
    """Of some pieces, as a partial checkpoint has them."""
    pieces = [Piece(block, kind) for block in layout.blocks() for kind in ("", "exp_avg")]
    left_out = data.draw(st.sets(st.sampled_from(pieces)))
    return {p: data.draw(st.integers(0, 50)) for p in pieces if p not in left_out}


def loads(layout: Layout, chosen: dict[Piece, int], sizes: dict[Piece, int]) -> dict[int, int]:
    found = dict.fromkeys(layout.ranks, 0)
    for piece, rank in chosen.items():
        found[rank] += sizes[piece]
    return found


@given(layouts(), st.data())
def test_each_piece_is_written_once_by_a_holder(layout: Layout, data: st.DataObject) -> None:
    sizes = sizes_of(layout, data)
    chosen = assign_writers(layout, sizes)
    assert set(chosen) == set(sizes)
    assert all(rank in layout.holders(piece.block) for piece, rank in chosen.items())
    assert chosen == assign_writers(layout, dict(reversed(sizes.items()))), "the same on all ranks"


@given(layouts(), st.data())
def test_no_piece_would_be_better_off_with_another_holder(
    layout: Layout, data: st.DataObject
) -> None:
    sizes = sizes_of(layout, data)
    chosen = assign_writers(layout, sizes)
    load = loads(layout, chosen, sizes)
    for piece, here in chosen.items():
        for there in layout.holders(piece.block):
            assert there == here or load[there] + sizes[piece] >= load[here]


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 6), st.data())
def test_where_all_hold_all_the_busiest_is_one_piece_above_the_mean_at_most(
    num_ranks: int, num_layers: int, num_experts: int, data: st.DataObject
) -> None:
    layout = even_layout(
        ranks=range(num_ranks), num_layers=num_layers, num_experts=num_experts, replicas=num_ranks
    )
    sizes = sizes_of(layout, data)
    busiest = max(loads(layout, assign_writers(layout, sizes), sizes).values())
    assert busiest <= sum(sizes.values()) / num_ranks + max(sizes.values(), default=0)


@given(st.integers(2, 3), st.integers(1, 2), st.data())
def test_the_busiest_is_near_the_least_possible(
    num_ranks: int, replicas: int, data: st.DataObject
) -> None:
    layout = even_layout(ranks=range(num_ranks), num_layers=1, num_experts=3, replicas=replicas)
    pieces = [Piece(block) for block in layout.blocks()]
    sizes = {piece: data.draw(st.integers(0, 50)) for piece in pieces}
    least = min(
        max(loads(layout, dict(zip(pieces, ranks, strict=True)), sizes).values())
        for ranks in product(*(layout.holders(piece.block) for piece in pieces))
    )
    busiest = max(loads(layout, assign_writers(layout, sizes), sizes).values())
    assert busiest <= least + max(sizes.values())


@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 16))
def test_experts_of_equal_size_on_two_hosts_are_spread_to_within_one_of_the_mean(
    num_ranks: int, num_layers: int, num_experts: int
) -> None:
    layout = even_layout(
        ranks=range(num_ranks), num_layers=num_layers, num_experts=num_experts, replicas=2
    )
    sizes = {Piece(b): int(b.kind is BlockKind.EXPERT) for b in layout.blocks()}
    load = loads(layout, assign_writers(layout, sizes), sizes)
    assert max(load.values()) <= ceil(num_layers * num_experts / num_ranks) + 1


@given(layouts(), st.integers(0, 1 << 24), st.data())
def test_strips_are_the_whole_and_none_is_large_but_where_one_rank_holds_it(
    layout: Layout, largest: int, data: st.DataObject
) -> None:
    pieces = [Piece(block) for block in layout.blocks()]
    sizes = {piece: data.draw(st.integers(0, largest)) for piece in pieces}
    rows = {piece: data.draw(st.sampled_from([1, 7, 1 << 20])) for piece in pieces}
    strips = cut_pieces(layout, sizes, rows)
    most = max(MIN_STRIP_BYTES, sum(sizes.values()) // len(layout.ranks) // STRIPS_PER_RANK)
    for piece, size in sizes.items():
        own = [strip for strip in strips if strip.whole == piece]
        assert sum(strips[strip] for strip in own) == size
        cuts = [(strip.rows(rows[piece]).start, strip.rows(rows[piece]).stop) for strip in own]
        assert (cuts[0][0], cuts[-1][1]) == (0, rows[piece])
        assert all(one[1] == other[0] for one, other in pairwise(cuts))
        assert len(own) == 1 or all(strip.rows(rows[piece]) for strip in own)
        if rows[piece] == 1 << 20 and len(layout.holders(piece.block)) > 1:
            assert max(strips[strip] for strip in own) <= most
    assert len(strips) <= len(pieces) + STRIPS_PER_RANK * len(layout.ranks)


@given(st.integers(2, 9), st.integers(1, 4), st.data())
def test_cut_pieces_that_all_hold_leave_no_rank_a_fourth_above_the_mean(
    num_ranks: int, num_layers: int, data: st.DataObject
) -> None:
    layout = even_layout(
        ranks=range(num_ranks), num_layers=num_layers, num_experts=2, replicas=num_ranks
    )
    sizes = {Piece(b): data.draw(st.integers(1, 1 << 30)) for b in layout.blocks()}
    strips = cut_pieces(layout, sizes, dict.fromkeys(sizes, 1 << 40))
    mean = sum(sizes.values()) / num_ranks
    busiest = max(loads(layout, assign_writers(layout, strips), strips).values())
    assert busiest <= mean + max(MIN_STRIP_BYTES, mean / STRIPS_PER_RANK) + 1


@given(layouts(may_stand_by=False))
def test_the_moments_of_a_dense_block_are_written_by_its_owner_or_mirror(layout: Layout) -> None:
    owned = assign_state_owners(layout)
    sizes = {Piece(block, "exp_avg"): 8 for block in owned.blocks()}
    chosen = assign_writers(owned, sizes)
    for piece, rank in chosen.items():
        assert rank in owned.state_holders(piece.block)
