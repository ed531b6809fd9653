"""Wishes on pipelines: whoever lives works, and who comes fills the gaps that deaths have left."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.layout.diff import diff_layouts
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import ExpertReplica, Layout, ShardRun
from pacekeeper.core.layout.resize.grow import grow
from pacekeeper.core.layout.resize.shrink import ReplicationFloor, shrink
from support.layouts import groups_of, pipelines_of


def grid(num_stages: int, tensor_size: int, pipelines: int, replicas: int = 2) -> Layout:
    return even_layout(
        ranks=range(num_stages * tensor_size * pipelines),
        num_layers=4,
        num_experts=3,
        replicas=replicas,
        num_virtual_shards=8,
        num_stages=num_stages,
        tensor_size=tensor_size,
    )


def sizes(layout: Layout) -> list[list[int]]:
    return [list(map(len, groups)) for groups in groups_of(layout)]


def members(layout: Layout) -> list[list[list[int]]]:
    """The ranks of each stage and pipeline."""
    return [[[run.rank for run in group] for group in groups] for groups in groups_of(layout)]


shapes = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(2, 3))


@given(shapes, st.data())
def test_who_comes_takes_the_place_of_who_died(
    shape: tuple[int, int, int], data: st.DataObject
) -> None:
    first = grid(*shape)
    dead = data.draw(st.sampled_from(first.ranks))
    left = shrink(first, dead=[dead], generation=2, floor=ReplicationFloor(replicas=2))
    after = grow(left, newcomers=[100], generation=3, floor=ReplicationFloor(replicas=2))
    if shape[1] > 1:  # its group had others
        assert sizes(after) == sizes(first)
        assert after.place_of(100) == first.place_of(dead)
        assert [share for _, share in after.batch_shares] == pytest.approx(
            [1 / shape[2]] * shape[2]
        )
    assert set(after.ranks) == set(first.ranks) - {dead} | {100}
    assert all(move.source is not None for move in diff_layouts(left, after))


@given(shapes)
def test_as_many_newcomers_as_a_pipeline_has_make_one(shape: tuple[int, int, int]) -> None:
    first = grid(*shape)
    fresh = range(50, 50 + shape[0] * shape[1])
    after = grow(first, newcomers=list(fresh), generation=2, floor=ReplicationFloor(replicas=2))
    assert sizes(after) == sizes(grid(shape[0], shape[1], shape[2] + 1))
    assert after.mesh[:-1] == first.mesh, "who was there changes nothing"
    assert all(move.destination in fresh for move in diff_layouts(first, after))


@given(shapes, st.data())
def test_a_single_newcomer_has_a_part(shape: tuple[int, int, int], data: st.DataObject) -> None:
    first = grid(*shape)
    after = grow(first, newcomers=[77], generation=2, floor=ReplicationFloor(replicas=2))
    assert 77 in after.ranks and set(first.ranks) < set(after.ranks)


@given(shapes, st.data())
def test_everybody_who_lives_has_a_part_or_stands_by(
    shape: tuple[int, int, int], data: st.DataObject
) -> None:
    """Nobody is forgotten, and who joins finds nobody standing by while a group has room."""
    layout = grid(*shape)
    for generation in range(2, 5):
        fresh = range(generation * 100, generation * 100 + data.draw(st.integers(1, 30)))
        wider = grow(
            layout, newcomers=list(fresh), generation=generation, floor=ReplicationFloor(replicas=2)
        )
        assert set(wider.ranks) == {*layout.ranks, *fresh}
        dead = data.draw(st.sampled_from(wider.ranks))
        # What is lost with it comes from a checkpoint.
        layout = shrink(wider, dead=[dead], generation=generation, is_restored=True)
        assert set(layout.ranks) == set(wider.ranks) - {dead}
        is_full = all(size == 8 for stage in sizes(wider) for size in stage)
        assert is_full or not wider.standing_by


def slow_one_stands_by() -> Layout:
    """2 stages x 2 pipelines of 2 ranks each, but rank 0 is slow and has no part."""
    whole = grid(2, 2, 2)
    first, second = groups_of(whole)
    first[0] = (ShardRun(1, 0, 8),)
    experts = tuple(
        tuple((ExpertReplica(1, 0.5), ExpertReplica(4, 0.5)) for _ in layer)
        if number < 2
        else layer
        for number, layer in enumerate(whole.experts)
    )
    return replace(
        whole,
        pipelines=pipelines_of([(0, 2, first), (2, 4, second)], [0.4, 0.6]),
        experts=experts,
        speeds=((0, 0.3),),
        standing_by=(0,),
    )


def test_who_stands_by_since_it_is_slow_does_so_after_a_death_and_a_join() -> None:
    after = shrink(slow_one_stands_by(), dead=[5], generation=2, floor=ReplicationFloor(replicas=2))
    assert after.standing_by == (0,) and dict(after.speeds) == {0: 0.3}
    wider = grow(after, newcomers=[20], generation=3, floor=ReplicationFloor(replicas=2))
    assert wider.standing_by == (0,)


def test_who_stood_by_for_want_of_room_takes_a_place_when_others_join() -> None:
    layout = replace(slow_one_stands_by(), speeds=())
    after = shrink(layout, dead=[5], generation=2, floor=ReplicationFloor(replicas=2))
    assert after.standing_by == (0,), "a death moves no more than it must"
    wider = grow(after, newcomers=[20], generation=3, floor=ReplicationFloor(replicas=2))
    assert wider.standing_by == () and {wider.place_of(0)[0], wider.place_of(20)[0]} == {0}
    assert all(move.source is not None for move in diff_layouts(after, wider))


def test_who_stood_by_goes_on_from_a_checkpoint_where_nobody_else_is_left() -> None:
    after = shrink(
        slow_one_stands_by(),
        dead=range(1, 8),
        generation=2,
        floor=ReplicationFloor(),
        is_restored=True,
    )
    assert after.ranks == after.working == (0,)
    assert after.spans == (range(0, 4),)


def test_who_stands_by_may_die_and_nothing_changes() -> None:
    layout = slow_one_stands_by()
    after = shrink(layout, dead=[0], generation=2, floor=ReplicationFloor(replicas=2))
    assert after.ranks == layout.working and after.mesh == layout.mesh
    assert not diff_layouts(layout, after)


def test_a_pipeline_that_lost_a_whole_group_strengthens_the_others() -> None:
    first = grid(2, 2, 2, replicas=4)  # stage 0: (0, 1), (4, 5); stage 1: (2, 3), (6, 7)
    after = shrink(first, dead=[0, 1], generation=2)
    assert members(after) == [
        [[4, 5]],
        [[6, 7, 2, 3]],
    ]
    assert after.batch_shares == ((4, 1.0),)


def test_groups_that_are_left_of_different_pipelines_make_one() -> None:
    after = shrink(grid(2, 2, 2, replicas=4), dead=[0, 1, 6, 7], generation=2)
    assert members(after) == [
        [[4, 5]],
        [[2, 3]],
    ]


def test_a_pipeline_gets_as_many_rows_as_its_weakest_group_is_left_with() -> None:
    after = shrink(grid(2, 2, 2, replicas=4), dead=[3], generation=2)
    assert members(after)[1] == [[2], [6, 7]]
    assert dict(after.batch_shares) == {0: 1 / 3, 4: 2 / 3}


def test_layers_of_a_stage_that_nobody_is_left_of_go_to_a_neighbour_from_a_checkpoint() -> None:
    after = shrink(
        grid(3, 1, 2),
        dead=[1, 4],
        generation=2,
        floor=ReplicationFloor(replicas=2),
        is_restored=True,
    )
    on_spans = {span: after.ranks_of_layer(span.start) for span in after.spans}
    assert on_spans == {range(0, 3): (0, 3), range(3, 4): (2, 5)}


def test_a_pipelines_part_is_told_by_the_stages_that_are_left() -> None:
    first = replace(grid(3, 2, 2), speeds=((8, 0.5),))  # of stage 1, which nobody is left of
    after = shrink(first, dead=[2, 3, 8, 9, 10], generation=2, is_restored=True)
    assert dict(after.batch_shares) == pytest.approx({0: 2 / 3, 6: 1 / 3})
