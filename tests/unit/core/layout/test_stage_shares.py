"""Shares of the rows by stage: what a layout can say, and which rows make a micro-batch."""

from dataclasses import replace

import pytest

from pacekeeper.core.layout.apportion import micro_batch_places, micro_batch_rows, num_micro_batches
from pacekeeper.core.layout.codec import decode_layout, encode_layout
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout, with_batch_shares

HOME = even_layout(ranks=range(4), num_layers=4, num_experts=2, replicas=1, num_stages=2)
Shares = tuple[tuple[float, ...], ...]


def shared(shares: Shares, layout: Layout = HOME) -> Layout:
    """By pipeline."""
    both = zip(layout.pipelines, shares, strict=True)
    return replace(layout, pipelines=tuple(replace(one, stage_shares=of) for one, of in both))


def test_each_stage_has_its_own_rows() -> None:
    layout = shared(((0.5, 0.2), (0.5, 0.8)))
    assert layout.rows_at(0, 10) == (range(5), range(5, 10))
    assert layout.rows_at(1, 10) == (range(2), range(2, 10))
    assert layout.most_rows(10) == 8 and HOME.most_rows(10) == 5
    assert layout.pipelines[0].share_at(1) == 0.2 and HOME.pipelines[0].share_at(1) == 0.5
    assert decode_layout(encode_layout(layout)) == layout


def test_batch_shares_take_the_place_of_stage_shares() -> None:
    layout = shared(((0.5, 0.2), (0.5, 0.8)))
    again = replace(layout, pipelines=with_batch_shares(layout.pipelines, (0.3, 0.7)))
    assert again.stage_shares == () and again.rows_at(1, 10) == (range(3), range(3, 10))


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        (((0.5,), (0.5,)), "2 stages has 1 shares"),
        (((0.5, 0.2), ()), "some pipelines have none"),
        (((0.5, 0.2), (0.5, 0.7)), "stage 1: shares must add up to 1"),
        (((0.5, -0.2), (0.5, 1.2)), "not negative"),
    ],
)
def test_impossible_stage_shares_are_refused(shares: Shares, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        shared(shares)


def test_stage_shares_need_equal_cuts() -> None:
    first, second = HOME.pipelines
    stages = (
        replace(second.stages[0], end_layer=1),
        replace(second.stages[1], first_layer=1),
    )
    other = replace(HOME, experts=((),) * 4, pipelines=(first, replace(second, stages=stages)))
    with pytest.raises(ValueError, match="not of the same layers"):
        shared(((0.5, 0.2), (0.5, 0.8)), other)


def test_rows_of_micro_batches_are_consecutive_in_every_pipeline() -> None:
    count = num_micro_batches(7, 2)
    assert count == 4 and num_micro_batches(8, 2) == 4 and num_micro_batches(0, 2) == 0
    first, second = range(7), range(7, 11)
    assert [list(micro_batch_places(first, k, 4)) for k in range(4)] == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3],
    ]
    assert [list(micro_batch_places(second, k, 4)) for k in range(4)] == [[8], [9], [10], [7]]
    for k in range(4):
        own = [*micro_batch_rows(first, k, 4), *micro_batch_rows(second, k, 4)]
        assert own == list(range(len(own)))
