"""Who writes which block: each once, by a holder, and the busiest rank little."""

from itertools import product
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.block_writers import writers
from pacekeeper.core.layout import Block, BlockKind, Layout, even_layout
from support.layouts import layouts


def sizes_of(layout: Layout, data: st.DataObject) -> dict[Block, int]:
    return {block: data.draw(st.integers(0, 50)) for block in layout.blocks()}


def loads(layout: Layout, chosen: dict[Block, int], sizes: dict[Block, int]) -> dict[int, int]:
    found = dict.fromkeys(layout.ranks, 0)
    for block, rank in chosen.items():
        found[rank] += sizes[block]
    return found


@given(layouts(), st.data())
def test_each_block_is_written_once_by_a_holder(layout: Layout, data: st.DataObject) -> None:
    sizes = sizes_of(layout, data)
    chosen = writers(layout, sizes)
    assert set(chosen) == set(layout.blocks())
    assert all(rank in layout.holders(block) for block, rank in chosen.items())
    assert chosen == writers(layout, dict(reversed(sizes.items()))), "the same on all ranks"


@given(layouts(), st.data())
def test_no_block_would_be_better_off_with_another_holder(
    layout: Layout, data: st.DataObject
) -> None:
    sizes = sizes_of(layout, data)
    chosen = writers(layout, sizes)
    load = loads(layout, chosen, sizes)
    for block, here in chosen.items():
        for there in layout.holders(block):
            assert there == here or load[there] + sizes[block] >= load[here]


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 6), st.data())
def test_where_all_hold_all_the_busiest_is_one_block_above_the_mean_at_most(
    num_ranks: int, num_layers: int, num_experts: int, data: st.DataObject
) -> None:
    layout = even_layout(
        ranks=range(num_ranks), num_layers=num_layers, num_experts=num_experts, replicas=num_ranks
    )
    sizes = sizes_of(layout, data)
    busiest = max(loads(layout, writers(layout, sizes), sizes).values())
    assert busiest <= sum(sizes.values()) / num_ranks + max(sizes.values())


@given(st.integers(2, 3), st.integers(1, 2), st.data())
def test_the_busiest_is_near_the_least_possible(
    num_ranks: int, replicas: int, data: st.DataObject
) -> None:
    layout = even_layout(ranks=range(num_ranks), num_layers=1, num_experts=3, replicas=replicas)
    sizes = sizes_of(layout, data)
    blocks = list(layout.blocks())
    least = min(
        max(loads(layout, dict(zip(blocks, ranks, strict=True)), sizes).values())
        for ranks in product(*(layout.holders(block) for block in blocks))
    )
    busiest = max(loads(layout, writers(layout, sizes), sizes).values())
    assert busiest <= least + max(sizes.values())


@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 16))
def test_experts_of_equal_size_on_two_hosts_are_spread_to_within_one_of_the_mean(
    num_ranks: int, num_layers: int, num_experts: int
) -> None:
    layout = even_layout(
        ranks=range(num_ranks), num_layers=num_layers, num_experts=num_experts, replicas=2
    )
    sizes = {b: int(b.kind is BlockKind.EXPERT) for b in layout.blocks()}
    load = loads(layout, writers(layout, sizes), sizes)
    assert max(load.values()) <= ceil(num_layers * num_experts / num_ranks) + 1
