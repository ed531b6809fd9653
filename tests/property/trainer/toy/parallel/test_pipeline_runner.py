"""Stages, tensor groups and data-parallel pipelines together train as one rank alone."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import ExpertReplica, Layout, ShardRun
from support.examples import examples
from support.layouts import pipelines_of
from support.training import CONFIG, Run, alone, train
from support.worlds import ThreadFabric, run_world

DEEP = replace(CONFIG, num_layers=3, num_heads=4, num_microbatches=3, rows_per_step=6)
STEPS = 3
RANKS = (0, 1, 2, 3, 5, 6, 7, 9)


def even() -> Layout:
    """2 stages x 2 tensor x 2 data."""
    return even_layout(
        ranks=RANKS,
        num_layers=DEEP.num_layers,
        num_experts=DEEP.num_experts,
        replicas=2,
        num_virtual_shards=DEEP.num_heads,
        num_stages=2,
        tensor_size=2,
    )


def even_again(generation: int) -> Layout:
    return replace(even(), generation=generation)


def uneven(cut: int = 1) -> Layout:
    """Groups of one, two and three ranks, runs of one to four shards, unequal rows, other hosts."""
    stages = [
        (0, cut, ((ShardRun(0, 0, 3), ShardRun(1, 3, 4)), (ShardRun(2, 0, 4),))),
        (
            cut,
            3,
            (
                (ShardRun(9, 0, 2), ShardRun(5, 2, 4)),
                (ShardRun(7, 0, 1), ShardRun(6, 1, 2), ShardRun(3, 2, 4)),
            ),
        ),
    ]
    layers = []
    for layer in range(3):
        ranks = (0, 1, 2) if layer < cut else (3, 5, 6, 7, 9)
        layers.append(
            tuple(
                tuple(
                    ExpertReplica(rank, 0.5) for rank in sorted({ranks[e % 3], ranks[(e + 1) % 3]})
                )
                for e in range(DEEP.num_experts)
            )
        )
    return Layout(
        generation=2,
        num_attention_shards=4,
        num_mlp_shards=4,
        pipelines=pipelines_of(stages, [0.7, 0.3]),
        experts=tuple(layers),
        speeds=((1, 0.5),),
    )


def without_two() -> Layout:
    """Ranks 3 and 5 stand by."""
    stages = [
        (0, 2, ((ShardRun(0, 0, 3), ShardRun(1, 3, 4)), (ShardRun(6, 0, 4),))),
        (2, 3, ((ShardRun(2, 0, 4),), (ShardRun(7, 0, 1), ShardRun(9, 1, 4)))),
    ]
    experts = tuple(
        tuple(
            tuple(ExpertReplica(rank, 0.5) for rank in sorted({ranks[e % 3], ranks[(e + 1) % 3]}))
            for e in range(DEEP.num_experts)
        )
        for ranks in ((0, 1, 6), (0, 1, 6), (2, 7, 9))
    )
    return Layout(
        generation=3,
        num_attention_shards=4,
        num_mlp_shards=4,
        pipelines=pipelines_of(stages, [0.5, 0.5]),
        experts=experts,
        speeds=((3, 0.5),),
        standing_by=(3, 5),
    )


REFERENCE: dict[int, dict[str, Tensor]] = {}


def reference(micro_batches: int) -> dict[str, Tensor]:
    if micro_batches not in REFERENCE:
        config = replace(DEEP, num_microbatches=micro_batches)
        REFERENCE[micro_batches] = alone(config, STEPS, DEEP.num_heads)
    return REFERENCE[micro_batches]


def check(layouts: tuple[Layout, ...], micro_batches: int = 3, schedule: str = "1f1b") -> None:
    config = replace(DEEP, num_microbatches=micro_batches, schedule=schedule)
    expected = reference(1)
    run = Run(config=config, layouts=layouts, steps=STEPS)

    def body(fabric: ThreadFabric) -> dict[str, Tensor]:
        return train(fabric, run)

    seen = set()
    for state in run_world(RANKS, body).values():
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)
        seen |= set(state)
    assert seen == set(expected), "every block lives somewhere"


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_stages_and_groups_train_as_one_rank(schedule: str, micro_batches: int) -> None:
    check((even(),), micro_batches, schedule)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_so_do_groups_of_unequal_size_while_layers_shards_rows_and_experts_move(
    schedule: str,
) -> None:
    """Each step under another layout."""
    check((uneven(1), even_again(2), replace(uneven(2), generation=3)), 2, schedule)


def test_so_do_those_that_are_left_while_others_stand_by_and_come_back() -> None:
    check((even(), without_two(), even_again(4)), 2)


@given(st.permutations([0, 1, 2]))
@settings(deadline=None, max_examples=examples(3))
def test_whatever_the_order_of_layouts(order: list[int]) -> None:
    layouts = (even(), uneven(1), uneven(2))
    check(tuple(replace(layouts[i], generation=n + 1) for n, i in enumerate(order)))
