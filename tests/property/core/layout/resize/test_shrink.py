"""Wishes about survivors: never a dead rank, every expert safe again, lost only what is lost."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pacekeeper.core.errors import ExitCode, LostStateError
from pacekeeper.core.layout.diff import diff_layouts
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import BlockKind, Layout
from pacekeeper.core.layout.resize.shrink import ReplicationFloor, shrink
from support.layouts import groups_of, layouts


def hosts_of(layout: Layout) -> dict[tuple[int, int], dict[int, float]]:
    """(layer, expert) -> rank -> share."""
    return {
        (layer, expert): {host.rank: host.share for host in hosts}
        for layer, layer_experts in enumerate(layout.experts)
        for expert, hosts in enumerate(layer_experts)
    }


def deaths(layout: Layout) -> st.SearchStrategy[set[int]]:
    return st.sets(st.sampled_from(layout.ranks), max_size=len(layout.ranks))


def is_lost(layout: Layout, dead: set[int]) -> bool:
    """Some block has no living holder."""
    return any(set(layout.holders(block)) <= dead for block in layout.blocks())


@given(layouts(), st.integers(1, 3), st.data())
def test_survivors_keep_every_expert_or_say_which_is_lost(
    layout: Layout, min_hosts: int, data: st.DataObject
) -> None:
    dead = data.draw(deaths(layout))
    if is_lost(layout, dead):
        with pytest.raises(LostStateError) as caught:
            shrink(layout, dead=dead, generation=2, floor=ReplicationFloor(replicas=min_hosts))
        assert caught.value.exit_code is ExitCode.LOST_STATE and caught.value.remedy
        return
    after = shrink(layout, dead=dead, generation=2, floor=ReplicationFloor(replicas=min_hosts))
    assert after.generation == 2
    assert after == shrink(
        layout, dead=sorted(dead), generation=2, floor=ReplicationFloor(replicas=min_hosts)
    )
    assert not set(after.ranks) & dead
    before = hosts_of(layout)
    for (layer, expert), hosts in hosts_of(after).items():
        staying = set(after.ranks_of_layer(layer))
        assert len(hosts) >= min(min_hosts, len(staying))
        assert sum(hosts.values()) == pytest.approx(1.0)
        assert set(before[layer, expert]) & staying <= set(hosts)
    # Every block a survivor needs can be had from a living rank.
    living = set(layout.ranks) - dead
    assert all(move.source is not None for move in diff_layouts(layout, after, living=living))


@given(layouts(), st.data())
def test_every_survivor_has_a_part_where_shards_are_enough(
    layout: Layout, data: st.DataObject
) -> None:
    dead = data.draw(deaths(layout))
    assume(not is_lost(layout, dead))
    after = shrink(layout, dead=dead, generation=2)
    left = [[{run.rank for run in g} - dead for g in groups] for groups in groups_of(layout)]
    assert len(after.pipelines) == min(sum(map(bool, groups)) for groups in left)
    for groups, now in zip(left, groups_of(after), strict=True):
        living = set().union(*groups)
        ranks = [run.rank for group in now for run in group]
        assert set(ranks) <= living
        assert len(ranks) == min(len(living), len(now) * layout.num_attention_shards)
        for group in now:  # who still has its group stays in it
            assert any({run.rank for run in group} >= old for old in groups if old)


@given(layouts(), st.data())
def test_a_group_that_lost_and_gained_nobody_keeps_its_runs(
    layout: Layout, data: st.DataObject
) -> None:
    dead = data.draw(deaths(layout))
    assume(not is_lost(layout, dead))
    after = shrink(layout, dead=dead, generation=2)
    before = {stage.ranks: stage.attention for stages in layout.mesh for stage in stages}
    for stages in after.mesh:
        for stage in stages:
            assert before.get(stage.ranks, stage.attention) == stage.attention


@given(layouts(), st.data())
def test_shares_of_untouched_experts_stay(layout: Layout, data: st.DataObject) -> None:
    dead = data.draw(deaths(layout))
    assume(not is_lost(layout, dead))
    after = shrink(layout, dead=dead, generation=2, floor=ReplicationFloor(replicas=1))
    for name, hosts in hosts_of(layout).items():
        kept = hosts_of(after)[name]
        if set(kept) == set(hosts):
            assert kept == pytest.approx(hosts)


@given(layouts(), st.data())
def test_two_deaths_one_after_the_other_lose_no_more_than_both_at_once(
    layout: Layout, data: st.DataObject
) -> None:
    first, second = (data.draw(deaths(layout)) for _ in range(2))
    assume(not is_lost(layout, first | second))
    at_once = shrink(layout, dead=first | second, generation=3)
    halfway = shrink(layout, dead=first, generation=2)
    # One pipeline that is left holds all once: who found no room in it stands by and holds nothing.
    assume(not is_lost(halfway, second))
    in_turn = shrink(halfway, dead=second, generation=3)
    assert not set(in_turn.ranks) & (first | second)
    # Everyone who held an expert before, and lives with a part, holds it still.
    for name, hosts in hosts_of(layout).items():
        for after in (at_once, in_turn):
            part = set(halfway.ranks_of_layer(name[0])) & set(after.ranks_of_layer(name[0]))
            assert set(hosts) & part <= set(hosts_of(after)[name])


@given(st.integers(3, 8), st.integers(1, 12))
def test_a_fresh_host_is_the_least_burdened_one(num_ranks: int, num_experts: int) -> None:
    before = even_layout(ranks=range(num_ranks), num_layers=1, num_experts=num_experts, replicas=2)
    after = shrink(before, dead=[0], generation=2)
    slots = {rank: len(after.experts_on(rank, 0)) for rank in after.ranks}
    for rank in after.ranks:
        fresh = set(after.experts_on(rank, 0)) - set(before.experts_on(rank, 0))
        if fresh:  # the last one it got: at that time nobody else without it had fewer slots
            others = set(after.ranks) - set(hosts_of(after)[0, max(fresh)])
            assert all(slots[rank] - 1 <= slots[other] for other in others)


@pytest.mark.parametrize(
    ("dead", "words"),
    [
        ({0, 1}, "no living rank holds layers 0 to 1"),
        ({0}, r"layer 0 expert 0: all its replicas \[0\]"),
    ],
)
def test_what_is_lost_is_named(dead: set[int], words: str) -> None:
    layout = even_layout(ranks=range(2), num_layers=2, num_experts=2, replicas=1)
    with pytest.raises(LostStateError, match=words):
        shrink(layout, dead=dead, generation=2)


@given(layouts())
def test_what_is_known_of_a_survivors_speed_stays_known(layout: Layout) -> None:
    dead = layout.ranks[:1]
    try:
        left = shrink(layout, dead=dead, generation=2)
    except LostStateError:
        return
    assert dict(left.speeds) == {rank: speed for rank, speed in layout.speeds if rank in left.ranks}


@given(layouts(), st.integers(1, 3), st.data())
def test_what_a_checkpoint_fills_needs_no_living_host(
    layout: Layout, min_hosts: int, data: st.DataObject
) -> None:
    dead = data.draw(deaths(layout))
    floor = ReplicationFloor(replicas=min_hosts)
    if not set(layout.ranks) - dead:
        with pytest.raises(LostStateError, match="no rank is left"):
            shrink(layout, dead=dead, generation=2, floor=floor, is_restored=True)
        return
    after = shrink(layout, dead=dead, generation=2, floor=floor, is_restored=True)
    assert not set(after.ranks) & dead
    for (layer, _), hosts in hosts_of(after).items():
        assert len(hosts) >= min(min_hosts, len(after.ranks_of_layer(layer)))
    if not is_lost(layout, dead):
        assert after == shrink(layout, dead=dead, generation=2, floor=floor)


@given(layouts(), st.integers(1, 3), st.data())
def test_experts_that_a_checkpoint_fills_need_no_living_host_but_dense_blocks_do(
    layout: Layout, min_hosts: int, data: st.DataObject
) -> None:
    """What lives stays where it is: of the others nobody gives anything up."""
    dead = data.draw(deaths(layout))
    floor = ReplicationFloor(replicas=min_hosts)
    lost = {block for block in layout.blocks() if set(layout.holders(block)) <= dead}
    if any(block.kind is not BlockKind.EXPERT for block in lost):
        with pytest.raises(LostStateError):
            shrink(layout, dead=dead, generation=2, floor=floor, are_experts_filled=True)
        return
    after = shrink(layout, dead=dead, generation=2, floor=floor, are_experts_filled=True)
    living = set(layout.ranks) - dead
    from_storage = {m.block for m in diff_layouts(layout, after, living=living) if m.source is None}
    assert from_storage == lost
    if not lost:
        assert after == shrink(layout, dead=dead, generation=2, floor=floor)
