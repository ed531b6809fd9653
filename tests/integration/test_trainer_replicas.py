"""A job spread over ranks and expert replicas computes what one rank alone computes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pacekeeper.core.layout import Layout
from pacekeeper.trainer.block_state import blocks_on
from support.training import (
    CONFIG,
    RANKS,
    Run,
    alone,
    even,
    in_groups,
    random_layout,
    skewed,
    train,
)
from support.worlds import run_processes, run_world

FLOAT32 = replace(CONFIG, dtype="float32")


def spread(run: Run) -> dict[int, dict[str, Tensor]]:
    """The run on four ranks that are threads."""
    return run_world(RANKS, lambda fabric: train(fabric, run))


def assert_same(
    states: dict[int, dict[str, Tensor]], reference: dict[str, Tensor], rtol: float, atol: float
) -> None:
    seen: set[str] = set()
    for rank, state in states.items():
        for name, ours in state.items():
            where = f"{name} on rank {rank}"
            torch.testing.assert_close(ours, reference[name], rtol=rtol, atol=atol, msg=where)
        seen |= set(state)
    assert seen == set(reference), "every part of the model lives somewhere"


def assert_holders_agree(layout: Layout, states: dict[int, dict[str, Tensor]]) -> None:
    """Bit-equal: each block on all that the layout names, and nowhere else."""
    for rank, state in states.items():
        held = {name.partition("/")[0] for name in state} - {"losses"}
        assert held == {str(block) for block in blocks_on(layout, rank)}
    names = {name for state in states.values() for name in state}
    for name in names:
        copies = [state[name] for state in states.values() if name in state]
        assert all(torch.equal(copies[0], copy) for copy in copies[1:]), name


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


HEADS = replace(CONFIG, num_heads=4)
PAIRS = [(0, 1), (3, 3)], [(2, 2), (7, 2)]  # (rank, heads)
ONE_GROUP = [[(7, 1), (0, 1), (3, 1), (2, 1)]]  # in any order of ranks


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


def test_real_processes_over_gloo_train_as_one_rank_does(tmp_path: Path) -> None:
    apart = [[(rank, 4)] for rank in RANKS]
    layouts = (in_groups(skewed(), *apart), in_groups(random_layout(3, 2), *PAIRS))
    run = Run(config=HEADS, layouts=layouts, steps=12)
    states = run_processes(RANKS, train, run, tmp_path)
    assert_same(states, alone(HEADS, 12, num_shards=4), rtol=1e-9, atol=1e-11)
    assert_holders_agree(layouts[-1], states)


def test_real_processes_in_float32_keep_holders_bit_equal(tmp_path: Path) -> None:
    states = run_processes(RANKS, train, Run(config=FLOAT32, layouts=(even(),), steps=10), tmp_path)
    reference = alone(FLOAT32, 10)["losses"]
    torch.testing.assert_close(states[7]["losses"], reference, rtol=1e-6, atol=0.0)
    assert_holders_agree(even(), states)


def test_the_loss_falls() -> None:
    losses = alone(CONFIG, 30)["losses"]
    assert losses[-3:].mean() < losses[:3].mean() - 1.0
