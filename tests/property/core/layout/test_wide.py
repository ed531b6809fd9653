"""Layouts as wide as a plan can be: holders, text, transfers, and what deaths and joins make."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.core.errors import LostStateError
from pacekeeper.core.layout.codec import decode_layout, encode_layout
from pacekeeper.core.layout.diff import StatePart, diff_layouts
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.core.layout.resize.grow import grow, resize
from pacekeeper.core.layout.resize.shrink import ReplicationFloor, shrink
from pacekeeper.core.layout.state_owners import assign_state_owners
from support.examples import examples
from support.wide_layouts import holdings, wide_layout, wide_model

RUNS = 200
SEEDS = st.integers(0, 2**32)
FLOOR = ReplicationFloor(replicas=2)


def is_uneven(layout: Layout) -> bool:
    return any(stage.attention != stage.mlp for stages in layout.mesh for stage in stages)


def has_empty_run(layout: Layout) -> bool:
    runs = (
        run for stages in layout.mesh for stage in stages for run in stage.attention + stage.mlp
    )
    return any(run.first == run.end for run in runs)


def some_dead(random: Random, layout: Layout) -> set[int]:
    """A few ranks, a whole tensor group, or all."""
    if random.random() < 0.3:
        return set(random.choice(random.choice(layout.mesh)).group)
    count = random.choice([1, 1, 1, 1, 2, 2, 3, len(layout.ranks)])
    return set(random.sample(layout.ranks, min(count, len(layout.ranks))))


def state_of(layout: Layout) -> set[tuple[int, Block, StatePart]]:
    """(rank, block, WEIGHTS or OPTIMIZER) of all that ranks hold."""
    blocks = list(layout.blocks())
    weights = {(r, b, StatePart.WEIGHTS) for b in blocks for r in layout.holders(b)}
    return weights | {(r, b, StatePart.OPTIMIZER) for b in blocks for r in layout.state_holders(b)}


def is_lost(layout: Layout, dead: set[int]) -> bool:
    """No living rank has some block, or its optimizer state."""
    return any(
        dead.issuperset(layout.holders(block)) or dead.issuperset(layout.state_holders(block))
        for block in layout.blocks()
    )


def test_a_wide_layout_is_read_as_it_was_written_and_every_block_has_its_holders() -> None:
    drawn: Counter[str] = Counter()

    @settings(deadline=None, max_examples=examples(RUNS))
    @given(SEEDS)
    def holds(seed: int) -> None:
        layout = wide_layout(Random(seed))
        data = encode_layout(layout)
        assert decode_layout(data) == layout and encode_layout(decode_layout(data)) == data
        held = holdings(layout)
        blocks = list(layout.blocks())
        assert len(blocks) == len(set(blocks))
        for block in blocks:
            key = (block.kind, block.layer, block.index)
            holders = layout.holders(block)
            assert holders == tuple(sorted(rank for rank in held if key in held[rank]))
            assert holders and set(layout.state_holders(block)) <= set(holders)
        for block in layout.dense_blocks():
            holders = tuple(rank for rank in layout.ranks if layout.holds_dense(rank, block))
            assert holders == layout.holders(block)
        assert sum(map(len, held.values())) == sum(len(layout.holders(b)) for b in blocks)
        drawn["all"] += 1
        drawn["other cuts"] += not layout.has_equal_cuts
        drawn["uneven"] += is_uneven(layout)
        drawn["empty run"] += has_empty_run(layout)
        drawn["left out"] += bool(layout.standing_by)
        drawn["shared"] += bool(layout.shared_mlp_layers)
        drawn["owned"] += bool(layout.state_owners)
        drawn["stage shares"] += bool(layout.stage_shares)

    holds()
    assert min(drawn.values()) >= 0.2 * drawn["all"], drawn


def test_transfers_bring_exactly_what_is_lacking_from_ranks_that_have_it() -> None:
    drawn: Counter[str] = Counter()

    @settings(deadline=None, max_examples=examples(RUNS))
    @given(SEEDS)
    def brings(seed: int) -> None:
        random = Random(seed)
        model = wide_model(random)
        old, new = wide_layout(random, model), wide_layout(random, model, generation=2)
        dead = some_dead(random, old) if random.random() < 0.5 else set()
        living = set(old.ranks) - dead
        had, wanted = state_of(old), state_of(new)
        moves = diff_layouts(old, new, living=living)
        arrived: Counter[tuple[int, Block, StatePart]] = Counter()
        for move in moves:
            both = (StatePart.WEIGHTS, StatePart.OPTIMIZER)
            for part in both if move.part is StatePart.ALL else (move.part,):
                arrived[move.destination, move.block, part] += 1
                sources = {rank for rank, b, p in had if (b, p) == (move.block, part)} & living
                assert (move.source in sources) if sources else move.source is None
        assert max(arrived.values(), default=1) == 1, "nothing is sent twice"
        assert arrived.keys() == wanted - had
        pairs = {(m.destination, m.block) for m in moves if m.part is not StatePart.ALL}
        for rank, block in pairs:
            is_both = {(rank, block, StatePart.WEIGHTS), (rank, block, StatePart.OPTIMIZER)}
            if is_both <= arrived.keys():
                assert not living.intersection(old.state_holders(block)), "one copy has both"
        for part in StatePart:
            drawn[part] += any(move.part is part for move in moves)
        drawn["from storage"] += any(move.source is None for move in moves)
        drawn["all runs"] += 1

    brings()
    assert min(drawn.values()) >= 0.1 * drawn["all runs"], drawn


def test_survivors_keep_every_block_that_a_living_rank_has() -> None:
    drawn: Counter[str] = Counter()

    @settings(deadline=None, max_examples=examples(2 * RUNS))
    @given(SEEDS)
    def keeps(seed: int) -> None:
        random = Random(seed)
        layout = wide_layout(random)
        dead = some_dead(random, layout)
        drawn["all"] += 1
        if is_lost(layout, dead):
            with pytest.raises(LostStateError):
                shrink(layout, dead=dead, generation=2, floor=FLOOR)
            drawn["lost"] += 1
            return
        after = shrink(layout, dead=dead, generation=2, floor=FLOOR)
        assert after == shrink(layout, dead=sorted(dead), generation=2, floor=FLOOR)
        assert set(after.ranks) == set(layout.ranks) - dead
        assert bool(after.state_owners) == bool(layout.state_owners)
        moves = diff_layouts(layout, after, living=after.ranks)
        assert all(move.source is not None for move in moves)
        groups = {frozenset(stage.group): p for p in after.pipelines for stage in p.stages}
        for pipeline in layout.pipelines:
            if dead.isdisjoint(rank for stage in pipeline.stages for rank in stage.group):
                ends = {
                    p.ends
                    for group, p in groups.items()
                    if group.issuperset(pipeline.stages[0].group)
                }
                assert ends == {pipeline.ends}, "who lost nobody keeps its cuts"
                drawn["whole pipeline"] += 1
        most = max(layout.num_attention_shards, layout.num_mlp_shards)
        for rank in set(after.standing_by) - set(layout.standing_by):
            number, at = layout.place_of(rank)
            old = layout.mesh[at][number]
            groups_near = [
                stage.group
                for stages in after.mesh
                for stage in stages
                if stage.first_layer < old.end_layer and old.first_layer < stage.end_layer
            ]
            assert min(map(len, groups_near)) >= most, "who has room where it was has work"
        drawn["other cuts"] += not layout.has_equal_cuts
        drawn["fewer pipelines"] += len(after.pipelines) < len(layout.pipelines)

    keeps()
    assert min(drawn.values()) >= 0.05 * drawn["all"], drawn


def test_what_a_checkpoint_fills_needs_one_living_rank() -> None:
    @settings(deadline=None, max_examples=examples(RUNS))
    @given(SEEDS)
    def goes_on(seed: int) -> None:
        random = Random(seed)
        layout = wide_layout(random)
        dead = some_dead(random, layout)
        if dead == set(layout.ranks):
            with pytest.raises(LostStateError):
                shrink(layout, dead=dead, generation=2, is_restored=True)
            return
        after = shrink(layout, dead=dead, generation=2, floor=FLOOR, is_restored=True)
        assert set(after.ranks) == set(layout.ranks) - dead

    goes_on()


def test_who_joins_has_a_part_and_existing_pipelines_keep_their_cuts() -> None:
    drawn: Counter[str] = Counter()

    @settings(deadline=None, max_examples=examples(RUNS))
    @given(SEEDS)
    def joins(seed: int) -> None:
        random = Random(seed)
        layout = wide_layout(random)
        fresh = list(range(100, 100 + random.randint(1, 8)))
        after = grow(layout, newcomers=fresh, generation=2, floor=FLOOR)
        assert set(after.ranks) == {*layout.ranks, *fresh}
        most = max(layout.num_attention_shards, layout.num_mlp_shards)
        is_full = all(len(stage.group) >= most for stages in after.mesh for stage in stages)
        assert is_full or not set(after.standing_by) & set(fresh)
        for pipeline in layout.pipelines:
            assert after.pipelines[after.place_of(pipeline.leader)[1]].ends == pipeline.ends
        moves = diff_layouts(layout, after)
        assert all(move.source is not None for move in moves)
        assert bool(after.state_owners) == bool(layout.state_owners)
        drawn["all"] += 1
        drawn["other cuts"] += not layout.has_equal_cuts
        drawn["more pipelines"] += len(after.pipelines) > len(layout.pipelines)
        drawn["owned"] += bool(layout.state_owners)

    joins()
    assert min(drawn.values()) >= 0.1 * drawn["all"], drawn


def test_some_leave_while_others_join() -> None:
    drawn: Counter[str] = Counter()

    @settings(deadline=None, max_examples=examples(RUNS))
    @given(SEEDS)
    def goes_on(seed: int) -> None:
        random = Random(seed)
        layout = wide_layout(random)
        dead = some_dead(random, layout)
        staying = set(layout.ranks) - dead | set(range(100, 100 + random.randint(0, 4)))
        drawn["all"] += 1
        if is_lost(layout, dead):
            with pytest.raises(LostStateError):
                resize(layout, staying, generation=2, floor=FLOOR)
            return
        after = resize(layout, staying, generation=2, floor=FLOOR)
        assert set(after.ranks) == staying
        living = set(layout.ranks) - dead
        assert all(m.source is not None for m in diff_layouts(layout, after, living=living))
        drawn["resized"] += 1

    goes_on()
    assert drawn["resized"] >= 0.2 * drawn["all"]


@settings(deadline=None, max_examples=examples(RUNS))
@given(SEEDS)
def test_owners_are_even_and_mirrors_in_another_domain(seed: int) -> None:
    random = Random(seed)
    layout = replace(wide_layout(random), state_owners=())
    sizes = {block: random.randint(1, 9) for block in layout.owned_blocks()}
    node_of = {rank: rank // 4 for rank in layout.ranks}
    owned = assign_state_owners(layout, sizes=sizes, domain_of=node_of)
    load, both = (Counter(dict.fromkeys(layout.ranks, 0)) for _ in range(2))
    for block, owner in owned.state_owner_by_block.items():
        load[owner.owner] += sizes[block]
        both.update(dict.fromkeys(owner.ranks, sizes[block]))
    for block, owner in owned.state_owner_by_block.items():
        holders = layout.holders(block)
        assert load[owner.owner] <= min(load[rank] for rank in holders) + sizes[block]
        nodes = {node_of[rank] for rank in holders}
        assert (owner.mirror is None) == (len(holders) == 1)
        able = [rank for rank in holders if rank != owner.owner]
        if owner.mirror is not None and len(nodes) > 1:
            assert node_of[owner.mirror] != node_of[owner.owner]
            able = [rank for rank in able if node_of[rank] != node_of[owner.owner]]
        if owner.mirror is not None:
            assert both[owner.mirror] <= min(both[rank] for rank in able) + sizes[block]
    again = assign_state_owners(layout, before=owned, sizes=sizes, domain_of=node_of)
    assert again == owned, "nothing moves without need"


@pytest.mark.parametrize("num_ranks", [3, 4, 8])
@pytest.mark.parametrize("num_shards", [1, 4, 9])
def test_owners_stay_through_a_death_and_a_join(num_ranks: int, num_shards: int) -> None:
    flat = even_layout(
        ranks=range(num_ranks),
        num_layers=3,
        num_experts=2,
        replicas=2,
        num_virtual_shards=num_shards,
    )
    layout = assign_state_owners(flat)
    had = layout.state_owner_by_block
    after = shrink(layout, dead=[1], generation=2, floor=FLOOR)
    hit = {block for block, owner in had.items() if 1 in owner.ranks}
    moves = [m for m in diff_layouts(layout, after, living=after.ranks) if m.block in had]
    assert {move.part for move in moves} <= {StatePart.OPTIMIZER}
    assert {move.block for move in moves} >= hit, "each has two copies again"
    assert len(moves) <= 2 * len(hit), "one more where the mirror's load became too high"
    for now in (after, grow(after, newcomers=[50], generation=3, floor=FLOOR)):
        for end in (1, 2):  # what is owned, and what is owned or mirrored
            load = Counter(dict.fromkeys(now.ranks, 0))
            load.update(rank for owner in now.state_owners for rank in owner.ranks[:end])
            assert max(load.values()) - min(load.values()) <= 1
    more = [m for m in diff_layouts(after, now) if m.block in had]
    assert {move.destination for move in more} == {50}, "nobody else gets anything"


def test_the_mirror_of_a_dead_owner_keeps_the_state() -> None:
    flat = even_layout(ranks=range(3), num_layers=1, num_experts=0, replicas=1)
    layout = assign_state_owners(flat)
    owners = layout.state_owner_by_block
    dead = owners[Block(BlockKind.EMBEDDING)].owner
    after = shrink(layout, dead=[dead], generation=2, floor=FLOOR)
    for block, owner in owners.items():
        if owner.owner == dead:
            assert owner.mirror in after.state_owner_by_block[block].ranks
    with pytest.raises(LostStateError, match="owner and mirror"):
        shrink(layout, dead=owners[Block(BlockKind.HEAD)].ranks, generation=2)
