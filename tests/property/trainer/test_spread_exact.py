"""A job spread over expert replicas and tensor shares computes what one rank alone computes.

Ranks are threads; over real processes: tests/integration/trainer/test_replicas.py.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pacekeeper.core.layout.layout import Layout
from support.training import (
    CONFIG,
    FLOAT32,
    HEADS,
    PAIRS,
    RANKS,
    Run,
    alone,
    assert_holders_agree,
    assert_same,
    even,
    in_groups,
    random_layout,
    skewed,
    train,
)
from support.worlds import run_world

ONE_GROUP = [[(7, 1), (0, 1), (3, 1), (2, 1)]]  # in any order of ranks


def spread(run: Run) -> dict[int, dict[str, Tensor]]:
    """The run on four ranks that are threads."""
    return run_world(RANKS, lambda fabric: train(fabric, run))


@pytest.mark.parametrize(
    "layout", [even(), skewed(), random_layout(5)], ids=["even", "skewed", "random"]
)
def test_any_layout_trains_as_one_rank_does_in_float64(layout: Layout) -> None:
    states = spread(Run(config=CONFIG, layouts=(layout,), steps=10))
    assert_same(states, alone(CONFIG, 10), rtol=1e-9, atol=1e-11)
    assert_holders_agree(layout, states)


def test_another_layout_every_step_changes_nothing() -> None:
    layouts = tuple(random_layout(seed, seed) for seed in range(1, 13))
    states = spread(Run(config=CONFIG, layouts=layouts, steps=12))
    assert_same(states, alone(CONFIG, 12), rtol=1e-9, atol=1e-11)
    assert_holders_agree(layouts[-1], states)


@pytest.mark.parametrize(
    ("base", "groups"),
    [(skewed(), PAIRS), (random_layout(5), PAIRS), (even(), ONE_GROUP)],
    ids=["skewed", "any", "one-group"],
)
def test_unequal_tensor_shares_train_as_one_rank_does(
    base: Layout, groups: Sequence[Sequence[tuple[int, int]]]
) -> None:
    layout = in_groups(base, *groups)
    states = spread(Run(config=HEADS, layouts=(layout,), steps=6))
    assert_same(states, alone(HEADS, 6, num_shards=4), rtol=1e-9, atol=1e-11)
    assert_holders_agree(layout, states)


def test_heads_change_hands_while_training_goes_on() -> None:
    """Shares become unequal, groups part and join; ranks of one group take replicas, too."""
    four = [[(rank, 4)] for rank in RANKS]
    turns = [four, PAIRS, ONE_GROUP, [[(0, 3), (7, 1)], [(3, 2), (2, 2)]], four]
    layouts = tuple(
        in_groups(random_layout(seed, seed), *groups) for seed, groups in enumerate(turns, start=1)
    )
    states = spread(Run(config=HEADS, layouts=layouts, steps=7))
    assert_same(states, alone(HEADS, 7, num_shards=4), rtol=1e-9, atol=1e-11)
    assert_holders_agree(layouts[-1], states)


def test_micro_batches_change_nothing_even_where_some_are_empty() -> None:
    # 9 rows over ranks with 3, 0, 3, 3 rows in 3 parts: one rank walks empty parts throughout.
    config = replace(CONFIG, num_microbatches=3)
    states = spread(Run(config=config, layouts=(skewed(),), steps=5))
    assert_same(states, alone(CONFIG, 5), rtol=1e-9, atol=1e-11)


def test_in_float32_losses_stay_within_rounding_and_holders_bit_equal() -> None:
    layout = skewed()
    states = spread(Run(config=FLOAT32, layouts=(layout,), steps=10))
    reference = alone(FLOAT32, 10)["losses"]
    for state in states.values():
        torch.testing.assert_close(state["losses"], reference, rtol=1e-6, atol=0.0)
    assert_holders_agree(layout, states)


def test_the_loss_falls() -> None:
    losses = alone(CONFIG, 30)["losses"]
    assert losses[-3:].mean() < losses[:3].mean() - 1.0
