"""Wishes about layouts: nothing is without a holder, and a difference is exactly what changed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.errors import LostStateError
from pacekeeper.core.layout import Block, BlockKind, Host, Layout, apportion, even_layout, transfers
from pacekeeper.core.layout_codec import decode_layout, encode_layout
from pacekeeper.core.shrink import shrink
from support.layouts import layouts


@given(layouts())
def test_every_block_has_a_holder_and_is_named_once(layout: Layout) -> None:
    blocks = list(layout.blocks())
    assert len(blocks) == len(set(blocks))
    for block in blocks:
        holders = layout.holders(block)
        assert holders and set(holders) <= set(layout.ranks)
        assert list(holders) == sorted(set(holders))


@given(layouts())
def test_nothing_moves_to_the_same_layout(layout: Layout) -> None:
    assert transfers(layout, replace(layout, generation=2)) == ()


def rehosted(layout: Layout, data: st.DataObject) -> Layout:
    """The same stages with other hosts for each expert."""
    experts = []
    for layer, layer_experts in enumerate(layout.experts):
        ranks = layout.stage_of(layer).ranks
        hosts = []
        for _ in layer_experts:
            on = sorted(data.draw(st.sets(st.sampled_from(ranks), min_size=1)))
            hosts.append(tuple(Host(rank, 1 / len(on)) for rank in on))
        experts.append(tuple(hosts))
    return replace(layout, experts=tuple(experts), generation=layout.generation + 1)


@given(layouts(), st.data())
def test_transfers_give_every_new_holder_its_block_from_a_living_old_one(
    old: Layout, data: st.DataObject
) -> None:
    new = rehosted(old, data)
    living = data.draw(st.sets(st.sampled_from(old.ranks), min_size=1))
    moves = transfers(old, new, living=living)
    assert moves == transfers(old, new, living=living)
    for block in new.blocks():
        had, wants = set(old.holders(block)), set(new.holders(block))
        fetched = {m.destination for m in moves if m.block == block}
        assert fetched == wants - had
        for move in moves:
            if move.block == block:
                if had & living:
                    assert move.source in had & living
                else:
                    assert move.source is None


def test_layouts_of_different_models_have_no_difference() -> None:
    a = even_layout(ranks=range(4), num_layers=2, num_experts=4, replicas=2)
    b = even_layout(ranks=range(4), num_layers=2, num_experts=5, replicas=2)
    with pytest.raises(ValueError, match="different models"):
        transfers(a, b)


@given(layouts())
def test_the_codec_is_exact_and_canonical(layout: Layout) -> None:
    data = encode_layout(layout)
    assert decode_layout(data) == layout
    assert encode_layout(decode_layout(data)) == data


@given(st.binary(max_size=200))
def test_garbage_is_refused_as_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_layout(data)


@given(layouts(), st.data())
def test_a_damaged_layout_never_decodes_to_an_invalid_one(
    layout: Layout, data: st.DataObject
) -> None:
    text = bytearray(encode_layout(layout))
    at = data.draw(st.integers(0, len(text) - 1))
    text[at] = data.draw(st.integers(0, 255))
    try:
        decoded = decode_layout(bytes(text))
    except ValueError:
        return
    assert all(decoded.holders(block) for block in decoded.blocks())


@given(st.integers(0, 500), st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_apportioning_splits_everything_to_within_one(total: int, raw: list[float]) -> None:
    whole = sum(raw) or 1.0
    shares = [value / whole for value in raw] if sum(raw) else [1 / len(raw)] * len(raw)
    counts = apportion(total, shares)
    assert sum(counts) == total
    assert all(abs(n - total * share) < 1 + 1e-6 for n, share in zip(counts, shares, strict=True))


@given(st.integers(2, 6), st.integers(1, 3), st.integers(1, 9), st.integers(1, 3), st.data())
def test_survivors_keep_every_expert_or_say_which_is_lost(
    num_ranks: int, num_layers: int, num_experts: int, replicas: int, data: st.DataObject
) -> None:
    layout = even_layout(
        ranks=range(num_ranks),
        num_layers=num_layers,
        num_experts=num_experts,
        replicas=min(replicas, num_ranks),
    )
    dead = data.draw(st.sets(st.sampled_from(layout.ranks), max_size=num_ranks - 1))
    lost = any({host.rank for host in hosts} <= dead for layer in layout.experts for hosts in layer)
    if lost:
        with pytest.raises(LostStateError):
            shrink(layout, dead=dead, generation=2)
        return
    after = shrink(layout, dead=dead, generation=2, min_hosts=2)
    living = set(layout.ranks) - dead
    assert set(after.ranks) == living
    assert after.generation == 2
    for layer in after.experts:
        for hosts in layer:
            assert {host.rank for host in hosts} <= living
            assert len(hosts) >= min(2, len(living))
    # Every block a survivor needs can be had from a living rank.
    assert all(m.source is not None for m in transfers(layout, after, living=living))


def test_the_last_rank_of_a_stage_can_not_be_missed() -> None:
    layout = even_layout(ranks=[0], num_layers=1, num_experts=1, replicas=1)
    with pytest.raises(LostStateError, match="layers 0 to 0"):
        shrink(layout, dead=[0], generation=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"generation": 0}, "from 1"),
        ({"stages": ()}, "at least one stage"),
        ({"batch_shares": ((0, 0.5), (1, 0.6))}, "add up to 1"),
        ({"batch_shares": ((0, 1.0),)}, "data-parallel"),
        ({"batch_shares": ((1, 0.5), (0, 0.5))}, "ascend"),
        ({"experts": (((),),)}, "nobody holds it"),
        ({"experts": (((Host(7, 1.0),),),)}, "run other layers"),
        ({"experts": (((Host(0, float("nan")),),),)}, "finite"),
        ({"experts": ()}, "the model has 0"),
        ({"num_virtual_shards": 2}, "does not hold all"),
    ],
)
def test_an_impossible_layout_is_refused_with_its_reason(
    change: dict[str, object], words: str
) -> None:
    layout = even_layout(ranks=range(2), num_layers=1, num_experts=1, replicas=1)
    with pytest.raises(ValueError, match=words):
        replace(layout, **change)  # type: ignore[arg-type]


def test_unknown_blocks_are_refused() -> None:
    layout = even_layout(ranks=range(2), num_layers=1, num_experts=1, replicas=1)
    with pytest.raises(ValueError, match="no expert 3"):
        layout.holders(Block(BlockKind.EXPERT, 0, 3))
    with pytest.raises(ValueError, match="no layer 2"):
        layout.holders(Block(BlockKind.EXPERT, 2, 0))
