"""Wishes about layouts: nothing is without a holder, and a difference is exactly what changed."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pacekeeper.core.layout.apportion import apportion
from pacekeeper.core.layout.diff import added_replicas, diff_layouts, lost_blocks
from pacekeeper.core.layout.even_layout import even_layout, flat_pipelines
from pacekeeper.core.layout.layout import (
    Block,
    BlockKind,
    ExpertReplica,
    Layout,
    Pipeline,
    ShardRun,
    Stage,
    with_batch_shares,
)
from pacekeeper.core.layout.state_owners import assign_state_owners
from support.layouts import ModelBlocks, layouts, models, normalised, pipelines_of

pairs_of_layouts = models.flatmap(
    lambda model: st.tuples(layouts(model=model), layouts(model=model, generation=2))
)


@given(layouts())
def test_every_block_has_a_holder_and_is_named_once(layout: Layout) -> None:
    blocks = list(layout.blocks())
    assert len(blocks) == len(set(blocks))
    for block in blocks:
        holders = layout.holders(block)
        assert holders and set(holders) <= set(layout.ranks)
        assert list(holders) == sorted(set(holders))


@given(layouts())
def test_a_rank_holds_the_experts_that_name_it(layout: Layout) -> None:
    for layer, layer_experts in enumerate(layout.experts):
        for expert in range(len(layer_experts)):
            holders = layout.holders(Block(BlockKind.EXPERT, layer, expert))
            on = tuple(rank for rank in layout.ranks if expert in layout.experts_on(rank, layer))
            assert on == holders


@given(layouts())
def test_nothing_moves_to_the_same_layout(layout: Layout) -> None:
    assert diff_layouts(layout, replace(layout, generation=2)) == ()


@given(pairs_of_layouts)
def test_fresh_replicas_are_those_that_only_the_new_layout_has(pair: tuple[Layout, Layout]) -> None:
    old, new = pair
    ranks = [rank for _, _, rank in new.replicas - old.replicas]
    assert sorted(added_replicas(old, new)) == sorted(ranks)


@given(layouts(), st.data())
def test_a_block_is_lost_with_its_last_holder_or_the_last_of_its_optimizer_state(
    layout: Layout, data: st.DataObject
) -> None:
    layout = replace(layout, state_owners=())
    owned = assign_state_owners(layout)
    living = data.draw(st.sets(st.sampled_from(layout.ranks)))
    for one in (layout, owned):
        lost = lost_blocks(one, living)
        assert lost == tuple(
            b for b in one.blocks()
            if not living & {*one.holders(b)} or not living & {*one.state_holders(b)}
        )  # fmt: skip
    assert set(lost_blocks(layout, living)) <= set(lost_blocks(owned, living))
    assert lost_blocks(owned, layout.ranks) == ()


@given(pairs_of_layouts, st.data())
def test_transfers_turn_the_old_holders_into_the_new_ones(
    pair: tuple[Layout, Layout], data: st.DataObject
) -> None:
    old, new = pair
    living = data.draw(st.sets(st.sampled_from(old.ranks), min_size=1))
    moves = diff_layouts(old, new, living=living)
    assert moves == diff_layouts(old, new, living=sorted(living, reverse=True))
    order = list(new.blocks())
    assert [m.block for m in moves] == sorted((m.block for m in moves), key=order.index)
    for block in order:
        had, wants = set(old.holders(block)), set(new.holders(block))
        of_block = [m for m in moves if m.block == block]
        assert sorted(m.destination for m in of_block) == sorted(wants - had)
        for move in of_block:
            if had & living:
                assert move.source in had & living
            else:
                assert move.source is None


@given(pairs_of_layouts)
def test_without_deaths_every_block_has_a_source(pair: tuple[Layout, Layout]) -> None:
    assert all(move.source is not None for move in diff_layouts(*pair))


@given(st.integers(2, 5), st.integers(1, 12))
def test_sending_is_spread_over_the_holders(num_ranks: int, num_experts: int) -> None:
    # Every rank but the last holds everything; the last one joins and needs every block.
    old = even_layout(
        ranks=range(num_ranks), num_layers=1, num_experts=num_experts, replicas=num_ranks
    )
    new = even_layout(
        ranks=range(num_ranks + 1), num_layers=1, num_experts=num_experts, replicas=num_ranks + 1
    )
    sources = [move.source for move in diff_layouts(old, new)]
    sent = [sources.count(rank) for rank in range(num_ranks)]
    assert sum(sent) == len(list(new.blocks()))
    assert max(sent) - min(sent) <= 1


@given(models, models)
def test_layouts_of_different_models_have_no_difference(a: ModelBlocks, b: ModelBlocks) -> None:
    def flat(model: ModelBlocks) -> Layout:
        run = ShardRun(0, 0, model.num_virtual_shards)
        layers = model.experts_per_layer
        return Layout(
            generation=1,
            num_attention_shards=model.num_virtual_shards,
            num_mlp_shards=model.num_virtual_shards,
            pipelines=pipelines_of([(0, len(layers), ((run,),))], [1.0]),
            experts=tuple(((ExpertReplica(0, 1.0),),) * n for n in layers),
        )

    if a == b:
        assert diff_layouts(flat(a), flat(b)) == ()
    else:
        with pytest.raises(ValueError, match="different models"):
            diff_layouts(flat(a), flat(b))


@given(st.integers(0, 10**9), st.lists(st.floats(0, 1), min_size=1, max_size=9))
@example(total=3, raw=[1 / 3, 1 / 3, 1 / 3])
@example(total=10**9, raw=[0.1] * 9)
def test_apportioning_splits_everything_to_within_one(total: int, raw: list[float]) -> None:
    shares = normalised(raw)
    counts = apportion(total, shares)
    assert sum(counts) == total
    exact = [total * share for share in shares]
    assert all(abs(n - x) < 1 + 1e-6 for n, x in zip(counts, exact, strict=True))


@given(st.integers(0, 100), st.lists(st.floats(0.01, 1), min_size=1, max_size=6), st.data())
def test_a_larger_share_never_gets_less(total: int, raw: list[float], data: st.DataObject) -> None:
    shares = sorted(normalised(raw), reverse=True)
    counts = apportion(total, shares)
    assert all(more >= less for more, less in pairwise(counts))


@pytest.mark.parametrize("shares", [[], [0.0, 0.0], [1.0, -0.5], [float("nan")], [float("inf")]])
def test_nothing_to_share_by_is_refused(shares: list[float]) -> None:
    with pytest.raises(ValueError, match="shares"):
        apportion(3, shares)


@given(layouts(), st.integers(0, 1000))
def test_every_row_of_the_batch_goes_to_one_data_parallel_rank(layout: Layout, rows: int) -> None:
    counts = layout.rows_of(rows)
    assert list(counts) == [rank for rank, _ in layout.batch_shares]
    assert sum(counts.values()) == rows


@given(st.integers(1, 7), st.integers(1, 3), st.integers(1, 12), st.integers(1, 7))
def test_the_first_layout_is_even(
    num_ranks: int, num_layers: int, num_experts: int, replicas: int
) -> None:
    ranks = range(10, 10 + num_ranks)
    kwargs: dict[str, Any] = {
        "num_layers": num_layers,
        "num_experts": num_experts,
        "replicas": replicas,
    }
    if replicas > num_ranks:
        with pytest.raises(ValueError, match="as many ranks"):
            even_layout(ranks=ranks, **kwargs)
        return
    layout = even_layout(ranks=ranks, **kwargs)
    assert layout == even_layout(ranks=reversed(ranks), **kwargs)
    for layer, layer_experts in enumerate(layout.experts):
        assert {len(hosts) for hosts in layer_experts} == {replicas}
        slots = [len(layout.experts_on(rank, layer)) for rank in ranks]
        assert max(slots) - min(slots) <= 1


def flat(*shares: float) -> tuple[Pipeline, ...]:
    return with_batch_shares(flat_pipelines(range(len(shares)), 1), shares)


def two_ranks(**change: object) -> Layout:
    layout = even_layout(ranks=range(2), num_layers=1, num_experts=1, replicas=1)
    return replace(layout, **change)  # type: ignore[arg-type]


def alone(*runs: tuple[int, int, int], first: int = 0, end: int = 1) -> tuple[Pipeline, ...]:
    """One pipeline of one stage."""
    return pipelines_of([(first, end, [tuple(ShardRun(*run) for run in runs)])], [1.0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"generation": 0}, "from 1"),
        ({"num_mlp_shards": 0}, "at least one virtual shard"),
        ({"num_attention_shards": 2}, "does not hold all"),
        ({"num_mlp_shards": 2}, "does not hold all"),
        ({"pipelines": ()}, "at least one pipeline"),
        ({"pipelines": alone((0, 0, 1), end=2)}, "stages cover 2 layers"),
        ({"pipelines": alone((0, 0, 1)) * 2}, "two tensor groups"),
        ({"pipelines": flat(0.5, 0.6)}, "batch: shares must add up to 1"),
        ({"pipelines": flat(1.5, -0.5)}, "not negative"),
        ({"pipelines": flat(0.5, 0.5)[::-1]}, "ascend"),
        ({"shared_mlp_layers": (1,)}, "must have experts"),
        ({"shared_mlp_layers": (0, 0)}, "must have experts and ascend"),
        ({"experts": (((),),)}, "layer 0 expert 0"),
        (
            {"experts": (((ExpertReplica(7, 1.0),),),)},
            "layer 0 expert 0: ranks .7. run other layers",
        ),
        ({"experts": (((ExpertReplica(0, float("nan")),),),)}, "finite"),
        ({"experts": (((ExpertReplica(0, 0.5), ExpertReplica(0, 0.5)),),)}, "each once"),
        ({"experts": ()}, "the model has 0"),
        ({"speeds": ((7, 0.5),)}, "speeds: must be of ranks of the layout"),
        ({"speeds": ((1, 0.5), (0, 0.5))}, "ascending"),
        ({"speeds": ((0, 0.0),)}, "above 0"),
    ],
)
def test_an_impossible_layout_is_refused_with_its_reason(
    change: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        two_ranks(**change)


@pytest.mark.parametrize(
    ("layers", "attention", "mlp", "words"),
    [
        ((1, 1), [(0, 0, 1)], [(0, 0, 1)], "not a stage"),
        ((0, 1), [], [], "has no rank"),
        ((0, 1), [(-1, 0, 1)], [(-1, 0, 1)], "ranks count from 0"),
        ((0, 1), [(0, 0, 2), (1, 3, 4)], [(0, 0, 2), (1, 3, 4)], "runs must cover"),
        ((0, 1), [(0, 0, 4)], [(0, 0, 3), (1, 3, 4)], "the same ranks"),
        ((0, 1), [(0, 0, 2), (1, 2, 4)], [(1, 0, 2), (0, 2, 4)], "the same ranks"),
        ((0, 1), [(0, 0, 4), (1, 4, 4)], [(0, 0, 4), (1, 4, 4)], "no shard"),
    ],
)
def test_an_impossible_stage_is_refused_with_its_reason(
    layers: tuple[int, int],
    attention: list[tuple[int, int, int]],
    mlp: list[tuple[int, int, int]],
    words: str,
) -> None:
    with pytest.raises(ValueError, match=words):
        Stage(
            first_layer=layers[0],
            end_layer=layers[1],
            attention=tuple(ShardRun(*run) for run in attention),
            mlp=tuple(ShardRun(*run) for run in mlp),
        )


def test_stages_of_a_pipeline_follow_each_other() -> None:
    with pytest.raises(ValueError, match="gap or overlap"):
        alone((0, 0, 1), first=1, end=2)
    with pytest.raises(ValueError, match="at least one stage"):
        Pipeline(stages=(), batch_share=1.0)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (Block(BlockKind.EXPERT, 0, 3), "layer 0 has no expert 3"),
        (Block(BlockKind.EXPERT, 2, 0), "no layer 2"),
        (Block(BlockKind.NORM_ROUTER, 2), "no layer 2"),
        (Block(BlockKind.ATTENTION, -1, 0), "no layer -1"),
        (Block(BlockKind.ATTENTION, 0, 1), "no virtual shard 1"),
        (Block(BlockKind.DENSE_MLP, 0, 0), "has experts instead"),
    ],
)
def test_a_block_that_the_model_lacks_has_no_holders(block: Block, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        two_ranks().holders(block)


def test_who_holds_what_in_two_stages_with_an_unequal_tensor_group() -> None:
    layout = Layout(
        generation=1,
        num_attention_shards=4,
        num_mlp_shards=4,
        pipelines=pipelines_of(
            [
                (0, 1, ((ShardRun(5, 0, 3), ShardRun(1, 3, 4)), (ShardRun(9, 0, 4),))),
                (1, 3, ((ShardRun(2, 0, 4),), (ShardRun(0, 0, 2), ShardRun(7, 2, 4)))),
            ],
            [0.5, 0.5],
        ),
        experts=((), ((ExpertReplica(0, 0.25), ExpertReplica(7, 0.75)),), ()),
    )
    assert layout.ranks == (0, 1, 2, 5, 7, 9)
    expected = {
        Block(BlockKind.EMBEDDING): (1, 5, 9),
        Block(BlockKind.HEAD): (0, 2, 7),
        Block(BlockKind.NORM_ROUTER, 0): (1, 5, 9),
        Block(BlockKind.NORM_ROUTER, 2): (0, 2, 7),
        Block(BlockKind.ATTENTION, 0, 2): (5, 9),
        Block(BlockKind.ATTENTION, 0, 3): (1, 9),
        Block(BlockKind.DENSE_MLP, 0, 0): (5, 9),
        Block(BlockKind.ATTENTION, 1, 1): (0, 2),
        Block(BlockKind.ATTENTION, 1, 2): (2, 7),
        Block(BlockKind.EXPERT, 1, 0): (0, 7),
    }
    assert {block: layout.holders(block) for block in expected} == expected
    assert layout.experts_on(7, 1) == (0,)
    assert layout.experts_on(2, 1) == ()
    # Nothing twice, nothing forgotten: 4 attention shards per layer, dense shards without experts.
    assert len(list(layout.blocks())) == 1 + 3 * (1 + 4) + 2 * 4 + 1 + 1
